"""The commands of `transom simulate`: a month of recovery, and a job's telemetry."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from pipelines.cli.options import JsonFile
from pipelines.errors import StatedError

if TYPE_CHECKING:
    from pipelines.month.assumptions import Fleet

DEFAULT = "month"


class _WithDefault(typer.core.TyperGroup):
    """`transom simulate` alone, or with options of the month, is `transom simulate month`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ("--help", "-h")):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


simulate = typer.Typer(
    cls=_WithDefault,
    help="month (the default): a month of failures at 1,024 and 16,384 GPUs; telemetry: what a job would tell.",
)


@simulate.command("month")
def month(
    fleet: Annotated[list[str] | None, typer.Option("--fleet", help="1k or 16k; both by default.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=8, help="A fleet of your own, with --mttf-hours.")] = None,
    mttf_hours: Annotated[
        float | None, typer.Option("--mttf-hours", min=0.01, help="Mean time between its failures.")
    ] = None,
    months: Annotated[int, typer.Option("--months", min=1, help="Of each fleet, one for each seed.")] = 5,
    days: Annotated[float | None, typer.Option("--days", min=0.1, help="Length of a month (30).")] = None,
    checkpoint_seconds: Annotated[
        float | None, typer.Option("--checkpoint-seconds", min=1.0, help="From one checkpoint to the next (300).")
    ] = None,
    restart_seconds: Annotated[
        float | None, typer.Option("--restart-seconds", min=1.0, help="From the stop to the first new step (300).")
    ] = None,
    wrong_culprit: Annotated[
        float | None, typer.Option("--wrong-culprit", min=0.0, max=1.0, help="Share of wrong first blames (0.03).")
    ] = None,
    user_bug_seen: Annotated[
        float | None, typer.Option("--user-bug-seen", min=0.0, max=1.0, help="Share of bugs known as such (0.5).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the first month.")] = 0,
    processes: Annotated[
        int, typer.Option("--processes", min=0, help="At the same time; 0: one for each processor.")
    ] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the bars as SVG.", dir_okay=False)] = None,
    json_file: JsonFile = None,
) -> None:
    """A month of failures under Transom's own recovery code and a virtual clock, beside other ways to run a job."""
    from dataclasses import asdict, replace

    from pipelines.cli.bench_recovery import show_figures
    from pipelines.figures import write_figures
    from pipelines.month.asked import ASKED
    from pipelines.month.assumptions import OURS, Assumptions
    from pipelines.month.report import svg_of, table_of
    from pipelines.month.simulate import outcome_of, simulate, with_overrides

    fleets = _fleets(fleet, gpus, mttf_hours)
    given = with_overrides(Assumptions(), days=days, wrong_culprit=wrong_culprit, user_bug_seen=user_bug_seen)
    costs = None
    if checkpoint_seconds is not None or restart_seconds is not None:
        costs = replace(
            OURS,
            checkpoint_seconds=checkpoint_seconds or OURS.checkpoint_seconds,
            restart_seconds=restart_seconds or OURS.restart_seconds,
        )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating months", total=None)
        simulated = simulate(
            fleets, given, months=months, seed=seed, processes=processes or len(os.sched_getaffinity(0)), costs=costs,
            tell=lambda done, all_of_them: progress.update(task, completed=done, total=all_of_them),
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table_of(simulated.summaries))
    whole = outcome_of(simulated)
    found = {figure.name for figure in whole.figures}
    console.print()
    show_figures(console, [asked for asked in ASKED if asked.name in found], whole)
    console.print("What is assumed, and where it comes from: docs/recovery-month.md", style="dim")
    if plot is not None:
        title = f"A simulated month: {given.days:g} days of failures"
        plot.write_text(svg_of(simulated.summaries, title), encoding="utf-8")
    if json_file is not None:
        write_figures(json_file, whole.figures, months=[asdict(one) for one in simulated.summaries], notes=whole.notes)


def _fleets(named: list[str] | None, gpus: int | None, mttf_hours: float | None) -> list[Fleet]:
    """The shipped fleets of these names, or the one that was described. Raises StatedError."""
    from pipelines.month.assumptions import FLEETS, HOUR_SECONDS, Fleet

    if (gpus is None) != (mttf_hours is None):
        raise StatedError("a fleet of your own needs both --gpus and --mttf-hours")
    unknown = set(named or ()) - set(FLEETS)
    if unknown:
        raise StatedError(f"there is no fleet {min(unknown)!r}; choose of {', '.join(FLEETS)}, or give --gpus")
    if gpus is not None and mttf_hours is not None:
        return [Fleet(f"{gpus:,}", gpus, mttf_hours * HOUR_SECONDS)]
    return [one for name, one in FLEETS.items() if not named or name in named]


@simulate.command("telemetry")
def telemetry(
    folder: Annotated[Path, typer.Argument(help="Where the simulated recording is written; must not hold one yet.")],
    ranks: Annotated[int, typer.Option(help="Ranks, 1 to 16,384.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps to train.")] = 400,
    seed: Annotated[int, typer.Option(help="The same seed gives the same messages.")] = 0,
    stages: Annotated[int, typer.Option(help="Pipeline stages; ranks are divided evenly.")] = 4,
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="Ranks on each node.")] = 8,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", help="Such as straggler:rank=5,at=200,steps=60,severity=0.2; may be repeated."),
    ] = None,
    noise: Annotated[Path, typer.Option("--noise", help="The recorded clean run that noise is resampled from.")] = Path(
        "data/clean"
    ),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the labels to this file too.", dir_okay=False)
    ] = None,
) -> None:
    """Write the telemetry of a simulated multi-rank job, with the right answers beside it, as a recording."""
    import msgspec

    from pipelines.simulation.recorded import write_simulated_recording
    from pipelines.simulation.scenario import Scenario, parse_fault

    scenario = Scenario(
        ranks=ranks, steps=steps, seed=seed, stages=stages, ranks_per_node=ranks_per_node, recording=noise,
        faults=tuple(parse_fault(text) for text in fault or ()),
    )  # fmt: skip
    console = Console(highlight=False)
    expected = steps * scenario.step_seconds
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=expected)

        def tell(count: int, at: float) -> None:
            progress.update(task, completed=min(at, expected), description=f"simulating, {count} messages")

        labels = write_simulated_recording(scenario, folder, tell)
    for label in labels.labels:
        who = ", ".join(f"rank {rank}" for rank in label.ranks) or label.node or "the whole job"
        console.print(f"{label.kind} ({who}) from step {label.onset_step}: {label.fault_class}")
    console.print(f"{labels.steps} steps of {labels.ranks} simulated ranks are in {folder}.", soft_wrap=True)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(labels), indent=2) + b"\n")
