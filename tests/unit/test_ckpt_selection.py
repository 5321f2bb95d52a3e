"""Which copy is the best: the newest first, the quickest tier of it, and never one that was found damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.agreement import Candidate
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.selection import Offer, Wanted, candidates_of, offers_for
from ckpt_engine.shardfile import Identity
from ckpt_engine.storage import Storage
from ckpt_engine.verification import VERIFIED, Verification, add_verification
from tests.ckpt_lab import Lab, RawRank, engine_in_thread, put_step

RANK = Identity("job", 9, 0, 1, -1)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Memory has 3 and 4 of attempt 1, the disk 1, 2, 3 and 4."""
    with engine_in_thread(tmp_path) as lab:
        with RawRank(lab.socket) as rank:
            for step in (2, 3, 4):
                rank.save(step, b"x")
                assert rank.durable(step) == ""
        put_step(lab.directory, 1)
        yield lab


def chosen(lab: Lab, wanted: Wanted, elsewhere: tuple[Offer, ...] = ()) -> list[tuple[str, int, int]]:
    offers = offers_for(lab.engine._table, lab.directory, wanted, elsewhere)
    return [(offer.tier, offer.attempt, offer.step) for offer in offers]


def test_newest_first_and_memory_before_disk(lab: Lab) -> None:
    expected = [("memory", 1, 4), ("disk", 1, 4), ("memory", 1, 3), ("disk", 1, 3), ("disk", 1, 2)]
    assert chosen(lab, Wanted(RANK))[:5] == expected


def test_peers_before_the_disk_and_the_object_store_last(lab: Lab) -> None:
    elsewhere = (Offer("object", 1, 4), Offer("peer", 1, 4), Offer("object", 2, 1), Offer("peer", 1, 9))
    found = chosen(lab, Wanted(RANK), elsewhere)
    assert found[:2] == [("object", 2, 1), ("peer", 1, 9)], "a later attempt is newer, whatever it costs"
    assert found[2:6] == [("memory", 1, 4), ("peer", 1, 4), ("disk", 1, 4), ("object", 1, 4)]


def test_one_step_of_one_attempt(lab: Lab) -> None:
    assert chosen(lab, Wanted(RANK, step=3)) == [("memory", 1, 3), ("disk", 1, 3)]
    assert chosen(lab, Wanted(RANK, step=3, attempt=2)) == []
    assert chosen(lab, Wanted(RANK, step=3), (Offer("peer", 2, 3),))[0] == ("peer", 2, 3)


def test_what_was_found_damaged_is_left_out(lab: Lab) -> None:
    without = frozenset({("memory", 1, 4), ("peer", 1, 4)})
    found = chosen(lab, Wanted(RANK, without=without), (Offer("peer", 1, 4),))
    assert found[0] == ("disk", 1, 4)


def test_only_verified_steps_where_that_is_asked(lab: Lab) -> None:
    add_verification(lab.directory, Verification(3, 1), Storage(), "test")
    found = chosen(lab, Wanted(RANK, verified_only=True), (Offer("peer", 1, 3), Offer("peer", 1, 4)))
    assert found == [("memory", 1, 3), ("peer", 1, 3), ("disk", 1, 3)]
    (lab.directory / VERIFIED).write_text("{")
    with pytest.raises(CheckpointDamaged, match=r"verified\.json is not readable"):
        chosen(lab, Wanted(RANK, verified_only=True))


def test_another_number_of_ranks_has_nothing(lab: Lab) -> None:
    assert chosen(lab, Wanted(Identity("job", 9, 0, 2, -1))) == []


def test_without_an_engine_there_is_the_disk(lab: Lab) -> None:
    offers = offers_for(None, lab.directory, Wanted(RANK))
    assert {offer.tier for offer in offers} == {"disk"}
    assert candidates_of([*offers, *offers])[:2] == [Candidate(1, 4), Candidate(1, 3)]
