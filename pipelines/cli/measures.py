"""Commands that measure: bench."""

from __future__ import annotations

import typer

from pipelines.cli.bench_ckpt import ckpt
from pipelines.cli.bench_e2e import e2e
from pipelines.cli.bench_ledger import api, ledger
from pipelines.cli.bench_recovery import recovery
from pipelines.cli.bench_replay import replay
from pipelines.cli.options import JsonFile

bench = typer.Typer(help="Measure a room; figures go to --json FILE.", no_args_is_help=True)


@bench.command("detect")
def detect(json_file: JsonFile = None) -> None:
    """Messages and log lines a second on one core, the cost of a step and the memory as ranks grow (about a minute)."""
    from rich.console import Console
    from rich.progress import Progress

    from pipelines.bench_detect import measurements
    from pipelines.figures import Figure, write_figures

    figures: list[Figure] = []
    console = Console(highlight=False)
    with Progress(console=console, transient=True) as progress:
        planned = measurements()
        task = progress.add_task("measuring", total=len(planned))
        for title, measure in planned:
            progress.update(task, description=title)
            figures += measure()
            progress.advance(task)
    for figure in figures:
        console.print(f"{figure.name} = {figure.value:,.6g} {figure.unit}")
    if json_file is not None:
        write_figures(json_file, figures)


bench.command("ckpt")(ckpt)
bench.command("recovery")(recovery)
bench.command("e2e")(e2e)
bench.command("replay")(replay)
bench.command("ledger")(ledger)
bench.command("api")(api)
