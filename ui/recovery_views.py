"""Actions, receipts, transitions and commands of a job → what the recovery page shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipelines.ledger.shapes import IncidentView, Row
from recovery.action import Action, Command, Incident, Receipt
from ui.views import action_words
from ui.words import OUTCOME_WORDS, class_words, culprit_words, precise_clock

AUDIT_ROWS_MAX = 200
AUDIT_HEADS = ("Time (UTC)", "Attempt", "What", "By", "In words", "About")
PLAN_HEADS = ("Incident", "Plan", "Next attempt", "From", "Leaves out", "Plan hash")


def waiting(incidents: Iterable[IncidentView], job: str = "") -> tuple[IncidentView, ...]:
    """Incidents whose plan waits for a person, oldest first."""
    rows = [row for row in incidents if row.outcome == "awaiting_approval" and row.action and job in {"", row.job}]
    return tuple(sorted(rows, key=lambda row: row.opened_at))


def plan_words(row: IncidentView) -> tuple[tuple[str, str], ...]:
    """The plan that is asked about, as label and words."""
    action = row.action
    assert action is not None
    step = f"step {action.resume_step:,}" if action.resume_step is not None else "from scratch"
    where = f", from {action.resume_tier.replace('+', ' and ')}" if action.resume_tier else ""
    return (
        ("Plan", action.verb.replace("_", " ")),
        ("Why", action.rule or "–"),
        ("Next attempt", str(action.next_attempt) if action.next_attempt is not None else "none"),
        ("Goes on from", step + where if action.next_attempt is not None else "–"),
        ("Leaves out", ", ".join(action.excluded_nodes) or "no node"),
        ("Plan hash", action.plan_hash or "–"),
    )


def excluded(actions: Sequence[Row], commands: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """Nodes that recovery has left out and nobody has given back since: node, and since when and why."""
    said: list[tuple[float, str, str]] = []
    for row in actions:
        message = row.message
        if isinstance(message, Action) and message.mode == "auto" and message.verb != "unexclude":
            said += [(message.at, node, message.rule) for node in message.excluded_nodes]
    for row in commands:
        if isinstance(row.message, Command) and row.message.verb == "unexclude":
            said.append((row.message.at, row.message.node, ""))
    latest: dict[str, tuple[float, str]] = {}
    for at, node, rule in sorted(said):
        latest[node] = (at, rule)
    return tuple((node, f"since {precise_clock(at)} UTC: {rule}") for node, (at, rule) in latest.items() if rule)


def audit(rows: Mapping[str, Sequence[Row]]) -> tuple[tuple[str, ...], ...]:
    """Intents, what came of them, states and people's commands of one job, newest first."""
    told: list[tuple[float, tuple[str, ...]]] = []
    for row in rows.get("actions", ()):
        if isinstance(row.message, Action):
            told.append((row.message.at, _action(row.message)))
    for row in rows.get("receipts", ()):
        if isinstance(row.message, Receipt):
            told.append((row.message.at, _receipt(row.message)))
    for row in rows.get("transitions", ()):
        if isinstance(row.message, Incident):
            told.append((row.message.at, _transition(row.message)))
    for row in rows.get("commands", ()):
        if isinstance(row.message, Command):
            told.append((row.message.at, _command(row.message)))
    told.sort(key=lambda one: one[0], reverse=True)
    return tuple((precise_clock(at), *words) for at, words in told[:AUDIT_ROWS_MAX])


def incident_of(row: IncidentView) -> str:
    """An incident in a few words."""
    who = culprit_words(tuple((one.rank, one.node) for one in row.culprits))
    return f"{class_words(row.fault_class)}, {who}: {action_words(row)}"


def _action(action: Action) -> tuple[str, ...]:
    rung = f" ({action.rung.replace('_', ' ')})" if action.rung else ""
    return (
        str(action.attempt), f"intent: {action.verb.replace('_', ' ')}{rung}", f"policy, {action.mode}",
        action.rule or "–", action.verdict_id or "the job",
    )  # fmt: skip


def _receipt(receipt: Receipt) -> tuple[str, ...]:
    outcome = OUTCOME_WORDS.get(receipt.outcome, receipt.outcome)
    return str(receipt.attempt), f"result: {outcome}", "backend", receipt.text or "–", receipt.action_id


def _transition(incident: Incident) -> tuple[str, ...]:
    state = incident.state.replace("_", " ")
    return str(incident.attempt), f"state: {state}", "recover", incident.cause.replace("_", " "), incident.incident_id


def _command(command: Command) -> tuple[str, ...]:
    what = f"{command.verb} {command.node or command.feedback.replace('_', ' ')}".strip()
    return "–", f"person: {what}", command.author, command.note or "–", command.incident_id or "the job"
