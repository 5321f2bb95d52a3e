"""`transom bench recovery`: every figure of recovery, on this machine and on the schedulers that are there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import JsonFile
from pipelines.errors import StatedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from pipelines.asked import Asked
    from pipelines.bench_recovery.outcome import Outcome


def recovery(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A figure or a group; all where none is named.")
    ] = None,
    schedules: Annotated[int, typer.Option("--schedules", min=1, help="Random schedules.")] = 10_000,
    replays: Annotated[int, typer.Option("--replays", min=5, help="How often one verdict is delivered.")] = 1_000,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Of each timing on this machine.")] = 5,
    scheduler_trials: Annotated[
        int, typer.Option("--scheduler-trials", min=1, help="Of each timing on Slurm and Kubernetes.")
    ] = 20,
    processes: Annotated[
        int, typer.Option("--processes", min=0, help="That run schedules at the same time; 0: one for each processor.")
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the schedules.")] = 0,
    kubeconfig: Annotated[
        Path | None, typer.Option("--kubeconfig", help="Of the cluster to measure on.", dir_okay=False)
    ] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Where to write; on the disk to measure.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure recovery: schedules, replays, restarts of a real job beside torchrun's, schedulers (ten minutes)."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from pipelines.asked import chosen_groups
    from pipelines.bench_recovery.asked import ASKED, measured
    from pipelines.bench_recovery.outcome import Task, merged
    from pipelines.own_process import unwound_by_sigterm

    try:
        groups = chosen_groups(ASKED, tuple(only or ()), "transom bench recovery")
    except ValueError as error:
        raise StatedError(str(error)) from error
    console = Console(highlight=False)
    outcomes: list[Outcome] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="transom-bench-", dir=folder) as place,
        unwound_by_sigterm(),
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        shown = progress.add_task("planning")
        task = Task(
            Path(place), seed=seed, schedules=schedules, replays=replays, trials=trials,
            scheduler_trials=scheduler_trials, processes=processes or len(os.sched_getaffinity(0)),
            kubeconfig=kubeconfig,
        )  # fmt: skip
        for number, group in enumerate(groups, start=1):
            title = f"{number} of {len(groups)}: {group}"
            progress.update(shown, description=title)
            tell = lambda text, title=title: progress.update(shown, description=f"{title}: {text}")  # noqa: E731
            outcomes.append(measured(group, task.below(group), tell))
    whole = merged(outcomes)
    show_figures(console, [asked for asked in ASKED if asked.group in groups], whole)
    if json_file is not None:
        write_outcome(json_file, whole)
    if any(word in name for name in whole.missing for word in ("schedules", "replayed")):
        raise typer.Exit(1)


def show_figures(console: Console, table: Sequence[Asked], whole: Outcome) -> None:
    """Asked, measured, met: one line for each figure, then the notes."""
    from rich.markup import escape
    from rich.table import Table

    found = {figure.name: figure for figure in whole.figures}
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("figure", "what", "asked", "measured", ""):
        shown.add_column(name)
    for asked in table:
        figure = found.get(asked.name)
        if figure is None:
            reason = whole.missing.get(asked.name, "nothing measures it here")
            shown.add_row(asked.name, asked.what, asked.text, "not measured", f"[dim]{escape(reason)}[/]")
            continue
        verdict = "[green]met[/]" if asked.met_by(figure.value) else "[red]missed[/]"
        shown.add_row(asked.name, asked.what, asked.text, f"{figure.value:,.4g} {figure.unit}", verdict)
    console.print(shown)
    for note in whole.notes:
        console.print(note, style="dim", markup=False, soft_wrap=True)


def write_outcome(path: Path, whole: Outcome) -> None:
    """The figures, why others are missing, the notes and the times behind the figures."""
    from pipelines.figures import write_figures

    write_figures(path, whole.figures, missing=whole.missing, notes=whole.notes, rounds=whole.rounds)
