"""The table of Xids: every code of the catalogue, the word behind NVLink's, and what a user changes of it."""

from __future__ import annotations

import pytest

from detectors.logs.rule import RuleError
from detectors.logs.rule_book import RuleBook
from detectors.logs.xid import XidLine, parse_xid, shipped_xids

TABLE = shipped_xids()
RULES = RuleBook.shipped()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            XidLine(79, "0000:3b:00", "", "", "GPU has fallen off the bus."),
        ),
        (
            "[123.4567] NVRM: Xid (PCI:0000:C5:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 17",
            XidLine(145, "0000:c5:00", "Nonfatal", "RLW_SRC_TRACK", "RLW_SRC_TRACK Nonfatal XC1 i0 Link 17"),
        ),
        ("NVRM: Xid (0000:41:00.0): 62, 0000(0000)", XidLine(62, "0000:41:00", "", "", "0000(0000)")),
        ("NVRM: Xid (PCI:00000000:41:00): 31", XidLine(31, "00000000:41:00", "", "", "")),
        ("watching for Xid errors on 8 GPUs", None),
    ],
)  # fmt: skip
def test_an_xid_line_is_taken_apart(line: str, expected: XidLine | None) -> None:
    assert parse_xid(line) == expected


def test_the_table_has_every_code_of_the_catalogue_that_is_in_use() -> None:
    codes = {row.code for row in TABLE.rows}
    assert len(codes) == 109
    assert {8, 31, 48, 79, 94, 95, 119, 140, 154, 172} <= codes
    assert all(row.mnemonic for row in TABLE.rows)


@pytest.mark.parametrize("row", TABLE.rows, ids=lambda row: f"{row.code}{row.word}")
def test_every_row_is_found_by_its_line(row) -> None:
    hit = RULES.match_line(f"NVRM: Xid (PCI:0000:3b:00): {row.code}, pid=1, name=x, ABC_DEF {row.word}")
    assert hit is not None
    assert (hit.rule.id, hit.rule.fault_class, hit.xid) == (row.rule, row.fault_class, row.code)


def rule(text: str):
    line = parse_xid(f"NVRM: Xid (PCI:0000:3b:00): {text}")
    assert line is not None
    return TABLE.rule(line)


def test_a_code_that_the_table_does_not_know_is_a_warning() -> None:
    assert rule("999, of a newer driver").fault_class == "warning"
    assert rule("145, without its word").fault_class == "warning"


def test_a_recovery_action_that_asks_for_nothing_confirms_nothing() -> None:
    assert rule("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)").role == "confirm"
    assert rule("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)").role == "root"
    assert rule("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)").advice == "none"


def test_a_user_changes_rows_by_code_and_word() -> None:
    changed = TABLE.changed(
        [
            {"code": 31, "advice": "restart_exclude_node"},
            {"code": 13, "enabled": False},
            {"code": 999, "class": "gpu_lost"},
        ]
    )
    assert changed.rule(XidLine(31, "0000:3b:00", "", "", "")).advice == "restart_exclude_node"
    assert changed.rule(XidLine(13, "0000:3b:00", "", "", "")) is None
    assert changed.rule(XidLine(999, "0000:3b:00", "", "", "")).fault_class == "gpu_lost"
    both = TABLE.changed([{"code": 145, "kind": "mine"}])
    assert {row.kind for row in both.rows if row.code == 145} == {"mine"}
    with pytest.raises(RuleError, match=r"Xid 31: .*advice"):
        TABLE.changed([{"code": 31, "advice": "pray"}])
    with pytest.raises(RuleError, match="needs code"):
        TABLE.changed([{"advice": "none"}])
