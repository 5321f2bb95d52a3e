"""One log rule: what it matches, what that means, and how it is checked before it is used."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from detectors.logs.line_prefixes import strip_prefixes
from detectors.verdict import Advice, FaultClass, Severity

RuleRole = Literal["root", "confirm", "cascade", "noise", "advice"]


class RuleError(ValueError):
    """A rule file is not usable; the text names file and rule and says what to change."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the catalogue. `gate`: lower-case pieces, one of which is in every line the pattern can match."""

    id: str
    kind: str = ""  # finer than the class: what exactly happened, for people and for `evaluate logs`
    fault_class: FaultClass = msgspec.field(name="class")
    role: RuleRole
    advice: Advice
    severity: Severity
    pattern: str
    gate: tuple[str, ...]
    must_match: tuple[str, ...]
    must_not_match: tuple[str, ...]
    source: str
    alone: bool = False  # opens an incident although no rank has ended or fallen silent
    firm: bool = False  # counts although the line says that somebody tries again
    weak: bool = False  # matches too widely to speak for itself: only beside a rank's exit, or in a diagnosis
    storm: FaultClass | None = None  # what more than STORM_LINES_MAX of one device in an hour mean
    enabled: bool = True

    def compiled(self) -> re.Pattern[str]:
        """The pattern; ASCII, so that lower case folds nothing that the gate does not know."""
        return re.compile(self.pattern, re.ASCII)


def check_rule(rule: Rule) -> None:
    """Raise RuleError unless the rule keeps its own promises: it compiles, has a gate, and knows its own lines."""
    try:
        pattern = rule.compiled()
    except re.error as error:
        raise RuleError(f"log rule {rule.id}: the pattern is not a regular expression: {error}") from error
    if pattern.search(""):
        raise RuleError(f"log rule {rule.id}: the pattern matches an empty line; make it say what it looks for")
    if not rule.must_match or not rule.must_not_match or not rule.gate:
        raise RuleError(f"log rule {rule.id} needs a gate, a line that must match and a near miss that must not")
    if any(piece != piece.lower() or not piece for piece in rule.gate):
        raise RuleError(f"log rule {rule.id}: the pieces of a gate are lower case and not empty")
    for line in rule.must_match:
        text = strip_prefixes(line)
        if not pattern.search(text):
            raise RuleError(f"log rule {rule.id} does not match its own line {line!r}")
        if not any(piece in text.lower() for piece in rule.gate):
            raise RuleError(f"log rule {rule.id}: no piece of its gate is in its own line {line!r}; add one that is")
    for line in rule.must_not_match:
        if pattern.search(strip_prefixes(line)):
            raise RuleError(f"log rule {rule.id} matches its near miss {line!r}")
