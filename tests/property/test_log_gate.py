"""The gate before the log rules is a superset of them: no line that a pattern matches is kept from it."""

from __future__ import annotations

import re

from hypothesis import example, given, settings
from hypothesis import strategies as st

from detectors.logs.line_gate import LineGate
from detectors.logs.line_prefixes import strip_prefixes
from detectors.logs.rule_book import RuleBook

RULES = RuleBook.shipped()
ACTIVE = [rule for rule in RULES.rules if rule.enabled]
NUMBER_OF = {rule.id: number for number, rule in enumerate(ACTIVE)}
OWN = [(rule.id, strip_prefixes(line)) for rule in ACTIVE for line in rule.must_match]


def assert_gate_is_open(rule_id: str, line: str) -> None:
    assert NUMBER_OF[rule_id] in RULES.gate.open_for(line.lower()), (rule_id, line)


@settings(max_examples=600, deadline=None)
@given(data=st.data(), index=st.integers(0, len(ACTIVE) - 1), before=st.text(max_size=9))
def test_whatever_a_pattern_matches_opens_its_gate(data, index: int, before: str) -> None:
    rule = ACTIVE[index]
    line = data.draw(st.from_regex(re.compile(rule.pattern, re.ASCII), fullmatch=True))
    assert_gate_is_open(rule.id, line)
    if rule.compiled().search(before + line):
        assert_gate_is_open(rule.id, before + line)


@settings(max_examples=600, deadline=None)
@given(
    own=st.sampled_from(OWN), cut=st.integers(0, 40), before=st.text(max_size=9), after=st.text(max_size=9),
    case=st.sampled_from([str, str.upper, str.lower, str.title]), spot=st.integers(0, 300), junk=st.text(max_size=3),
)  # fmt: skip
def test_a_rules_own_line_mutated_opens_its_gate_as_long_as_it_matches(
    own, cut: int, before: str, after: str, case, spot: int, junk: str
) -> None:
    rule_id, line = own
    mutated = f"{before}{case(line[:spot] + junk + line[spot:])[cut:]}{after}"
    if RULES.by_id[rule_id].compiled().search(mutated):
        assert_gate_is_open(rule_id, mutated)


@given(
    gates=st.lists(st.lists(st.text(alphabet="abc é", min_size=1, max_size=12), min_size=1, max_size=3), max_size=8),
    line=st.text(alphabet="abc é", max_size=40),
)
@example(gates=[["abcabca"]], line="cabcabcacc")
def test_the_gate_finds_exactly_what_a_search_for_each_piece_finds(gates: list[list[str]], line: str) -> None:
    slow = [number for number, pieces in enumerate(gates) if any(piece in line for piece in pieces)]
    assert LineGate(gates).open_for(line) == slow
