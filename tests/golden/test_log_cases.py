"""The cases in data/logs: class and action right in all, and no benign line speaks. The rules were written on some."""

from __future__ import annotations

from pathlib import Path

import pytest

from detectors.diagnosis.symptoms import symptom_of, words
from detectors.logs.rule_book import RuleBook
from pipelines.evaluate.log_cases import LogCase, read_cases
from pipelines.evaluate.logs import Methods, names_of

LOGS = Path(__file__).resolve().parents[2] / "data" / "logs"
CASES = [case for name in ("cases.jsonl", "independent.md", "further.md") for case in read_cases(LOGS / name)]
METHODS = Methods()


@pytest.mark.parametrize("case", [case for case in CASES if not case.benign], ids=lambda case: case.id)
def test_class_and_action_are_right(case: LogCase) -> None:
    said = METHODS.diagnosis(case.lines)
    assert case.symptom in names_of(said.symptom), said.summary
    assert said.action == case.action


@pytest.mark.parametrize("case", [case for case in CASES if case.benign], ids=lambda case: str(len(case.lines)))
def test_no_benign_line_speaks_alone_or_among_the_others(case: LogCase) -> None:
    loud = [line for line in case.lines if METHODS.diagnosis((line,)).symptom != "none"]
    assert not loud
    assert METHODS.diagnosis(case.lines).symptom == "none"


def test_there_are_as_many_cases_as_promised() -> None:
    own = read_cases(LOGS / "cases.jsonl")
    assert sum(not case.benign for case in own) >= 60
    assert sum(len(case.lines) for case in own if case.benign) >= 60
    assert len({case.id for case in CASES if not case.benign}) == sum(not case.benign for case in CASES)


def test_every_kind_of_the_rules_has_words_and_every_words_a_kind() -> None:
    book = RuleBook.shipped()
    spoken = {rule.kind for rule in book.rules if rule.role not in ("noise", "advice")}
    spoken |= {row.kind for row in book.xids.rows} | {"xid_unknown"}
    assert spoken == set(words())
    assert {row.within for row in words().values() if row.within} <= set(words())


def test_the_finer_advice_of_a_symptom_is_given() -> None:
    book = RuleBook.shipped()
    assert symptom_of(book.by_id["port"]).action == "restart_new_port"
    assert symptom_of(book.by_id["nccl_timeout"]).action == "diagnose_then_restart"
    assert symptom_of(book.by_id["nfs"]).action == "restart_exclude_node"
    assert symptom_of(book.by_id["stale_fh"]).action == "restart_in_place"
