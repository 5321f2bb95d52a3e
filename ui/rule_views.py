"""Log rules, policy rows and mutes → tables of the rules page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from detectors.logs.rule import Rule
from pipelines.ledger.shapes import IncidentView
from recovery.policy_rows import PolicyRow
from ui.words import class_words, clock_words, severity_words

RULE_HEADS = ("Rule", "Class", "Role", "Severity", "Advice", "Matches", "Source")
POLICY_HEADS = ("Class", "What is done", "Mode as shipped", "Budget", "Checkpoints", "Nodes tried out first")
MUTE_HEADS = ("Incident", "Class", "Job", "Muted until", "State")
PATTERN_CHARACTERS_MAX = 90


def rule_rows(rules: Iterable[Rule], words: str = "") -> tuple[tuple[str, ...], ...]:
    """The rules in which these words stand, in the order in which they are tried."""
    wanted = words.lower().split()
    rows = []
    for rule in rules:
        pattern = rule.pattern if len(rule.pattern) <= PATTERN_CHARACTERS_MAX else rule.pattern[:88] + " …"
        text = " ".join((rule.id, rule.fault_class, rule.role, rule.pattern, rule.source)).lower()
        if all(word in text for word in wanted):
            off = "" if rule.enabled else " (off)"
            severity = severity_words(rule.severity).replace(" ", "\N{NO-BREAK SPACE}")  # shape and word on one line
            rows.append((
                rule.id + off, class_words(rule.fault_class), rule.role, severity,
                rule.advice.replace("_", " "), pattern, rule.source,
            ))  # fmt: skip
    return tuple(rows)


def policy_table(rows: Sequence[PolicyRow]) -> tuple[tuple[str, ...], ...]:
    """What recovery does about each class before anything is configured."""
    return tuple(
        (
            class_words(row.fault_class), row.verb.replace("_", " "), row.mode, row.budget,
            "rejected from the first bad step" if row.rollback else "the newest complete one",
            "yes" if row.checks else "no",
        )
        for row in rows
    )  # fmt: skip


def muted(incidents: Iterable[IncidentView], now: float) -> tuple[tuple[str, ...], ...]:
    """Incidents that nobody is told of now."""
    return tuple(
        (
            row.incident_id, class_words(row.fault_class), row.job, clock_words(row.muted_until, None, day=True),
            row.status,
        )
        for row in incidents
        if row.muted_until is not None and row.muted_until > now
    )  # fmt: skip
