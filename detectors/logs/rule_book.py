"""The log rules: data in `rules/*.toml`, matched line by line behind a progress parser and a cheap gate."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec

from detectors.logs.line_gate import LineGate
from detectors.logs.line_prefixes import LINE_CHARACTERS_MAX, strip_prefixes
from detectors.logs.progress_lines import is_lifecycle, read_bar
from detectors.logs.rule import Rule, RuleError, RuleRole, check_rule
from detectors.logs.xid import XID_FILE, XidTable, parse_xid, read_xids, shipped_xids

__all__ = ["LINE_CHARACTERS_MAX", "Hit", "Rule", "RuleBook", "RuleError", "RuleRole", "strip_prefixes"]

RECORD_LINES_MAX = 200
LATELY_MAX = 256  # lines of at most 4,096 characters and what they hit
TEARDOWN = "Exception ignored in"
TRACEBACK = "Traceback (most recent call last)"

# Somebody has seen it and goes on: no reason to think that anything broke.
HANDLED = re.compile(
    r"\bretrying\b|\bwill (?:retry|be retried|try again|reconnect|be skipped|be ignored)|\b(?:re)?try(?:ing)? again\b"
    r"|\bretr(?:y|ies) (?:attempt )?#?\d+ ?(?:/|of) ?\d+|\battempt #?\d+ ?(?:/|of) ?\d+|\bretries? left\b|\bretry in \d"
    r"|\bbacking off\b|\bsucceeded (?:after|on)\b|(?<!be )\brecovered\b|\breconnect(?:ed|ing)\b|\bfalling back\b"
    r"|\bfallback to\b|\bskipping\b|\bskipped\b|\bignoring\b|\bignored\b|\bsuppress(?:ed|ing)\b|\bhandled\b"
    r"|\bcaught and\b|\bcontinuing\b|\btolerated\b|\bas expected\b|\bnot (?:fatal|an error)\b|\bentering retry loop\b"
    r"|\b(?:trying|using) (?:another|the next|a different|port)\b"
    r"|\bharmless\b", re.ASCII
)  # fmt: skip
GIVEN_UP = re.compile(
    r"\bgiving up\b|\bgave up\b|\bmax(?:imum)? (?:number of )?retries\b|\bretr(?:y|ies) (?:count )?exceeded"
    r"|\bexhausted\b|\b(?:will not|not|no more|without) retry|\bretries failed\b|\bunhandled\b|\bnot handled\b"
    r"|\bfailed after \d+|\bcannot continue\b|\bnever recovered\b|\buncaught\b", re.ASCII
)  # fmt: skip
# A logger that says INFO of a line means that nothing is wrong; NCCL says so of a peer that left, too.
QUIET = re.compile(r"(?:^|[\s\[|(-])(?:INFO|DEBUG|TRACE)(?:[\s\]:|-]|$)|^\[?[ID]\d{3,4} \d\d:", re.ASCII)
QUIET_WITHIN_CHARACTERS = 90
SERVICE_THREAD = "[Service thread]"
PCI = re.compile(
    r"(?:\bPCI:|\bGPU ?|pcieport |amdgpu |nvidia |mlx5_core )([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
)
PID = re.compile(r"(?:\bpid=|Killed process |Kill process |Killing \S+?:)(\d+)")
PEER = re.compile(r"(?:\bto |\bfrom |peer )\[?([\w.:-]+?)\]?[<:]\d{2,5}>?")


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule that matched, and the line it matched. What the line names beside: a device, a process, a peer, a code."""

    rule: Rule
    line: str
    pci: str = ""
    pid: int | None = None
    peer: str = ""
    xid: int | None = None


