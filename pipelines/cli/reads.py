"""Commands that read the ledger and answer it: incidents, verdicts, ack, approve."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from pipelines.cli.options import AsJson, Config, StateDir, settings_from

if TYPE_CHECKING:
    from pipelines.ledger.client import LedgerClient
    from pipelines.ledger.shapes import IncidentStory, IncidentView
    from pipelines.settings import Settings

JobFilter = Annotated[str | None, typer.Option("--job", help="Only this job.")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")]


def incidents(
    job: JobFilter = None, limit: Limit = 50, config: Config = None, state_dir: StateDir = None, as_json: AsJson = False
) -> None:
    """List incidents, newest first, with what each stage of a recovery took."""
    from pipelines.ledger.measures import measures_in_words

    with _client(config, state_dir) as client:
        page = client.incidents(job=job, limit=limit)
    if as_json:
        typer.echo(msgspec.json.encode(page.incidents).decode())
        return
    if not page.incidents:
        typer.echo("No incidents. `transom demo` shows some; `transom run` starts a job that is watched.")
        return
    console = Console(highlight=False, soft_wrap=True)
    for view in page.incidents:
        done = view.action.verb.replace("_", " ") if view.action else "nothing decided"
        words = (f"{view.job} #{view.attempt}", _culprits(view), view.state or view.status, done, view.incident_id)
        console.print(f"[bold]{view.fault_class}[/]  " + "  ·  ".join(words))
        console.print(f"    {escape(view.summary)}")
        took = measures_in_words(view.measures)
        if took:
            console.print(f"    [dim]{took}[/]")


def verdicts(
    job: JobFilter = None,
    limit: Limit = 200,
    config: Config = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """List verdicts with every revision, oldest first."""
    with _client(config, state_dir) as client:
        page = client.rows("verdicts", job=job, limit=limit)
    if as_json:
        typer.echo(msgspec.json.encode(page.rows).decode())
        return
    if not page.rows:
        typer.echo("No verdicts so far.")
    for row in page.rows:
        verdict = row.message
        typer.echo(
            f"{verdict.verdict_id}#{verdict.revision}  {verdict.status} {verdict.fault_class}  {verdict.summary}"
        )


def tell_story(story: IncidentStory, console: Console) -> None:
    """What was seen, decided and done about one incident, for a person."""
    view = story.incident
    console.print(view.summary, style="bold", soft_wrap=True)
    console.print(
        f"{view.fault_class}, {view.severity}, attempt {view.attempt} of {view.job}; "
        f"culprit: {_culprits(view)}; victims: {view.victims}"
    )
    for evidence in story.verdicts[-1].evidence if story.verdicts else ():
        peers = "" if evidence.peers_median is None else f" (peers' median {evidence.peers_median:g} {evidence.unit})"
        console.print(f"  seen    {evidence.text}{peers}", soft_wrap=True)
    for action in story.actions:
        console.print(f"  decided {action.verb} ({action.mode}): {action.rule}", soft_wrap=True)
    for receipt in story.receipts:
        console.print(f"  done    {receipt.outcome}: {receipt.text}", soft_wrap=True)
    for change in story.transitions:
        console.print(f"  state   {change.state}: {change.cause}", soft_wrap=True)


def ack(
    incident_id: Annotated[str, typer.Argument(help="From `transom incidents`.")],
    note: Annotated[str, typer.Option(help="Why, for those who read it later.")] = "",
    config: Config = None,
    state_dir: StateDir = None,
) -> None:
    """Acknowledge an incident: somebody looks after it."""
    _post(incident_id, "acknowledge", note, "", config, state_dir)


def approve(
    incident_id: Annotated[str, typer.Argument(help="From `transom incidents`.")],
    plan_hash: Annotated[str, typer.Option("--plan", help="The plan's hash, from `transom explain --json`.")],
    config: Config = None,
    state_dir: StateDir = None,
) -> None:
    """Approve the plan that recovery is waiting to carry out."""
    _post(incident_id, "approve", "", plan_hash, config, state_dir)


def _post(incident_id: str, verb: str, note: str, plan_hash: str, config: Config, state_dir: StateDir) -> None:
    from pipelines.ledger.shapes import CommandRequest

    request = {
        "verb": verb,
        "incident_id": incident_id,
        "author": getpass.getuser(),
        "note": note,
        "plan_hash": plan_hash,
    }
    with _client(config, state_dir) as client:
        request["job"] = client.incident(incident_id).incident.job
        client.post_command(msgspec.convert(request, CommandRequest))
    typer.echo(f"{verb}: {incident_id}")


def _client(config: Config, state_dir: StateDir) -> LedgerClient:
    return client_of(settings_from(config, state_dir))


def client_of(settings: Settings) -> LedgerClient:
    """The ledger as these settings reach it."""
    from pipelines.ledger.client import LedgerClient
    from pipelines.ledger_address import ledger_address
    from pipelines.places import Places

    where = ledger_address(settings, Places.of(settings))
    return LedgerClient(where.address, where.token())


def _culprits(view: IncidentView) -> str:
    from pipelines.demo.show import culprits_in_words

    return culprits_in_words(view.culprits)
