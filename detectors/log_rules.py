"""The log rules: data in `rules/*.toml`, matched line by line behind a progress parser and a cheap gate."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

import msgspec

from detectors.verdict import Advice, FaultClass, Severity

RuleRole = Literal["root", "confirm", "cascade", "noise", "advice"]
LINE_CHARACTERS_MAX = 4096
RECORD_LINES_MAX = 200


class RuleError(ValueError):
    """A rule file is not usable; the text names file and rule and says what to change."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the catalogue. `gate`: lower-case pieces, one of which is in every line the pattern can match."""

    id: str
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


class _RuleFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: list[Rule]


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule that matched, and the line it matched. `pci` and `pid` where the line names a device or a process."""

    rule: Rule
    line: str
    pci: str = ""
    pid: int | None = None


PREFIXES = re.compile(
    r"^(?:\x1b\[[0-9;]*m)*"
    r"(?:\[(?:rank|default)\d+\]:?\s?|\d{1,6}:\s+|\(\w[\w.]* pid=\d+(?:, ip=[\d.]+)?\)\s?|"
    r"\[\s*\d+\.\d{3,6}\]\s|\[\s*\+\d+\.\d+\]\s+|kernel:\s)+"
)
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PROGRESS = re.compile(
    r"^\s*(?:iteration\s+\d+\s*/\s*\d+\s*\||steps?:\s*\d+\s+loss:|\{'(?:loss|grad_norm|eval_loss|train_loss)':"
    r"|Epoch \d+:\s+\d+%\||\d{1,3}%\|[^|]*\|\s*\d+/\d+|step\s+\d+(?:/\d+)?[\s:|,]+loss)"
)
PROGRESS_NAN = re.compile(
    r"(?:^|[\s{|,'\"])(?:lm |train_|eval_)?(?:loss|grad(?:ient)?[ _]norm)'?\s*[:=]?\s*'?[-+]?(?:nan|inf)\b"
    r"|number of nan iterations:\s*[1-9]", re.IGNORECASE
)  # fmt: skip
TEARDOWN = "Exception ignored in"
PCI = re.compile(r"\((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})")
PID = re.compile(r"(?:\bpid=|Killed process )(\d+)")


def strip_prefixes(line: str) -> str:
    """The line without rank, kernel time and colour prefixes."""
    return PREFIXES.sub("", ANSI.sub("", line[:LINE_CHARACTERS_MAX]))


class RuleBook:
    """The catalogue, compiled: the earlier rule wins where two match one line."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self._compiled = tuple((rule, re.compile(rule.pattern)) for rule in self.rules)
        self.by_id = {rule.id: rule for rule in self.rules}
        if len(self.by_id) != len(self.rules):
            raise RuleError("two log rules have the same id; give each an id of its own")
        self._nan = self.by_id.get("nan")

    @classmethod
    def shipped(cls) -> RuleBook:
        """The rules that come with Transom."""
        return cls.load(resources.files("detectors") / "rules")

    @classmethod
    def load(cls, root: Path | Traversable) -> RuleBook:
        """The rules of a folder, files in the order of their names. Raises RuleError."""
        rules: list[Rule] = []
        for entry in sorted(root.iterdir(), key=lambda item: item.name):
            if not entry.name.endswith(".toml"):
                continue
            try:
                rules += msgspec.toml.decode(entry.read_bytes(), type=_RuleFile).rule
            except msgspec.DecodeError as error:
                raise RuleError(f"{entry.name} is not a file of log rules: {error}") from error
        for rule in rules:
            _check(rule)
        return cls(rules)

    def match_line(self, line: str) -> Hit | None:
        """The first rule that matches one line; progress lines are consumed here and only tell of NaN."""
        text = strip_prefixes(line)
        if PROGRESS.match(text):
            if self._nan is not None and PROGRESS_NAN.search(text):
                return Hit(self._nan, text)
            return None
        lower = text.lower()
        for rule, pattern in self._compiled:
            if any(piece in lower for piece in rule.gate) and pattern.search(text):
                return Hit(rule, text, _pci(text), _pid(text))
        return None

    def match_record(self, text: str) -> list[Hit]:
        """The hits of one record, in the order of its lines, noise and advice left out.

        A traceback that Python prints while it tears an object down ends nothing: its record is passed over.
        """
        if strip_prefixes(text).startswith(TEARDOWN):
            return []
        hits: list[Hit] = []
        for line in text.split("\n")[-RECORD_LINES_MAX:]:
            hit = self.match_line(line)
            if hit is not None and hit.rule.role not in ("noise", "advice"):
                hits.append(hit)
        return hits

    def begins_teardown(self, text: str) -> bool:
        """The next error line of this stream belongs to a teardown and ends nothing."""
        return strip_prefixes(text).startswith(TEARDOWN) and text.count("\n") == 0


def _check(rule: Rule) -> None:
    try:
        pattern = re.compile(rule.pattern)
    except re.error as error:
        raise RuleError(f"log rule {rule.id}: the pattern is not a regular expression: {error}") from error
    if not rule.must_match or not rule.must_not_match or not rule.gate:
        raise RuleError(f"log rule {rule.id} needs a gate, a line that must match and a near miss that must not")
    if any(piece != piece.lower() for piece in rule.gate):
        raise RuleError(f"log rule {rule.id}: the pieces of a gate are lower case")
    for line in rule.must_match:
        if not pattern.search(strip_prefixes(line)):
            raise RuleError(f"log rule {rule.id} does not match its own line {line!r}")
    for line in rule.must_not_match:
        if pattern.search(strip_prefixes(line)):
            raise RuleError(f"log rule {rule.id} matches its near miss {line!r}")


def _pci(text: str) -> str:
    found = PCI.search(text)
    return "" if found is None else found.group(1).lower()


def _pid(text: str) -> int | None:
    found = PID.search(text)
    return None if found is None or len(found.group(1)) > 9 else int(found.group(1))
