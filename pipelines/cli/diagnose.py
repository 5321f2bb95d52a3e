"""The command that reads logs and says what broke first: diagnose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

BAD_USE = 2
NAME_CHARACTERS_MAX = 40


def diagnose(
    paths: Annotated[list[str], typer.Argument(help="Log files, folders of them (also .gz), or - for standard input.")],
    rules: Annotated[
        Path | None, typer.Option("--rules", help="Folder of your own log rules, before ours.", file_okay=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the diagnosis to this file, or - for standard output.")
    ] = None,
) -> None:
    """Read a job's logs once; say what broke first, on which rank and node, and what to do. Needs no service.

    Exit code: 0 whether a cause was found or not, 2 where a path or a rule is wrong.
    """
    from pipelines.diagnose import CannotDiagnose, gather, rules_of
    from pipelines.diagnose import diagnose as read_and_conclude
    from pipelines.diagnose_show import show

    try:
        reading, book = gather(paths), rules_of(rules)
    except CannotDiagnose as error:
        typer.echo(f"transom: {error}", err=True)
        raise typer.Exit(BAD_USE) from error
    quiet = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=quiet, transient=True, disable=not quiet.is_terminal) as bar:
        task = bar.add_task("reading", total=reading.total_bytes or None)
        done = {"before": 0, "file": 0}
        current = ""

        def told(source: str, position: int) -> None:
            nonlocal current
            if source != current:
                done["before"] += done["file"]
                current = source
            done["file"] = position
            bar.update(task, completed=done["before"] + position, description=source[-NAME_CHARACTERS_MAX:])

        stream = sys.stdin.buffer if sys.stdin is not None else None  # Python has none where it was closed
        found = read_and_conclude(reading, book, stream, told)
    if json_file is not None:
        notes = [{"source": note.source, "why": note.why} for note in reading.notes]
        tree = {"diagnosis": found, "not_read": {"count": reading.skipped, "first": notes}}
        text = msgspec.json.format(msgspec.json.encode(tree), indent=2) + b"\n"
        if str(json_file) == "-":
            sys.stdout.buffer.write(text)
            return
        try:
            json_file.write_bytes(text)
        except OSError as error:
            typer.echo(f"transom: {json_file} cannot be written ({error.strerror}); give another --json", err=True)
            raise typer.Exit(BAD_USE) from error
    show(found, reading, Console(highlight=False))
