"""`transom bench ledger` and `bench api`: what the ledger holds and how quickly it answers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import JsonFile

if TYPE_CHECKING:
    from pipelines.asked import Asked
    from pipelines.figures import Figure

Folder = Annotated[Path | None, typer.Option("--folder", help="Where to write; on the disk to measure.")]
Measure = Callable[[Path, Callable[[str], None]], "list[Figure]"]


def ledger(folder: Folder = None, json_file: JsonFile = None) -> None:
    """Ten million samples: their size, and how long a chart of all ranks takes (half a minute)."""
    from pipelines.bench_ledger.asked import LEDGER
    from pipelines.bench_ledger.sizes import measure_sizes

    _run(LEDGER, [measure_sizes], folder, json_file)


def api(folder: Folder = None, json_file: JsonFile = None) -> None:
    """Reads over HTTP beside 1,000 new verdicts a second, with a million in the ledger (about a minute)."""
    from pipelines.bench_ledger.asked import API
    from pipelines.bench_ledger.reads import measure_reads

    _run(API, [measure_reads], folder, json_file)


def _run(table: Sequence[Asked], measures: Sequence[Measure], folder: Path | None, json_file: Path | None) -> None:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from pipelines.bench_recovery.outcome import Outcome
    from pipelines.cli.bench_recovery import show_figures, write_outcome
    from pipelines.extras import require
    from pipelines.own_process import unwound_by_sigterm

    require("ledger", "this bench (record)")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    figures: list[Figure] = []
    with unwound_by_sigterm(), Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        shown = progress.add_task("preparing")
        for measure in measures:
            with tempfile.TemporaryDirectory(prefix="transom-l-", dir=folder) as place:
                figures += measure(Path(place), lambda text: progress.update(shown, description=text))
    whole = Outcome(figures=figures)
    show_figures(Console(highlight=False), list(table), whole)
    if json_file is not None:
        write_outcome(json_file, whole)
