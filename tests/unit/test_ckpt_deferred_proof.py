"""A comparison that is put off until the rank has its copy keeps the slot for that long, and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine import lending
from ckpt_engine.lending import Lending
from tests.ckpt_lab import Lab, RawRank, engine_in_thread, eventually


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


def rank_with_two_steps(lab: Lab) -> RawRank:
    rank = RawRank(lab.socket)
    for step in (1, 2):
        rank.save(step, b"x" * 100)
        assert rank.durable(step) == ""
    return rank


def ask(rank: RawRank, **fields: object) -> dict[str, object]:
    reply, descriptors = rank.link.ask(fields)
    lending.wire.close_all(descriptors)
    return reply


LOADED = {"op": "loaded", "tier": "memory", "step": 1, "attempt": 1, "seconds": 0.1, "size_bytes": 100}


def test_it_begins_when_the_rank_has_its_copy(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    plain = Lending.compare

    def compare(self: Lending, reading: lending.Reading) -> str:
        compared.append(reading.header.step)
        return plain(self, reading)

    monkeypatch.setattr(Lending, "compare", compare)
    with rank_with_two_steps(lab) as rank:
        assert ask(rank, op="load", step=1, verify="deferred")["verified"] is False
        assert compared == []
        ask(rank, **LOADED)
        eventually(lambda: compared == [1], "the comparison")
        assert ask(rank, op="await_proof", timeout_seconds=10.0) == {"settled": True, "reason": ""}
        assert compared == [1], "once"


def test_who_asks_for_it_before_gets_it(lab: Lab) -> None:
    with rank_with_two_steps(lab) as rank:
        ask(rank, op="load", step=1, verify="deferred")
        assert ask(rank, op="await_proof", timeout_seconds=10.0) == {"settled": True, "reason": ""}


@pytest.mark.parametrize("end", ["return", "load", "hang up"])
def test_a_copy_that_is_not_used_is_given_back(lab: Lab, end: str) -> None:
    with rank_with_two_steps(lab) as rank:
        ask(rank, op="load", step=1, verify="deferred")
        with pytest.raises(TimeoutError):
            rank.acquire(3, 100, wait_seconds=0.0)
        if end == "return":
            ask(rank, op="return")
        elif end == "load":
            ask(rank, op="load", step=2, verify="deferred")
        else:
            rank.link.close()
            rank.segments.clear()
        rank.acquire(3, 100, wait_seconds=5.0)
