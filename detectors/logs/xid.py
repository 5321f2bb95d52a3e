"""Xid lines of NVIDIA's kernel driver: code, device, severity word, and what our table says each of them means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

import msgspec

from detectors.logs.rule import Rule, RuleError, RuleRole
from detectors.verdict import Advice, FaultClass, Severity

XID_FILE = "xid.toml"
PIECE = "xid"
Word = Literal["", "Fatal", "Nonfatal"]

# NVRM: Xid (PCI:0000:3b:00): 79, pid=…   ·   NVRM: Xid (0000:3b:00.0): 31, …   ·   Xid (PCI:0000:3b:00): 79, …
LINE = re.compile(
    r"\bXid \((?:PCI:)?(?P<pci>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})[^)]*\)(?:\([^)]*\))?: "
    r"(?P<code>\d{1,4})\b"
    r"(?:, ?(?:pid=[^,]*, )?(?:name=[^,]*, )?(?P<rest>.*))?", re.ASCII
)  # fmt: skip
SUB_CODE = re.compile(r"(?P<name>[A-Z][A-Z0-9_]{2,40}) (?P<word>Fatal|Nonfatal)\b", re.ASCII)
WORD = re.compile(r"\b(Fatal|Nonfatal|Non-fatal)\b", re.ASCII)
RECOVERY_ACTION = re.compile(r"changed from .{0,80} to .{0,80}\((?P<action>[^()]{0,80})\)", re.ASCII)


class XidRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one code (with one severity word, where the driver prints one) means to a training job."""

    code: int
    word: Word = ""
    mnemonic: str
    action: str  # NVIDIA's immediate action; empty where the catalogue names none
    rule: str  # the id that evidence shows
    kind: str
    fault_class: FaultClass = msgspec.field(name="class")
    role: RuleRole
    advice: Advice
    severity: Severity
    alone: bool = False
    storm: FaultClass | None = None
    enabled: bool = True


class XidFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """rules/xid.toml."""

    source: str
    xid: list[XidRow]


class XidLine(NamedTuple):
    """One line, parsed. `sub_code`: the name of an NVLink error, as RLW_SRC_TRACK."""

    code: int
    pci: str
    word: Word
    sub_code: str
    rest: str


def parse_xid(line: str) -> XidLine | None:
    """The Xid that `line` tells of, if it tells of one."""
    found = LINE.search(line)
    if found is None:
        return None
    rest = found["rest"] or ""
    sub = SUB_CODE.search(rest)
    word = WORD.search(rest)
    named: Word = "" if word is None else "Fatal" if word[1] == "Fatal" else "Nonfatal"
    return XidLine(int(found["code"]), found["pci"].lower(), named, "" if sub is None else sub["name"], rest)


class XidTable:
    """Codes to rules. What the table does not know is a warning: a newer driver than the table."""

    def __init__(self, rows: Iterable[XidRow], source: str) -> None:
        self.rows = tuple(rows)
        self.source = source
        self._rules = {(row.code, row.word): _rule(row, source) for row in self.rows}
        self._worded = {row.code for row in self.rows if row.word}
        if len(self._rules) != len(self.rows):
            raise RuleError(f"{XID_FILE} has two rows for one code and word; give each code one row for each word")

    def rule(self, line: XidLine) -> Rule | None:
        """The rule of a parsed line; None where it is switched off."""
        word = line.word if line.code in self._worded else ""
        if line.code == 154 and _no_action(line.rest):
            return _unknown(line.code, self.source)
        found = self._rules.get((line.code, word))
        if found is None:
            return _unknown(line.code, self.source)
        return found if found.enabled else None

    def changed(self, entries: Iterable[Mapping[str, Any]]) -> XidTable:
        """The table with rows of a user's in place of ours; an entry names its code and the fields that differ.

        Raises RuleError.
        """
        rows = {(row.code, row.word): row for row in self.rows}
        for entry in entries:
            code, word = entry.get("code"), entry.get("word", "")
            if not isinstance(code, int):
                raise RuleError("an [[xid]] entry needs code = NUMBER")
            names = [key for key in rows if key[0] == code and (word == key[1] or "word" not in entry)]
            base: dict[str, Any]
            for key in names or [(code, word)]:
                known = rows.get(key)
                base = msgspec.to_builtins(known) if known is not None else msgspec.to_builtins(_row(code, word))
                try:
                    rows[key] = msgspec.convert({**base, **entry, "word": key[1]}, XidRow)
                except msgspec.ValidationError as error:
                    raise RuleError(f"Xid {code}: {error}") from error
        return XidTable(rows.values(), self.source)


@cache
def shipped_xids() -> XidTable:
    """The table that comes with Transom."""
    return read_xids(XID_FILE, (resources.files("detectors.logs") / "rules" / XID_FILE).read_bytes())


def read_xids(name: str, stored: bytes) -> XidTable:
    """The table of a file. Raises RuleError."""
    try:
        table = msgspec.toml.decode(stored, type=XidFile)
    except msgspec.DecodeError as error:
        raise RuleError(f"{name} is not a table of Xids: {error}") from error
    return XidTable(table.xid, table.source)


def _row(code: int, word: Word) -> XidRow:
    return XidRow(
        code=code, word=word, mnemonic="", action="", rule="xid_unknown", kind="xid_unknown", fault_class="warning",
        role="root", advice="none", severity="warning",
    )  # fmt: skip


def _unknown(code: int, source: str) -> Rule:
    return _rule(_row(code, ""), source)


def _rule(row: XidRow, source: str) -> Rule:
    name = f"{row.mnemonic}: {row.action}" if row.action else row.mnemonic
    return Rule(
        id=row.rule, kind=row.kind, fault_class=row.fault_class, role=row.role, advice=row.advice,
        severity=row.severity, alone=row.alone, storm=row.storm, enabled=row.enabled, pattern=LINE.pattern,
        gate=("xid (",), source=f"{source}, {row.code} {name}".rstrip(), must_match=(), must_not_match=(),
    )  # fmt: skip


def _no_action(rest: str) -> bool:
    """Xid 154 tells of a recovery action; a change to "None" asks for nothing."""
    found = RECOVERY_ACTION.search(rest)
    return found is not None and found["action"].strip().lower() in ("none", "no action", "")
