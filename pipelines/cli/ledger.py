"""Commands about the ledger itself: sql, snapshot, ledger rebuild."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pipelines.cli.options import Bootstrap, BusKind, Config, StateDir, settings_from

if TYPE_CHECKING:
    from pipelines.ledger.shapes import SqlAnswer

ledger = typer.Typer(help="The ledger itself: make it anew from the bus.", no_args_is_help=True)

SQL_ROWS = 1_000


def sql(
    query: Annotated[str, typer.Argument(help="One SELECT; samples are the table `sample`.")],
    folder: Annotated[
        Path | None,
        typer.Option("--ledger", help="A finished ledger (of a replay, a snapshot) instead of the live one."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many rows.")] = SQL_ROWS,
    config: Config = None,
    state_dir: StateDir = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write columns and rows to this file (- prints them).", allow_dash=True),
    ] = None,
) -> None:
    """Ask the ledger one SELECT, on a snapshot a few seconds old; nothing can be changed and no other file is read."""
    found = _ask_folder(folder, query, limit) if folder is not None else _ask_live(config, state_dir, query, limit)
    if json_file is not None:
        encoded = msgspec.json.encode(found, enc_hook=str)
        if str(json_file) == "-":
            typer.echo(encoded.decode())
        else:
            json_file.write_bytes(encoded + b"\n")
        return
    _show(found)


def _ask_live(config: Config, state_dir: StateDir, query: str, limit: int) -> SqlAnswer:
    from pipelines.cli.reads import client_of

    with client_of(settings_from(config, state_dir)) as client:
        return client.sql(query, limit)


def _ask_folder(folder: Path, query: str, limit: int) -> SqlAnswer:
    from pipelines.ledger.opening import FILE_NAME
    from pipelines.ledger.shapes import LedgerUnreadable
    from pipelines.ledger.snapshots import Snapshot
    from pipelines.ledger.sql import SqlDesk, answer_of

    file = folder.absolute() / FILE_NAME
    if not file.is_file():
        raise LedgerUnreadable(
            f"there is no ledger in {folder}; `transom replay --ledger` and `transom snapshot` make one"
        )
    stat = file.stat()
    as_it_is = Snapshot(file.parent, stat.st_mtime, stat.st_size)
    return answer_of(SqlDesk(lambda _: as_it_is).ask(query, limit))


def _show(found: SqlAnswer) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(*map(escape, found.columns))
    for row in found.rows:
        table.add_row(*(escape("" if value is None else str(value)) for value in row))
    if found.rows:
        console.print(table)
    more = "; there are more, give --limit" if found.truncated else ""
    console.print(f"{len(found.rows)} rows{more}", style="dim")


def snapshot(
    target: Annotated[
        Path | None, typer.Argument(help="Copy it to this new folder (default: leave it in place).")
    ] = None,
    config: Config = None,
    state_dir: StateDir = None,
) -> None:
    """Make a snapshot of the live ledger, which DuckDB and `transom sql --ledger` can open; prints its folder."""
    import shutil

    from pipelines.cli.reads import client_of
    from pipelines.ledger.shapes import LedgerWriteFailed

    if target is not None and target.exists():
        raise LedgerWriteFailed(f"{target} is there already; give a new folder")
    with client_of(settings_from(config, state_dir)) as client:
        made = Path(client.snapshot().folder)
    if target is None:
        typer.echo(str(made))
        return
    if not made.is_dir():
        raise LedgerWriteFailed(f"the snapshot lies on the ledger's own machine, in {made}; copy it there")
    aside = target.absolute().with_name(f"{target.name}.part")
    try:
        shutil.copytree(made, aside)
        aside.rename(target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise LedgerWriteFailed(f"{target} cannot be written ({error}); the snapshot is in {made}") from error
    typer.echo(str(target))


@ledger.command("rebuild")
def rebuild(
    config: Config = None, state_dir: StateDir = None, bus: BusKind = None, bootstrap_servers: Bootstrap = None
) -> None:
    """Make the ledger anew from the bus (stop `record` first); refused where the bus has lost what the ledger has."""
    from rich.console import Console

    from ingest.clock import SystemClock
    from pipelines.open_bus import open_bus
    from pipelines.places import Places
    from pipelines.rebuild import rebuild as made_anew

    settings = settings_from(config, state_dir, bus, bootstrap_servers)
    clock, places = SystemClock(), Places.of(settings)
    source = open_bus(settings, clock, client="rebuild")
    console = Console(stderr=True, highlight=False)
    try:
        with console.status("reading the bus") as status:
            done = made_anew(places.ledger, source, clock, lambda read: status.update(f"{read:,} records read"))
    finally:
        source.close()
    more = f"; {done.rejected} could not be read" if done.rejected else ""
    typer.echo(f"{done.records} records{more}; the ledger is in {places.ledger}")
    if done.before is not None:
        typer.echo(f"the one before is in {done.before}; delete it when you are content")
