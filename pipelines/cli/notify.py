"""Commands about notifications: a test to every receiver."""

from __future__ import annotations

import typer

from ingest.clock import SystemClock
from pipelines.cli.options import Config, StateDir, settings_from

notify = typer.Typer(help="How people are told of incidents.", no_args_is_help=True)


@notify.callback()
def group() -> None:
    """How people are told of incidents."""


@notify.command("test")
def try_all(config: Config = None, state_dir: StateDir = None) -> None:
    """Send one test notice to every receiver in the settings, once; exit code 1 where one did not take it."""
    from pipelines.notify.trial import try_receivers

    outcomes = try_receivers(settings_from(config, state_dir), SystemClock())
    if not outcomes:
        typer.echo("Nobody is told: set notify.webhook_url, notify.command or notify.alertmanager_url.")
        raise typer.Exit(1)
    for name, problem in outcomes.items():
        typer.echo(f"{name}: {problem or 'took it'}")
    if any(outcomes.values()):
        raise typer.Exit(1)
