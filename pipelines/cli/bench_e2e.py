"""`transom bench e2e`: a real job that breaks a dozen times, under Transom and under torchrun."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.bench_recovery import show_figures, write_outcome
from pipelines.cli.options import JsonFile
from pipelines.errors import StatedError


def e2e(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="crashes or hangs, or a figure; both by default.")
    ] = None,
    faults: Annotated[int, typer.Option("--faults", min=1, help="How often the job breaks.")] = 12,
    mean_steps: Annotated[
        float, typer.Option("--mean-steps", min=1.0, help="Steps from one fault to the next, on average.")
    ] = 60.0,
    save_every: Annotated[int, typer.Option("--save-every", min=1, help="Steps from one checkpoint to the next.")] = 10,
    width: Annotated[int, typer.Option("--width", help="Of the model, a multiple of 32.")] = 192,
    layers: Annotated[int, typer.Option("--layers", help="Of the model.")] = 4,
    wait_for_watchdog: Annotated[
        bool, typer.Option("--wait-for-watchdog", help="Really wait 60 s at each hang, instead of charging them.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the faults.")] = 0,
    folder: Annotated[Path | None, typer.Option("--folder", help="Where to write; on the disk to measure.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Train the same job with the same faults under Transom and under torchrun, and compare (a quarter of an hour)."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ingest.clock import SystemClock
    from pipelines.asked import chosen_groups
    from pipelines.bench_e2e.asked import ASKED
    from pipelines.bench_e2e.compare import Size, compare, outcome_of
    from pipelines.bench_job.under_transom import BenchFailed
    from pipelines.extras import require
    from pipelines.own_process import unwound_by_sigterm

    require("ckpt", "`transom bench e2e` (PyTorch)")
    require("ledger", "`transom bench e2e` (record)")
    try:
        kinds = chosen_groups(ASKED, tuple(only or ()), "transom bench e2e")
    except ValueError as error:
        raise StatedError(str(error)) from error
    size = Size(
        faults=faults, mean_steps=mean_steps, save_every=save_every, width=width, layers=layers, seed=seed,
        wait_for_watchdog=wait_for_watchdog,
    )  # fmt: skip
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="transom-e2e-", dir=folder) as place,
        unwound_by_sigterm(),
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        shown = progress.add_task("planning")
        try:
            compared = compare(
                kinds, size, Path(place), SystemClock(), lambda text: progress.update(shown, description=text)
            )
        except BenchFailed as error:
            raise StatedError(str(error)) from error
    whole = outcome_of(compared, kinds)
    found = {figure.name for figure in whole.figures}
    show_figures(Console(highlight=False), [asked for asked in ASKED if asked.name in found], whole)
    if json_file is not None:
        write_outcome(json_file, whole)
