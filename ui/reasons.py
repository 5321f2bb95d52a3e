"""Why a verdict was given: each revision with the detector that spoke, its rules, its figures and how sure it was."""

from __future__ import annotations

from pipelines.ledger.shapes import IncidentStory
from ui.words import class_words, culprit_words, number_words, precise_clock

REVISIONS_MAX = 12
RULES_MAX = 4
HEADS = ("Revision", "Time (UTC)", "Detector", "Said", "Who, and how sure", "By these rules", "Settled")


def rows(story: IncidentStory) -> tuple[tuple[str, ...], ...]:
    """The newest revision first."""
    told = []
    for verdict in sorted(story.verdicts, key=lambda one: -one.revision)[:REVISIONS_MAX]:
        sure = max((who.confidence for who in verdict.culprits), default=None)
        who = culprit_words(tuple((one.rank, one.node) for one in verdict.culprits))
        rules: dict[str, str] = {}
        for item in verdict.evidence:
            if item.rule and item.rule not in rules:
                figure = number_words(item.value, item.unit) if item.value is not None else ""
                against = (
                    f" (peers {number_words(item.peers_median, item.unit)})" if item.peers_median is not None else ""
                )
                rules[item.rule] = f"{item.rule} {figure}{against}".strip()
        told.append((
            str(verdict.revision), precise_clock(verdict.at), verdict.detector or "judge",
            f"{class_words(verdict.fault_class)}, {verdict.severity}, {verdict.status}",
            who + (f", {100.0 * sure:.0f} %" if sure is not None else ""),
            "\n".join(list(rules.values())[:RULES_MAX]) or "–", "yes" if verdict.settled else "not yet",
        ))  # fmt: skip
    return tuple(told)
