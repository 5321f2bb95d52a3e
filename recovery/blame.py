"""Whom verdicts blame, and for what: the leading verdict, its cause, the nodes and steps that are meant."""

from __future__ import annotations

from collections.abc import Sequence

from detectors.verdict import Verdict

from .action import Mode, Verb
from .backend import Observation
from .policy_config import PolicyConfig, effective_verb

REASON_CHARACTERS_MAX = 2000
_STRENGTH: dict[Verb, int] = {"exclude_and_restart": 0, "restart": 1, "stop": 2, "hold": 3, "notify": 4, "ignore": 5}


def leading(verdicts: Sequence[Verdict], config: PolicyConfig) -> Verdict:
    """The verdict that decides: the earliest by producer time; a user error next to a root is its echo."""
    acting = [one for one in verdicts if effective_verb(one, config) != "notify"] or list(verdicts)
    roots = [one for one in acting if config.row(one.fault_class).root]

    def is_echo(one: Verdict) -> bool:
        return one.fault_class == "user_error" and any(
            abs(root.onset_at - one.onset_at) <= config.echo_seconds for root in roots
        )

    return min(
        (one for one in acting if not is_echo(one)),
        key=lambda one: (one.onset_at, _STRENGTH[effective_verb(one, config)], one.verdict_id),
    )


def cause_of(verdict: Verdict, config: PolicyConfig) -> str:
    """What the no-progress budget counts by: the class, and the culprit where the class blames somebody."""
    if config.row(verdict.fault_class).verb == "exclude_and_restart":
        names = sorted({culprit.node for culprit in verdict.culprits if culprit.node})
    elif verdict.fault_class in ("rank_lost", "hang"):
        names = [f"rank {rank}" for rank in sorted({c.rank for c in verdict.culprits if c.rank is not None})]
    else:
        names = []
    return " ".join([verdict.fault_class, *names])


def nodes_of(verdict: Verdict, observation: Observation | None) -> tuple[str, ...]:
    """The nodes that a verdict blames; where it names only a rank, the node that rank runs on."""
    named = {culprit.node for culprit in verdict.culprits if culprit.node}
    unplaced = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None and not culprit.node}
    if unplaced and observation is not None:
        named |= {rank.node for rank in observation.ranks if rank.rank in unplaced}
    return tuple(sorted(named))


def nodes_to_exclude(
    verdicts: Sequence[Verdict], config: PolicyConfig, modes: Sequence[Mode], observation: Observation | None
) -> tuple[str, ...]:
    """The nodes that verdicts blame whose rows exclude nodes in one of these modes."""
    nodes: set[str] = set()
    for verdict in verdicts:
        row = config.row(verdict.fault_class)
        if effective_verb(verdict, config) == "exclude_and_restart" and row.mode in modes:
            nodes |= set(nodes_of(verdict, observation))
    return tuple(sorted(nodes))


def first_bad(verdict: Verdict, config: PolicyConfig) -> int | None:
    """The step from which on checkpoints carry the fault, less the margin; None where the class taints none."""
    if not config.row(verdict.fault_class).rollback:
        return None
    step = verdict.first_bad_step if verdict.first_bad_step is not None else verdict.onset_step
    return None if step is None else max(0, step - config.rollback_margin_steps)


def culprit_words(verdict: Verdict) -> str:
    """Who did it, as a rule tells it."""
    named = (
        " on ".join(part for part in (f"rank {one.rank}" if one.rank is not None else "", one.node or "") if part)
        for one in verdict.culprits
    )
    return ", ".join(named) or "unknown"


def reason_of(verdict: Verdict) -> str:
    """The summary and the error text a person needs, bounded; not what its victims say of their lost peers."""
    named = {culprit.rank for culprit in verdict.culprits}
    said = [
        item
        for item in verdict.evidence
        if item.kind in ("log", "event") and (not named or item.rank is None or item.rank in named)
    ]
    texts = [verdict.summary, *(item.text for item in said)]
    return "\n".join(dict.fromkeys(text for text in texts if text))[:REASON_CHARACTERS_MAX]