class RuleBook:
    """The catalogue, compiled: the earlier rule wins where two match one line."""

    def __init__(self, rules: Iterable[Rule], xids: XidTable | None = None) -> None:
        self.rules = tuple(rules)
        self.xids = xids if xids is not None else shipped_xids()
        active = [rule for rule in self.rules if rule.enabled]
        self._compiled = [(rule, rule.compiled().search) for rule in active]
        self.by_id = {rule.id: rule for rule in self.rules}
        if len(self.by_id) != len(self.rules):
            raise RuleError("two log rules have the same id; give each an id of its own")
        self.gate = LineGate([rule.gate for rule in active])
        self._lately: dict[str, Hit] = {}
        nan = self.by_id.get("nan")
        self._nan = nan if nan is not None and nan.enabled else None

    @classmethod
    def shipped(cls) -> RuleBook:
        """The rules that come with Transom."""
        return cls.load(resources.files("detectors.logs") / "rules")

    @classmethod
    def load(cls, root: Path | Traversable) -> RuleBook:
        """The rules of a folder, files in the order of their names. Raises RuleError."""
        return _Reading().take(root).book()

    @classmethod
    def load_with(cls, user_folder: Path | None) -> RuleBook:
        """Ours and those of a user's folder (None: ours alone). Raises RuleError.

        A rule with the id of one of ours replaces it where it stands, field by field; one that is new comes before
        all of ours, so that a site's own word is heard first. `[[xid]]` entries change rows of the Xid table.
        """
        reading = _Reading().take(resources.files("detectors.logs") / "rules")
        if user_folder is not None:
            try:
                reading.change(user_folder)
            except OSError as error:
                raise RuleError(f"the folder of log rules {user_folder} cannot be read ({error.strerror})") from error
        return reading.book()

    def match_line(self, line: str) -> Hit | None:
        """The first rule that matches one line; progress lines are consumed here and only tell of NaN."""
        text = strip_prefixes(line)
        bar = read_bar(text)
        if bar is not None:
            if bar.numbers_bad:
                return None if self._nan is None else Hit(self._nan, text)
            return None if bar.rest_at < 0 else self.match_line(text[bar.rest_at :])
        lower = text.lower()
        if "xid (" in lower:
            xid = parse_xid(text)
            if xid is not None:
                known = self.xids.rule(xid)
                return None if known is None else Hit(known, text, xid.pci, _pid(text), xid=xid.code)
        candidates = self.gate.open_for(lower)
        if not candidates or is_lifecycle(text):
            return None
        for number in candidates:
            rule, search = self._compiled[number]
            if search(text):
                if not rule.firm and rule.role not in ("noise", "advice") and _harmless(rule, text, lower):
                    return None
                return Hit(rule, text, _pci(text), _pid(text), _peer(text))
        return None

    def match_record(self, text: str) -> list[Hit]:
        """The hits of one record, in the order of its lines, noise and advice left out.

        Passed over: a traceback that Python prints while it tears an object down, one that a log line announces as
        handled, and inside any other the lines of source code that it quotes.
        """
        if "\n" not in text:
            return self._match_single(text)
        if strip_prefixes(text).startswith(TEARDOWN):
            return []
        lines = text.split("\n")
        if TRACEBACK in text and TRACEBACK not in lines[0] and is_handled(lines[0].lower()):
            return []
        hits: list[Hit] = []
        for line in _spoken(lines[-RECORD_LINES_MAX:]):
            hit = self.match_line(line)
            if hit is not None and hit.rule.role not in ("noise", "advice"):
                hits.append(hit)
        if any(not hit.pci for hit in hits) and "NVRM:" in text:
            pci = _pci(text)  # the driver's three-line messages name the device in the first
            hits = [hit if hit.pci else Hit(hit.rule, hit.line, pci, hit.pid, hit.peer, hit.xid) for hit in hits]
        return hits

    def _match_single(self, text: str) -> list[Hit]:
        """The hit of a record of one line; what has hit lately is remembered, for storms say the same again."""
        hit = self._lately.get(text) or self.match_line(text)
        if hit is None:
            return []
        if len(self._lately) >= LATELY_MAX:
            self._lately.clear()
        self._lately[text] = hit
        return [hit] if hit.rule.role not in ("noise", "advice") else []

    def begins_teardown(self, text: str) -> bool:
        """The next error line of this stream belongs to a teardown and ends nothing."""
        return strip_prefixes(text).startswith(TEARDOWN) and text.count("\n") == 0


