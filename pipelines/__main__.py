"""The command line: `transom <command>`; a known error is one sentence on standard error and exit code 1."""

from __future__ import annotations

import sys

import typer

from ingest.bus import BusError
from pipelines.cli import jobs, machine, measures, reads, services
from pipelines.errors import StatedError
from pipelines.settings import SettingsError
from recovery.backend import BackendError

app = typer.Typer(
    name="transom",
    help="Finds what broke a distributed training job, names the rank, and brings the job back from memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(rich_help_panel="Try it")(jobs.demo)
app.command(rich_help_panel="Try it")(machine.doctor)
app.command(rich_help_panel="Train", context_settings=jobs.PASS_THROUGH)(jobs.run)
app.command(rich_help_panel="Train")(jobs.inject)
app.command(rich_help_panel="Services")(services.up)
app.command(rich_help_panel="Services")(services.detect)
app.command(rich_help_panel="Services")(services.recover)
app.command(rich_help_panel="Services")(services.record)
app.command(rich_help_panel="Services")(services.console)
app.add_typer(services.ckpt, name="ckpt", rich_help_panel="Services")
app.command(hidden=True)(services.launcher)
app.command(rich_help_panel="Look")(reads.incidents)
app.command(rich_help_panel="Look")(reads.verdicts)
app.command(rich_help_panel="Look")(reads.explain)
app.command(rich_help_panel="Look")(reads.ack)
app.command(rich_help_panel="Look")(reads.approve)
app.command(rich_help_panel="Look")(jobs.replay)
app.add_typer(machine.topics, name="topics", rich_help_panel="Services")
app.add_typer(measures.bench, name="bench", rich_help_panel="Measure")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except (StatedError, BusError, SettingsError, BackendError) as error:
        print(f"transom: {error}", file=sys.stderr)  # noqa: T201 - the one place that speaks of errors
        sys.exit(1)


if __name__ == "__main__":
    main()
