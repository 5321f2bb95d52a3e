"""Commands about the machine and the bus: doctor, topics."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ingest.clock import SystemClock
from pipelines.cli.options import AsJson, Bootstrap, BusKind, Config, StateDir, settings_from

topics = typer.Typer(help="The topics of the bus.", no_args_is_help=True)

STYLES = {"ok": ("green", "ok"), "note": ("yellow", "note"), "missing": ("red", "missing")}


def doctor(
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
    as_json: AsJson = False,
) -> None:
    """Say what is missing on this machine, what it costs, and what to do."""
    from pipelines.doctor import examine

    findings = examine(settings_from(config, state_dir, bus, bootstrap_servers), SystemClock())
    if as_json:
        typer.echo(msgspec.json.encode([asdict(finding) for finding in findings]).decode())
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for finding in findings:
            style, word = STYLES[finding.grade]
            mend = f" → {finding.mend}" if finding.mend else ""
            table.add_row(f"[{style}]{word}[/]", escape(finding.name), escape(f"{finding.text}{mend}"))
        Console().print(table)
    if any(finding.grade == "missing" for finding in findings):
        raise typer.Exit(1)


@topics.command("create")
def create(
    config: Config = None, state_dir: StateDir = None, bus: BusKind = None, bootstrap_servers: Bootstrap = None
) -> None:
    """Create the topics that do not exist yet; metrics, logs and events get equal partition counts."""
    from pipelines.open_bus import open_bus

    settings = settings_from(config, state_dir, bus, bootstrap_servers)
    open_bus(settings, SystemClock(), client="topics").close()
    typer.echo(f"The topics {settings.bus.prefix}.* exist, {settings.bus.partitions} partition(s) where they were new.")
