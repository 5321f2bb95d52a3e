"""How detection does on real faults, beside simple rules and raw models on the same steps: `evaluate faults`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.progress import Progress
from rich.table import Table

from detectors.ensemble.models import EnsembleUnavailable, Model, load_model
from pipelines.evaluate.baselines import (
    ScoredRun,
    Scorer,
    matched,
    model_scorer,
    rules,
    score_run,
    threshold_of,
    total,
)
from pipelines.evaluate.brought import told_brought
from pipelines.evaluate.evaluation import CannotEvaluate, EvaluateOptions, Evaluation
from pipelines.evaluate.expectations import IN_STEP_TIMES
from pipelines.evaluate.fault_runs import FaultRun, evaluate_run, labelled_runs, told
from pipelines.evaluate.feedback import added, feedback_table
from pipelines.evaluate.matching import Matched, Outcome, Tally, tally
from pipelines.figures import Figure

DEFAULT_FOLDER = Path("data/faults-small")
FALSE_PER_1K_MAX = 0.1  # the budget of every method
MODELS = ("PCA", "IForest", "HBOS", "KNN")
OURS = "transom"
SEVERITY_NAMES: Mapping[float, str] = {0.25: "mild", 0.5: "middle", 1.0: "strong"}


def evaluate(path: Path | None, options: EvaluateOptions) -> Evaluation:
    """Replay each run of a corpus (or of recordings) and score it. Figures are of the held-out part where there is one.

    Raises CannotEvaluate and NotARecording.
    """
    folder = DEFAULT_FOLDER if path is None else path
    if not folder.is_dir():
        raise CannotEvaluate(f"there is no folder {folder}; `transom record-faults {folder}` makes a corpus there")
    settings = options.settings
    runs: list[FaultRun] = []
    with Progress(console=options.console, transient=True) as progress:
        todo = labelled_runs(folder)
        task = progress.add_task("replaying", total=len(todo))
        for place, corpus in todo:
            progress.update(task, description=f"replaying {place.name}")
            runs.append(evaluate_run(place, corpus, settings))
            progress.advance(task)
        held_out = [run for run in runs if run.part == "held-out"] or runs
        tuning = [run for run in runs if run.part == "tuning"]
        progress.update(task, description="baselines")
        others, reasons = _baselines(tuning, held_out)
    ours = _sum(held_out)
    rows = {OURS: (ours, _timed_only(held_out)), **others}
    counts = added(run.feedback for run in runs)
    shown = [
        _methods_table(rows, held_out),
        *reasons,
        _kinds_table([outcome for run in held_out for outcome in run.matched.outcomes]),
        *_severity_table([outcome for run in held_out for outcome in run.matched.outcomes]),
        *(_false_table(held_out) if ours.false else ()),
        *((feedback_table(counts),) if counts else ()),
        told_brought(held_out),
    ]
    return Evaluation(
        figures=figures("faults", ours),
        shown=tuple(shown),
        details={
            "baselines": {name: told_tally(all_) for name, (all_, _) in rows.items()},
            "baselines_step_times": {name: told_tally(timed) for name, (_, timed) in rows.items()},
            "feedback": {name: value._asdict() for name, value in counts.items()},
            "runs": [told(run) for run in runs],
        },
    )


def figures(name: str, counts: Tally) -> tuple[Figure, ...]:
    """The figures of one tally under their public names."""
    found = [
        Figure(f"{name}.recall", round(counts.recall, 4), "ratio", n=counts.faults),
        Figure(f"{name}.culprit", round(counts.culprit, 4), "ratio", n=counts.blamed),
        Figure(f"{name}.false_per_1k", round(counts.false_per_1k, 4), "verdicts/1000 steps", n=counts.clean_steps),
    ]
    for quantile, label in ((0.5, "p50"), (0.9, "p90")):
        value = round(counts.delay(quantile), 3)
        found.append(Figure(f"{name}.delay_{label}_seconds", value, "s", n=len(counts.delays)))
    return tuple(figure for figure in found if figure.n)  # nothing was measured where n is 0


def told_tally(counts: Tally) -> dict[str, float | int]:
    """A tally in a form that JSON can carry."""
    return {
        "recall": counts.recall, "culprit": counts.culprit, "f1": counts.f1, "false_per_1k": counts.false_per_1k,
        "delay_p50_seconds": counts.delay(0.5), "delay_p90_seconds": counts.delay(0.9),
        "half_found_seconds": counts.found_within(0.5), "faults": counts.faults,
        "found": counts.found, "false": counts.false, "clean_steps": counts.clean_steps,
    }  # fmt: skip


def methods() -> tuple[dict[str, Scorer], list[str]]:
    """Every baseline that can run here, and why the others cannot, in sentences."""
    found = rules()
    reasons = []
    for name in MODELS:
        try:
            load_model(name)
        except EnsembleUnavailable as error:
            reasons.append(f"Without the baseline {name} alone: {error}.")
            continue
        found[f"{name} alone"] = model_scorer(_maker(name))
    return found, reasons


def _maker(name: str) -> Callable[[], Model]:
    return lambda: load_model(name)


def _baselines(
    tuning: Sequence[FaultRun], held_out: Sequence[FaultRun]
) -> tuple[dict[str, tuple[Tally, Tally]], list[str]]:
    """Each baseline's counts over all faults and over those that show in step times."""
    if not tuning:
        return {}, ["Without baselines: there is no tuning part to choose their thresholds on."]
    scorers, reasons = methods()
    out = {}
    for name, scorer in scorers.items():
        scored = {part: [run for run in map(_scored_by(scorer), runs) if run is not None]
                  for part, runs in (("tuning", tuning), ("held-out", held_out))}  # fmt: skip
        threshold = threshold_of(scored["tuning"], FALSE_PER_1K_MAX)
        pairs = matched(scored["held-out"], threshold)
        out[name] = (total(pairs), total((run, _timed_outcomes(result)) for run, result in pairs))
    return out, reasons


