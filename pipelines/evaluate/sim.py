"""How detection does on simulated jobs of many ranks, by severity, with the same rules beside it: `evaluate sim`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.progress import Progress
from rich.table import Table

from detectors.config import DetectorConfig
from detectors.logs.rule_book import RuleBook
from pipelines.evaluate.baselines import ScoredRun, Scorer, matched, score_run, threshold_of
from pipelines.evaluate.evaluation import EvaluateOptions, Evaluation
from pipelines.evaluate.faults import FALSE_PER_1K_MAX, OURS, figures, methods, tally_cells, told_tally
from pipelines.evaluate.matching import Matched, Outcome, Tally, tally
from pipelines.evaluate.sim_runs import SimulatedRun, run_simulation
from pipelines.figures import Figure
from pipelines.room_configs import detector_config
from pipelines.simulation.suite import SuiteRun, standard_suite

RANKS = (64, 512, 4_096)
QUICK_RANKS = (64,)
SEED = 7_004  # of what is published, taken before anybody looked at it; whoever tunes takes another
TUNING_SEED = 1
BASELINE_RANKS_MAX = 64  # beyond it the raw models take longer than the job
TUNING_CLEAN_RUNS = 5
IN_STEP_TIMES = frozenset(
    ("straggler", "throttle", "slow_node", "slow_link", "data_stall", "data_stall_all", "job_slow", "contended_node")
)
Kept = dict[int, list[tuple[SuiteRun, SimulatedRun]]]


def evaluate(path: Path | None, options: EvaluateOptions) -> Evaluation:
    """Run the standard suite through detection. `path`: the recorded run whose noise is drawn again."""
    config = detector_config(options.settings)
    sizes = options.ranks or (QUICK_RANKS if options.quick else RANKS)
    recording = Path("data/clean") if path is None else path
    kept: Kept = {}
    with Progress(console=options.console, transient=True) as progress:
        plan = {ranks: chosen_runs(ranks, SEED, recording, quick=options.quick) for ranks in sizes}
        total = sum(run.scenario.steps * ranks for ranks in plan for run in plan[ranks])
        task = progress.add_task("", total=total)
        done = 0.0
        for ranks, runs in plan.items():
            for run in runs:
                progress.update(task, description=f"simulating {run.name}")

                def tell(seconds: float, done: float = done, ranks: int = ranks) -> None:
                    progress.update(task, completed=done + seconds * ranks)

                kept.setdefault(ranks, []).append((run, _detected(run, config, tell)))
                done += run.scenario.steps * ranks
                if not options.console.is_terminal:  # where no bar is drawn an hour should not pass in silence
                    options.console.print(f"{run.name} is done, {done / total:.0%} of all")
        progress.update(task, description="baselines")
        others, reasons = _baselines(kept, recording, config, quick=options.quick)
    asked = {ranks: _sum(run for part, run in runs if part.part != "curve") for ranks, runs in kept.items()}
    whole = sum(asked.values(), Tally())
    found: list[Figure] = list(figures("sim", whole))
    for ranks, counts in asked.items():
        found += [
            Figure(f"{figure.name}_{ranks}", figure.value, figure.unit, n=figure.n) for figure in figures("sim", counts)
        ]
    curve = curve_of(kept)
    return Evaluation(
        figures=tuple(found),
        shown=(_sizes_table(asked), *_methods(asked, others), *reasons, _curve_table(curve), _kinds_table(kept),
               *_false_table(kept)),
        details={
            "sizes": {str(ranks): told_tally(counts) for ranks, counts in asked.items()},
            "curve": {str(ranks): {f"{severity:g}": list(pair) for severity, pair in points.items()}
                      for ranks, points in curve.items()},
            "baselines": {name: told_tally(counts) for name, counts in others.items()},
        },
    )  # fmt: skip


def chosen_runs(ranks: int, seed: int, recording: Path, *, quick: bool) -> tuple[SuiteRun, ...]:
    """The standard suite; quick: its first two runs with faults, and one of each other part."""
    runs = standard_suite(ranks, seed, recording)
    if not quick:
        return runs
    first = {"faults": 2, "curve": 1, "clean": 1}
    return tuple(run for part, count in first.items() for run in [run for run in runs if run.part == part][:count])


def curve_of(kept: Kept) -> dict[int, dict[float, tuple[int, int]]]:
    """Found and asked by severity, for each world size: all kinds that have a severity and pass by themselves."""
    out: dict[int, dict[float, tuple[int, int]]] = {}
    for ranks, runs in kept.items():
        points: dict[float, tuple[int, int]] = {}
        for _, run in runs:
            for outcome in run.matched.outcomes:
                if outcome.label.severity and outcome.label.right.must_be_found and outcome.label.ended_at is not None:
                    found, asked = points.get(outcome.label.severity, (0, 0))
                    points[outcome.label.severity] = (found + outcome.found, asked + 1)
        out[ranks] = dict(sorted(points.items()))
    return out


def curve_markdown(curve: Mapping[int, Mapping[float, tuple[int, int]]]) -> str:
    """The curve as a table of docs: a row for each severity, a bar of ten for each world size."""
    sizes = list(curve)
    lines = [
        "| severity | " + " | ".join(f"{ranks:,} ranks" for ranks in sizes) + " |",
        "| --- |" + " --- |" * len(sizes),
    ]
    for severity in sorted({severity for points in curve.values() for severity in points}):
        cells = []
        for ranks in sizes:
            found, asked = curve[ranks].get(severity, (0, 0))
            cells.append(f"`{_bar(found / asked)}` {found / asked:.2f} ({asked})" if asked else "")
        lines.append(f"| {100 * severity:.0f} % | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _bar(share: float) -> str:
    full = round(10 * share)
    return "█" * full + "·" * (10 - full)


def _detected(run: SuiteRun, config: DetectorConfig, tell: Callable[[float], None]) -> SimulatedRun:
    arrays = run.scenario.ranks <= BASELINE_RANKS_MAX and run.part != "curve"
    return run_simulation(run.name, run.scenario, config, RuleBook.shipped(), arrays=arrays, tell=tell)


def _sum(runs: Iterable[SimulatedRun]) -> Tally:
    return sum((tally(run.matched, run.clean_steps) for run in runs), Tally())


def _baselines(
    kept: Kept, recording: Path, config: DetectorConfig, *, quick: bool
) -> tuple[dict[str, Tally], list[str]]:
    """Rules and raw models on the sizes where they apply; thresholds from clean runs of another seed."""
    scorers, reasons = methods()
    out: dict[str, Tally] = {}
    for ranks in (ranks for ranks in kept if ranks <= BASELINE_RANKS_MAX):
        clean = [run for run in standard_suite(ranks, TUNING_SEED, recording) if run.part == "clean"]
        tuning = [
            run_simulation(run.name, run.scenario, config, RuleBook.shipped(), arrays=True, detect=False)
            for run in clean[: 1 if quick else TUNING_CLEAN_RUNS]
        ]
        for name, scorer in scorers.items():

            def scored(runs: Iterable[SimulatedRun], scorer: Scorer = scorer) -> list[ScoredRun]:
                return [
                    score_run(scorer, run.arrays, run.labels, run.clean_steps) for run in runs if run.arrays is not None
                ]

            threshold = threshold_of(scored(tuning), FALSE_PER_1K_MAX)
            pairs = matched(scored(run for _, run in kept[ranks]), threshold)
            counts = sum((tally(_timed(result), run.clean_steps) for run, result in pairs), Tally())
            out[name] = out.get(name, Tally()) + counts
    if out:
        out = {OURS: _timed_ours(kept), **out}
    return out, reasons


def _timed_ours(kept: Kept) -> Tally:
    runs = [run for ranks, runs in kept.items() if ranks <= BASELINE_RANKS_MAX for _, run in runs if run.arrays]
    return sum((tally(_timed(run.matched), run.clean_steps) for run in runs), Tally())


def _timed(result: Matched) -> Matched:
    """Only what step times can show; what was said for no reason stays."""
    return Matched(tuple(outcome for outcome in result.outcomes if outcome.label.kind in IN_STEP_TIMES), result.false)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _sizes_table(asked: Mapping[int, Tally]) -> Table:
    table = _table("Simulated jobs, faults of 10 % and more", "ranks", "faults", "recall", "culprit", "F1", "false/1k",
                   "delay", "half by")  # fmt: skip
    for ranks, counts in asked.items():
        table.add_row(f"{ranks:,}", str(counts.faults), *tally_cells(counts))
    return table


def _methods(asked: Mapping[int, Tally], others: Mapping[str, Tally]) -> tuple[Table, ...]:
    if not others:
        return ()
    table = _table(
        f"Faults that show in step times, at most {BASELINE_RANKS_MAX} ranks",
        "method", "recall", "culprit", "F1", "false/1k", "delay", "half by",
    )  # fmt: skip
    for name, counts in others.items():
        table.add_row(name, *tally_cells(counts))
    return (table,)


def _curve_table(curve: Mapping[int, Mapping[float, tuple[int, int]]]) -> Table:
    table = _table("Found by severity", "severity", *(f"{ranks:,} ranks" for ranks in curve))
    for severity in sorted({severity for points in curve.values() for severity in points}):
        cells = []
        for points in curve.values():
            found, count = points.get(severity, (0, 0))
            cells.append(f"{_bar(found / count)} {found}/{count}" if count else "-")
        table.add_row(f"{100 * severity:.0f} %", *cells)
    return table


def _kinds_table(kept: Kept) -> Table:
    table = _table("What was said of each kind", "kind", "n", "found", "culprit", "said")
    outcomes: list[Outcome] = [
        outcome
        for runs in kept.values()
        for part, run in runs
        if part.part != "curve"
        for outcome in run.matched.outcomes
    ]
    for kind in sorted({outcome.label.kind for outcome in outcomes}):
        some = tuple(outcome for outcome in outcomes if outcome.label.kind == kind)
        counts = tally(Matched(some, ()))
        said = Counter(outcome.said for outcome in some).most_common(4)
        table.add_row(
            kind, str(len(some)), str(counts.found) if counts.faults else "silence is right",
            f"{counts.culprits}/{counts.blamed}" if counts.blamed else "-",
            ", ".join(f"{name} {count}" for name, count in said),
        )  # fmt: skip
    return table


def _false_table(kept: Kept) -> Sequence[Table]:
    rows = [(run.name, story) for runs in kept.values() for _, run in runs for story in run.matched.false]
    if not rows:
        return ()
    table = _table("Said for no reason (the first 20)", "run", "class", "said")
    table.columns[2].justify = "left"
    for name, story in rows[:20]:
        table.add_row(name, str(story.fault_class), story.summary)
    return (table,)
