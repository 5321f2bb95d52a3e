"""Labelled log cases: a Markdown file with a heading and a fence a case, or JSON lines of our own.

Markdown: `## ID — `class` → `action``, a line `Culprit: …`, a fenced block of lines; and one section whose heading
begins with `## Benign` with one fenced block, of which every line must stay silent, alone and all together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .evaluation import CannotEvaluate

HEADING = re.compile(r"^##\s+(?P<id>.+?)\s+[—–-]+\s+`(?P<symptom>[\w-]+)`\s*(?:→|->|=>)\s*`(?P<action>[\w-]+)`\s*$")
BENIGN = re.compile(r"^##\s+benign\b", re.IGNORECASE)
CULPRIT = re.compile(r"^Culprit:\s*(.*)$")
FENCE = re.compile(r"^\s*(```+|~~~+)")


class LogCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case. `symptom` and `action` as the file names them; a benign case has neither, each of its lines counts."""

    id: str
    symptom: str = msgspec.field(name="class", default="none")
    action: str = "none"
    culprit: str = ""
    lines: tuple[str, ...]
    benign: bool = False


def read_cases(path: Path) -> list[LogCase]:
    """The cases of a file. Raises CannotEvaluate where it cannot be read or holds none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CannotEvaluate(f"{path} cannot be read ({error.strerror}); name a file of log cases") from error
    found = _from_json_lines(path, text) if path.suffix in (".jsonl", ".json") else _from_markdown(text)
    cases = list(found)
    if not cases:
        raise CannotEvaluate(
            f"{path} holds no cases; a case is a heading '## ID — `class` → `action`' with a fenced block of lines, or "
            "a JSON line with id, class, action and lines"
        )
    return cases


def _from_json_lines(path: Path, text: str) -> Iterator[LogCase]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield msgspec.json.decode(line, type=LogCase)
        except msgspec.DecodeError as error:
            raise CannotEvaluate(f"line {number} of {path} is not a log case: {error}") from error


def _from_markdown(text: str) -> Iterator[LogCase]:
    """Cases in their order; a section that is neither a case nor the benign one is passed over."""
    name, labels, culprit, benign = "", None, "", False
    lines: list[str] = []
    fence = ""
    for line in [*text.splitlines(), "##"]:
        opened = FENCE.match(line)
        if fence:
            if opened is not None and line.strip() == fence:
                fence = ""
            else:
                lines.append(line)
            continue
        if opened is not None:
            fence = opened.group(1)
        elif line.startswith("##"):
            if lines and (labels is not None or benign):
                symptom, action = labels or ("none", "none")
                yield LogCase(
                    id=name, symptom=symptom, action=action, culprit=culprit, lines=tuple(lines), benign=benign
                )
            heading = HEADING.match(line)
            benign = BENIGN.match(line) is not None
            name = heading["id"] if heading is not None else "benign"
            labels = (heading["symptom"], heading["action"]) if heading is not None else None
            lines, culprit = [], ""
        elif found := CULPRIT.match(line):
            culprit = found.group(1)
