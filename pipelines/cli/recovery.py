"""Commands to recovery and about it: explain, hold, resume, abort, unexclude, and the rehearsal of `recover`."""

from __future__ import annotations

import getpass
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from ingest.clock import SystemClock
from pipelines.cli.options import AsJson, Config, StateDir, settings_from
from pipelines.cli.reads import client_of, tell_story

if TYPE_CHECKING:
    from pipelines.ledger.shapes import IncidentStory
    from pipelines.settings import Settings
    from recovery.action import Action, CommandVerb

Job = Annotated[str, typer.Argument(help="The job's name.")]
Note = Annotated[str, typer.Option("--note", help="Why, for those who read it later.")]


def explain(
    incident_id: Annotated[str, typer.Argument(help="An incident or verdict, from `transom incidents` or `verdicts`.")],
    config: Config = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Say what was seen, what was decided by which rule, what came of it, what budgets are left, and what would be
    decided now."""
    from pipelines.explain import explain_from, lines_of
    from pipelines.ledger.shapes import NotInLedger
    from pipelines.places import Places
    from pipelines.policy_settings import policy_config

    settings, now = settings_from(config, state_dir), SystemClock().now()
    explained = explain_from(Places.of(settings).recovery_store, incident_id, policy_config(settings), now)
    story, why = _story(settings, explained.incident_id if explained is not None else incident_id)
    if story is None and explained is None:
        raise NotInLedger(f"neither recovery nor the ledger knows {incident_id!r} ({why})")
    if as_json:
        told: dict[str, Any] = msgspec.to_builtins(story) if story is not None else {}
        told["recovery"] = msgspec.to_builtins(explained)
        typer.echo(msgspec.json.encode(told).decode())
        return
    console = Console(highlight=False, markup=False)
    if story is not None:
        tell_story(story, console)
    else:
        console.print(f"The ledger says nothing: {why}", soft_wrap=True)
        for verdict in explained.verdicts if explained is not None else ():
            console.print(verdict.summary, style="bold", soft_wrap=True)
    for line in lines_of(explained, now) if explained is not None else ():
        console.print(f"  {line}", soft_wrap=True)


def _story(settings: Settings, incident_id: str) -> tuple[IncidentStory | None, str]:
    from pipelines.ledger.shapes import LedgerError

    try:
        with client_of(settings) as client:
            return client.incident(incident_id), ""
    except LedgerError as error:
        return None, str(error)


def hold(job: Job, note: Note = "", config: Config = None, state_dir: StateDir = None) -> None:
    """Let recovery do nothing more for a job until `transom resume`; the job itself is left alone."""
    _ask("hold", job, note, config, state_dir)


def resume(job: Job, note: Note = "", config: Config = None, state_dir: StateDir = None) -> None:
    """Let recovery act for a job again: holds end, the breaker is closed, what was held is decided anew."""
    _ask("resume", job, note, config, state_dir)


def abort(job: Job, note: Note = "", config: Config = None, state_dir: StateDir = None) -> None:
    """End a job: its ranks are stopped, and nothing starts it again."""
    _ask("abort", job, note, config, state_dir)


def unexclude(
    node: Annotated[str, typer.Argument(help="A node that is excluded, from `transom explain`.")],
    job: Annotated[str, typer.Option("--job", help="The job that may use it again.")],
    note: Note = "",
    config: Config = None,
    state_dir: StateDir = None,
) -> None:
    """Give a node back to a job before its quarantine is over; what counted against it still counts."""
    _ask("unexclude", job, note, config, state_dir, node=node)


def _ask(verb: CommandVerb, job: str, note: str, config: Config, state_dir: StateDir, node: str = "") -> None:
    from pipelines.ledger.shapes import CommandRequest

    request = CommandRequest(verb=verb, author=getpass.getuser(), job=job, note=note, node=node)
    with client_of(settings_from(config, state_dir)) as client:
        command_id = client.post_command(request)
    typer.echo(f"{verb}: {job}{f' {node}' if node else ''} (command {command_id})")


def dry_run(settings: Settings, recording: Path | None, follow: bool, json_file: Path | None) -> None:
    """Print what recovery would decide about all verdicts there are (and, `follow`, that come), and do nothing."""
    from pipelines.open_bus import open_bus
    from pipelines.own_process import stop_on_signal
    from pipelines.policy_settings import policy_config
    from pipelines.rehearse import as_json, in_words, rehearse_bus, rehearse_recording

    policy, console = policy_config(settings), Console(highlight=False, markup=False)
    actions: list[Action] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rehearsing", total=None)

        def tell(action: Action) -> None:
            actions.append(action)
            progress.update(task, completed=len(actions), description=f"rehearsing, {len(actions)} decisions")
            console.print(in_words(action), soft_wrap=True)

        if recording is not None:
            verdicts = rehearse_recording(recording, policy, tell)
        else:
            stop = stop_on_signal() if follow else None
            bus = open_bus(settings, SystemClock(), client="dry-run")
            try:
                verdicts = rehearse_bus(bus, f"dry-run-{secrets.token_hex(6)}", policy, tell, stop)
            finally:
                bus.close()
    if json_file is not None:
        json_file.write_bytes(as_json(actions))
    if not verdicts:
        console.print("There are no verdicts yet: `transom demo` makes some, `--recording data/…` reads recorded ones.")
    else:
        console.print(f"{verdicts} verdicts, {len(actions)} decisions; nothing was done.")
