"""What recovery's own file says of an incident: its state, the budgets, and what would be decided about it now."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from detectors.verdict import Verdict
from recovery.decisions import Decisions
from recovery.journal import Journal
from recovery.plan import Counters, Exclusion
from recovery.policy_config import PolicyConfig
from recovery.policy_rows import BUDGETS
from recovery.routing import Router
from recovery.store import RecoveryStore
from recovery.store_file import copy_store


class DecisionNow(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy would decide with the verdicts and budgets as they stand, without asking the backend."""

    verb: str
    mode: str
    rule: str
    plan_hash: str
    rung: str
    excluded_nodes: tuple[str, ...]
    spared_nodes: tuple[str, ...]
    before_step: int | None


class NodeAway(msgspec.Struct, frozen=True, kw_only=True):
    """A node that the job does without."""

    node: str
    since: float
    until: float
    reason: str


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """One incident as recovery has it."""

    incident_id: str
    job: str
    attempt: int
    state: str
    verdicts: tuple[Verdict, ...]
    outcomes: tuple[str, ...]  # what became of each verdict in the inbox
    now: DecisionNow | None  # None: detection has closed all of it
    restarts: dict[str, int]  # in the window, by budget
    allowed: dict[str, int]
    no_progress: dict[str, int]
    strikes: dict[str, int]
    away: tuple[NodeAway, ...]
    held: str


def explain_from(path: Path, wanted: str, config: PolicyConfig, now: float) -> Explained | None:
    """The incident of that id, or of the verdict of that id; None where recovery knows neither. Raises StoreError.

    Works on a copy, beside a controller that runs.
    """
    if not path.exists():
        return None
    with tempfile.TemporaryDirectory(prefix="transom-explain-") as folder:
        copy = Path(folder) / path.name
        copy_store(path, copy)
        store = RecoveryStore(copy, durable=False)
        try:
            return _explained(store, wanted, config, now)
        finally:
            store.close()


def _explained(store: RecoveryStore, wanted: str, config: PolicyConfig, now: float) -> Explained | None:
    known = store.incident_of_verdict(wanted) or wanted
    incident = store.incident(known)
    if incident is None:
        return None
    journal = Journal(store, Router(store, config))
    plan = Decisions(store, journal, config).plan(incident, None, now)
    counters = store.counters(incident.job, now, config.restarts_window_seconds, config.strikes_window_seconds)
    verdicts = store.verdicts_of(known)
    ids = {verdict.verdict_id for verdict in verdicts}
    return Explained(
        incident_id=known,
        job=incident.job,
        attempt=incident.attempt,
        state=incident.state,
        verdicts=tuple(verdicts),
        outcomes=tuple(
            f"{name}#{revision}: {outcome}" + (f", delivered {1 + again} times" if again else "")
            for name, revision, outcome, again in store.outcomes()
            if name in ids
        ),
        now=None
        if plan is None
        else DecisionNow(
            verb=plan.verb, mode=plan.mode, rule=plan.rule, plan_hash=plan.plan_hash, rung=plan.rung,
            excluded_nodes=plan.excluded_nodes, spared_nodes=plan.spared_nodes, before_step=plan.resumes_below,
        ),
        restarts=_restarts(counters),
        allowed={"all": config.restarts_max, **{str(name): most for name, most in config.class_restarts_max.items()}},
        no_progress=dict(counters.no_progress),
        strikes=dict(counters.strikes),
        away=tuple(_away(one) for one in counters.exclusions),
        held=store.job(incident.job).held,
    )  # fmt: skip


def _restarts(counters: Counters) -> dict[str, int]:
    paid = [one.budget for one in counters.restarts if one.budget != "planned"]
    return {"all": len(paid), **{str(name): paid.count(name) for name in BUDGETS if name != "planned"}}


def _away(one: Exclusion) -> NodeAway:
    return NodeAway(node=one.node, since=one.at, until=one.until, reason=one.reason)


def lines_of(explained: Explained, now: float) -> list[str]:
    """The same as a person reads it."""
    used = ", ".join(
        f"{number} of {explained.allowed.get(name, 0)} {name}" for name, number in explained.restarts.items()
    )
    lines = [f"state   {explained.state}" + (f"; {explained.held}" if explained.held else ""), f"budget  {used}"]
    lines += [
        f"wasted  {number} restarts for {cause} without progress" for cause, number in explained.no_progress.items()
    ]
    lines += [f"strikes {node}: {number}" for node, number in explained.strikes.items()]
    lines += [
        f"away    {one.node} for another {(one.until - now) / 3600:.1f} h: {one.reason}" for one in explained.away
    ]
    lines += [f"inbox   {outcome}" for outcome in explained.outcomes]
    decision = explained.now
    if decision is None:
        lines.append("now     nothing: detection says it is over")
    else:
        plan = f"; plan {decision.plan_hash}" if decision.plan_hash else ""
        lines.append(f"now     {decision.verb} ({decision.mode}){plan}: {decision.rule}")
    return lines