class _Reading:
    """Rules as they are read, ours first, then a user's changes to them."""

    def __init__(self) -> None:
        self._rules: dict[str, dict[str, Any]] = {}
        self._own: list[str] = []  # ids that only the user has
        self._xids: XidTable | None = None

    def take(self, root: Path | Traversable) -> _Reading:
        """Read a folder that stands for itself."""
        for entry in _toml_files(root):
            if entry.name == XID_FILE:
                self._xids = read_xids(entry.name, entry.read_bytes())
                continue
            for told in _entries(entry, ("rule",))["rule"]:
                name = _id(entry.name, told)
                if name in self._rules:
                    raise RuleError(f"{entry.name}: two log rules have the id {name!r}; give each an id of its own")
                _convert(entry.name, told)
                self._rules[name] = told
        return self

    def change(self, root: Path) -> None:
        """Read a folder over what is there."""
        for entry in _toml_files(root):
            tree = _entries(entry, ("rule", "xid"))
            for told in tree["rule"]:
                name = _id(entry.name, told)
                if name not in self._rules:
                    self._own.append(name)
                self._rules[name] = {**self._rules.get(name, {}), **told}
                _convert(entry.name, self._rules[name])
            if tree["xid"]:
                try:
                    self._xids = (self._xids or shipped_xids()).changed(tree["xid"])
                except RuleError as error:
                    raise RuleError(f"{entry.name}: {error}") from error

    def book(self) -> RuleBook:
        """The book, every rule of it checked."""
        order = [*self._own, *(name for name in self._rules if name not in self._own)]
        rules = [_convert(name, self._rules[name]) for name in order]
        for rule in rules:
            if rule.enabled:
                check_rule(rule)
        return RuleBook(rules, self._xids)


def is_handled(lower: str) -> bool:
    """A line (in lower case) says that somebody goes on in spite of what it tells."""
    return HANDLED.search(lower) is not None and GIVEN_UP.search(lower) is None


def _harmless(rule: Rule, text: str, lower: str) -> bool:
    """A line that tells of something survived, or whose logger thinks little of it; a loss is told as it comes."""
    if is_handled(lower):
        return True
    if rule.fault_class == "nan" or SERVICE_THREAD in text:
        return False
    return QUIET.search(text[:QUIET_WITHIN_CHARACTERS]) is not None


def _toml_files(root: Path | Traversable) -> list[Path | Traversable]:
    return sorted((item for item in root.iterdir() if item.name.endswith(".toml")), key=lambda item: item.name)


def _entries(entry: Path | Traversable, tables: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    try:
        tree = tomllib.loads(entry.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RuleError(f"{entry.name} is not a file of log rules: {error}") from error
    unknown = sorted(set(tree) - set(tables))
    if unknown:
        raise RuleError(f"{entry.name} is not a file of log rules: it has {unknown[0]!r}, not [[{tables[0]}]]")
    found: dict[str, list[dict[str, Any]]] = {}
    for table in tables:
        found[table] = tree.get(table, [])
        if not isinstance(found[table], list) or not all(isinstance(told, dict) for told in found[table]):
            raise RuleError(f"{entry.name} is not a file of log rules: write [[{table}]] before each entry")
    return found


def _id(file: str, told: dict[str, Any]) -> str:
    name = told.get("id")
    if not isinstance(name, str) or not name:
        raise RuleError(f'{file}: a [[rule]] has no id; give it id = "name"')
    return name


def _convert(file: str, told: dict[str, Any]) -> Rule:
    if told.get("enabled") is False:  # who switches one off need not say what it was
        blank = {
            "class": "unknown", "role": "noise", "advice": "none", "severity": "info", "pattern": "", "gate": [],
            "must_match": [], "must_not_match": [], "source": "",
        }  # fmt: skip
        told = {**blank, **told}
    try:
        return msgspec.convert(told, Rule)
    except msgspec.ValidationError as error:
        raise RuleError(f"{file} is not a file of log rules: rule {told.get('id')}: {error}") from error


def _spoken(lines: list[str]) -> list[str]:
    """The lines of a record without the source code that a traceback quotes below each of its `File` lines."""
    spoken: list[str] = []
    quoted = False
    for line in lines:
        bare = line.lstrip(" |+")
        if bare.startswith('File "'):
            quoted = True
        elif quoted and (line[:1] in (" ", "|", "+")) and len(line) - len(bare) >= 4:
            continue
        else:
            quoted = False
            spoken.append(line)
    return spoken


def _pci(text: str) -> str:
    found = PCI.search(text)
    return "" if found is None else found.group(1).lower()


def _pid(text: str) -> int | None:
    found = PID.search(text)
    return None if found is None or len(found.group(1)) > 9 else int(found.group(1))


def _peer(text: str) -> str:
    found = PEER.search(text) if "<" in text or "peer" in text or " to " in text else None
    return "" if found is None else found.group(1)
