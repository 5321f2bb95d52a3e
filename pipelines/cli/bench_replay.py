"""`transom bench replay`: how much faster than it was a recorded run is replayed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pipelines.cli.options import JsonFile


def replay(json_file: JsonFile = None) -> None:
    """Replay a made-up run of 1,024 ranks on one core, as a table and as a recording: samples a second, and how much
    faster than it was."""
    from rich.console import Console

    from pipelines.bench_replay import measure_recording, measure_table, write_made_up_recording, write_made_up_table
    from pipelines.figures import write_figures

    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        with console.status("writing the table"):
            write_made_up_table(Path(folder))
        with console.status("replaying it"):
            figures = measure_table(Path(folder))
        with console.status("writing the recording"):
            write_made_up_recording(Path(folder))
        with console.status("replaying it"):
            figures += measure_recording(Path(folder))
    for figure in figures:
        console.print(f"{figure.name} = {figure.value:,.6g} {figure.unit}")
    if json_file is not None:
        write_figures(json_file, figures)