def _scored_by(scorer: Scorer) -> Callable[[FaultRun], ScoredRun | None]:
    def scored(run: FaultRun) -> ScoredRun | None:
        return None if run.arrays is None else score_run(scorer, run.arrays, run.labels, run.clean_steps)

    return scored


def _timed_outcomes(result: Matched) -> Matched:
    """Only what step times can show; what was said for no reason stays."""
    return Matched(tuple(outcome for outcome in result.outcomes if outcome.label.kind in IN_STEP_TIMES), result.false)


def _sum(runs: Iterable[FaultRun]) -> Tally:
    out = Tally()
    for run in runs:
        out += tally(run.matched, run.clean_steps)
    return out


def _timed_only(runs: Iterable[FaultRun]) -> Tally:
    out = Tally()
    for run in runs:
        out += tally(_timed_outcomes(run.matched), run.clean_steps)
    return out


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table


def _methods_table(rows: Mapping[str, tuple[Tally, Tally]], runs: Sequence[FaultRun]) -> Table:
    kinds = {label.kind for run in runs for label in run.labels}
    table = _table(
        f"{len(runs)} runs, {len(kinds)} kinds of faults; all faults, then those that show in step times",
        "method", "recall", "culprit", "F1", "false/1k", "delay", "half by",
        "recall", "culprit", "F1", "delay", "half by",
    )  # fmt: skip
    for name, (all_, timed) in rows.items():
        table.add_row(
            name, *tally_cells(all_), *(cell for index, cell in enumerate(tally_cells(timed)) if index != 3)
        )  # fmt: skip
    return table


def tally_cells(counts: Tally) -> tuple[str, str, str, str, str, str]:
    """Recall, culprit, F1, false per 1,000 clean steps, median delay of those found, and when half of all are found."""
    delay = f"{counts.delay(0.5):.1f} s" if counts.delays else "-"
    half = counts.found_within(0.5)
    return (
        _share(counts.recall), _share(counts.culprit), f"{counts.f1:.2f}", f"{counts.false_per_1k:.2f}", delay,
        f"{half:.1f} s" if math.isfinite(half) else "never",
    )  # fmt: skip


def _share(value: float) -> str:
    return "-" if value != value else f"{value:.2f}"


def _kinds_table(outcomes: Sequence[Outcome]) -> Table:
    """What was said of each kind: the confusion, and delays."""
    table = _table("What was said of each kind", "kind", "n", "found", "culprit", "delay", "said")
    for kind in dict.fromkeys(outcome.label.kind for outcome in outcomes):
        some = [outcome for outcome in outcomes if outcome.label.kind == kind]
        counts = tally(Matched(tuple(some), ()))
        said = Counter(outcome.said for outcome in some)
        found = f"{counts.found}" if counts.faults else "silence is right"
        table.add_row(
            kind, str(len(some)), found, f"{counts.culprits}/{counts.blamed}" if counts.blamed else "-",
            f"{counts.delay(0.5):.1f} s" if counts.delays else "-",
            ", ".join(f"{name} {count}" for name, count in said.most_common()),
        )  # fmt: skip
    return table


def _severity_table(outcomes: Sequence[Outcome]) -> tuple[Table, ...]:
    """Recall by severity, of the kinds that have several."""
    table = _table("Found by severity", "kind", *SEVERITY_NAMES.values())
    for kind in dict.fromkeys(outcome.label.kind for outcome in outcomes):
        some = [outcome for outcome in outcomes if outcome.label.kind == kind and outcome.label.right.must_be_found]
        if len({outcome.label.severity for outcome in some}) < 2:
            continue
        cells = []
        for severity in SEVERITY_NAMES:
            these = [outcome for outcome in some if outcome.label.severity == severity]
            cells.append(f"{sum(outcome.found for outcome in these)}/{len(these)}" if these else "-")
        table.add_row(kind, *cells)
    return (table,) if table.row_count else ()


def _false_table(runs: Sequence[FaultRun]) -> tuple[Table]:
    table = _table("Said for no reason", "run", "class", "said")
    table.columns[2].justify = "left"
    for run in runs:
        for story in run.matched.false:
            table.add_row(run.name, str(story.fault_class), story.summary)
    return (table,)
