"""Commands that measure: bench."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import JsonFile

bench = typer.Typer(help="Measure a room; figures go to --json FILE.", no_args_is_help=True)


@bench.command("recovery")
def recovery(
    replays: Annotated[int, typer.Option(min=1, help="How often one verdict is delivered.")] = 1000,
    json_file: JsonFile = None,
) -> None:
    """Replay one verdict, kill -9 recovery between intent and act, and count the restarts that took effect."""
    from pipelines.bench_recovery import measure_replayed_restarts
    from pipelines.figures import Figure, write_figures

    with tempfile.TemporaryDirectory() as folder:
        restarts = measure_replayed_restarts(Path(folder), replays)
    figure = Figure("recovery.replayed_restarts", restarts, "restarts", n=replays)
    typer.echo(f"{figure.name} = {restarts} after {replays} deliveries of one verdict (right: 1)")
    if json_file is not None:
        write_figures(json_file, [figure])
    raise typer.Exit(0 if restarts == 1 else 1)
