"""docs/log-rules.md tells the same truth as the rules: every rule, every group of Xids, every field of a rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from detectors.logs.rule import Rule, RuleRole, check_rule
from detectors.logs.rule_book import RuleBook

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "log-rules.md").read_text(encoding="utf-8")
RULES = RuleBook.shipped()


def rows() -> list[str]:
    """The table of rules as the code has them."""
    return [
        f"| `{rule.id}` | {rule.kind} | `{rule.fault_class}` | {rule.role} | {rule.advice} | {rule.severity} |"
        for rule in RULES.rules
    ]


def xid_rows() -> list[str]:
    """The table of Xids, codes with the same meaning together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in RULES.xids.rows:
        key = (row.rule, row.kind, row.fault_class, row.role, row.advice)
        groups.setdefault(key, []).append(f"{row.code} {row.word}".strip())
    return [
        f"| `{key[0]}` | {', '.join(codes)} | {key[1]} | `{key[2]}` | {key[3]} | {key[4]} |"
        for key, codes in groups.items()
    ]


@pytest.mark.parametrize(
    "row", [*rows(), *xid_rows()], ids=lambda row: row.split("`")[1] + row.split("|")[2].strip()[:20]
)
def test_every_rule_stands_in_the_document(row: str) -> None:
    assert row in DOCUMENT.splitlines()


def test_no_rule_stands_there_that_is_gone() -> None:
    known = {rule.id for rule in RULES.rules} | {row.rule for row in RULES.xids.rows}
    told = re.findall(r"^\| `([a-z_0-9]+)` \| [^|]* \| [^|]*\| [^|]*\| [^|]*\| ", DOCUMENT, re.MULTILINE)
    assert set(told) == known


@pytest.mark.parametrize("name", [field.encode_name for field in msgspec.structs.fields(Rule)])
def test_every_field_of_a_rule_is_explained(name: str) -> None:
    assert f"| `{name}` |" in DOCUMENT


@pytest.mark.parametrize("role", get_args(RuleRole))
def test_every_role_is_explained(role: str) -> None:
    assert f"* **{role}**" in DOCUMENT


def test_the_rule_that_the_document_shows_is_a_good_one(tmp_path: Path) -> None:
    for number, text in enumerate(re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)):
        (tmp_path / f"{number}.toml").write_text(text, encoding="utf-8")
    book = RuleBook.load_with(tmp_path)
    own = [rule for rule in book.rules if rule.id not in RULES.by_id]
    assert [rule.id for rule in own] == ["fan_tray"]
    check_rule(own[0])
