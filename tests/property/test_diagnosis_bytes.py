"""How the bytes of a log arrive changes nothing, garbage breaks nothing, and the gate passes nothing over."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.diagnosis import sightings
from detectors.diagnosis.diagnosis import Diagnoser, Diagnosis
from detectors.diagnosis.places import listen
from detectors.diagnosis.scan import LineGate
from detectors.logs.rule_book import RuleBook

RULES = RuleBook.shipped()
GATE = LineGate(RULES.rules, sightings.REMARKS)
XIDS = [f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=7, name=python3, Ch 1" for code in (13, 31, 48, 63, 79, 94, 119)]
POSITIVES = [line for rule in RULES.rules for line in rule.must_match] + XIDS
CHAFF = [
    "step 100 | loss 2.31 | lr 1e-4",
    " [2025-02-01 12:00:01] iteration 1200/ 500000 | lm loss: 2.4E+00 | number of nan iterations:   0 |",
    "node0:1:2 [0] NCCL INFO Connected all rings",
    "[rank3]: 2025-02-01 12:00:01 INFO trainer: saving checkpoint at iteration 4000",
    "  1%|▏         | 24/1752 [01:08<1:22:56,  2.88s/it]\r  1%|▏         | 25/1752 [01:10<1:22:56,  2.88s/it]",
    "",
]


def whole(octets: bytes) -> Diagnosis:
    diagnoser = Diagnoser(RULES)
    diagnoser.feed("train.log", octets)
    return diagnoser.conclude()


def in_pieces(octets: bytes, sizes: list[int]) -> Diagnosis:
    diagnoser = Diagnoser(RULES)
    at = number = 0
    while at < len(octets):
        size = sizes[number % len(sizes)]
        diagnoser.feed("train.log", octets[at : at + size])
        at, number = at + size, number + 1
    return diagnoser.conclude()


@given(
    st.lists(st.sampled_from([*CHAFF, *POSITIVES]), max_size=40), st.lists(st.integers(1, 700), min_size=1, max_size=8)
)
@settings(max_examples=20, deadline=None)
def test_bytes_in_pieces_of_any_size_give_what_the_whole_gives(lines: list[str], sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sightings, "BLOCK_BYTES", 512)  # so that a small log has many blocks
        octets = ("\n".join(lines) + "!").encode()
        assert in_pieces(octets, sizes) == whole(octets)


@given(st.binary(max_size=3000))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_read(octets: bytes) -> None:
    found = whole(octets)
    assert found.looked.octets == len(octets)
    assert found.looked.lines == (octets.count(b"\n") + (not octets.endswith(b"\n")) if octets else 0)


@given(
    st.sampled_from(POSITIVES),
    st.lists(st.sampled_from(CHAFF), max_size=3),
    st.lists(st.sampled_from(CHAFF), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_the_gate_lets_every_line_through_that_a_rule_matches(line: str, before: list[str], after: list[str]) -> None:
    block = "\n".join([*before, line, *after]).encode()
    passed = {block[begin:end].decode() for begin, end in GATE.lines(block, block.lower())}
    assert line in passed or RULES.match_line(listen(line).text) is None


def test_every_line_of_every_rule_passes_the_gate() -> None:
    for line in POSITIVES:
        block = line.encode()
        assert list(GATE.lines(block, block.lower())) or RULES.match_line(line) is None, line


def test_memory_stays_bounded_however_long_a_log_and_its_lines_are() -> None:
    random.seed(7)
    diagnoser = Diagnoser(RULES)
    piece = "\n".join(random.choice(CHAFF) for _ in range(4000)).encode() + b"\n"
    for _ in range(20):
        diagnoser.feed("a.log", piece)
        diagnoser.feed("b.log", b"x" * len(piece))  # one line without an end
    for source in diagnoser._sources.values():
        assert len(source._buffer) <= 2 * sightings.BLOCK_BYTES
        assert len(source.pending) <= sightings.SIGHTINGS_MAX
        assert len(source.marks) <= sightings.MARKS_MAX
    assert diagnoser.conclude().looked.octets == 40 * len(piece)
