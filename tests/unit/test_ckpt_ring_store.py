"""What an engine keeps for others: two slots a shard, under a cap, and never half of anything."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

from ckpt_engine.rejection import Rejection
from ckpt_engine.ring_store import PeerSlot, PeerStore
from ckpt_engine.ring_transfer import cut, seal_received
from ckpt_engine.ring_wire import PeerRefused
from ckpt_engine.segment import PAGE_BYTES, SlotHeader
from ckpt_engine.shardfile import Identity
from tests.ckpt_lab import raw_segment

SIZE = 3 * PAGE_BYTES
CHUNK = 1024


def header_of(rank: int, step: int, attempt: int = 1) -> SlotHeader:
    return raw_segment(step, b"%d" % step, Identity("job", attempt, rank, 4, -1))[0]


class Keeping:
    """A store with room for `slots` slots."""

    def __init__(self, slots: int = 8) -> None:
        self.rejections: list[Rejection] = []
        self.store = PeerStore(slots * SIZE, lambda: self.rejections)

    def begin(self, rank: int, step: int, attempt: int = 1, size: int = SIZE) -> PeerSlot | None:
        return self.store.begin(header_of(rank, step, attempt), size, "n0", None)

    def put(self, rank: int, step: int, attempt: int = 1, crc32: int = 7) -> PeerSlot:
        slot = self.begin(rank, step, attempt)
        assert slot is not None
        self.store.commit(slot, header_of(rank, step, attempt), CHUNK, (1, 2), crc32)
        return slot

    def steps(self) -> list[tuple[int, int]]:
        return [(header.rank, header.step) for _, header in self.store.whole()]


def test_the_older_copy_stays_whole_until_the_newer_is() -> None:
    keeping = Keeping()
    keeping.put(0, 10)
    keeping.put(0, 20)
    slot = keeping.begin(0, 30)
    assert keeping.steps() == [(0, 20)], "the oldest gives way, the newest never"
    assert slot is not None
    keeping.store.abandon(slot)
    assert keeping.steps() == [(0, 20)]
    keeping.put(0, 30)
    assert keeping.steps() == [(0, 30), (0, 20)]
    assert keeping.store.memory_bytes == 2 * SIZE, "the memory of an abandoned slot is used again"


def test_what_is_here_already_is_not_sent_again() -> None:
    keeping = Keeping()
    keeping.put(0, 10, crc32=7)
    header = header_of(0, 10)
    assert keeping.store.begin(header, SIZE, "n0", None) is None
    assert keeping.store.begin(header, SIZE, "n0", 7) is None
    assert keeping.store.begin(header, SIZE, "n0", 8) is not None, "other bytes under the same name replace it"
    assert keeping.steps() == []


def test_an_older_shard_does_not_replace_a_newer_one() -> None:
    keeping = Keeping()
    keeping.put(0, 20, attempt=2)
    with pytest.raises(PeerRefused, match="newer, is here already"):
        keeping.begin(0, 30, attempt=1)


def test_a_rejected_shard_is_not_handed_out_and_gives_way_first() -> None:
    keeping = Keeping()
    keeping.put(0, 10)
    keeping.put(0, 20)
    keeping.rejections.append(Rejection(20, 1, "NaN"))
    assert keeping.steps() == [(0, 10)]
    keeping.put(0, 20, attempt=2)
    assert keeping.steps() == [(0, 20), (0, 10)]


def test_two_senders_do_not_write_one_slot() -> None:
    keeping = Keeping()
    keeping.put(0, 10)
    assert keeping.begin(0, 20) is not None
    with pytest.raises(PeerRefused, match="still in use"):
        keeping.begin(0, 30)


def test_a_copy_that_is_being_read_is_not_overwritten() -> None:
    keeping = Keeping()
    old = keeping.put(0, 10)
    keeping.put(0, 20)
    assert keeping.store.lease(old, header_of(0, 10)) is not None
    with pytest.raises(PeerRefused, match="still in use"):
        keeping.begin(0, 30)
    keeping.store.release(old)
    keeping.put(0, 30)
    assert keeping.store.lease(old, header_of(0, 10)) is None


def test_the_cap_holds_and_a_second_copy_goes_before_an_only_one() -> None:
    keeping = Keeping(slots=3)
    keeping.put(0, 10)
    keeping.put(0, 20)
    keeping.put(1, 20)
    keeping.put(2, 20)
    assert sorted(keeping.steps()) == [(0, 20), (1, 20), (2, 20)]
    with pytest.raises(PeerRefused, match=r"raise peer_memory_bytes_max"):
        keeping.begin(3, 20)
    assert keeping.store.memory_bytes <= keeping.store.memory_bytes_max
    assert sorted(keeping.steps()) == [(0, 20), (1, 20), (2, 20)]


def test_shards_of_an_older_attempt_give_way_to_those_of_the_newest() -> None:
    keeping = Keeping(slots=2)
    keeping.put(0, 20, attempt=1)
    keeping.put(1, 10, attempt=2)
    keeping.put(2, 10, attempt=2)
    assert sorted(keeping.steps()) == [(1, 10), (2, 10)]


def test_a_refused_shard_leaves_its_slot_free() -> None:
    keeping = Keeping(slots=1)
    with pytest.raises(PeerRefused):
        keeping.begin(0, 10, size=2 * SIZE)
    keeping.put(0, 10)
    assert keeping.steps() == [(0, 10)]


def test_a_shard_of_another_size_gets_memory_of_that_size() -> None:
    keeping = Keeping(slots=2)
    slot = keeping.put(0, 10)
    keeping.store.void(slot, header_of(0, 10))
    slot = keeping.begin(0, 20, size=SIZE - PAGE_BYTES) or slot
    assert slot.segment is not None
    assert slot.segment.size_bytes == SIZE - PAGE_BYTES
    assert keeping.store.memory_bytes <= 2 * SIZE


@pytest.mark.parametrize("where", ["layout", "payload"])
def test_decayed_memory_is_found_by_the_checksums_that_the_copy_came_with(where: str) -> None:
    keeping = Keeping()
    payload = bytes(range(256)) * 20
    header, view = raw_segment(10, payload, Identity("job", 1, 0, 4, -1))
    slot = keeping.store.begin(header, len(view), "n0", None)
    assert slot is not None
    assert slot.segment is not None
    slot.segment.view[:] = view
    plan = cut(header, CHUNK)
    crcs = tuple(zlib.crc32(view[piece.start : piece.stop]) for piece in plan.pieces)
    seal_received(slot.segment.view, header, plan.payload_crc32(crcs))
    keeping.store.commit(slot, header, CHUNK, crcs, plan.payload_crc32(crcs))
    assert plan.payload_crc32(crcs) == zlib.crc32(payload)
    assert keeping.store.lease(slot, header) is not None
    assert keeping.store.damage(slot, header, slot.segment.view) == ""
    at = PAGE_BYTES if where == "layout" else header.payload_offset + len(payload) - 1
    slot.segment.view[at] ^= 4
    assert "has changed in memory" in keeping.store.damage(slot, header, slot.segment.view)
    keeping.store.void(slot, header)
    assert keeping.steps() == []


def test_a_header_that_differs_is_another_shard() -> None:
    keeping = Keeping()
    keeping.put(0, 10)
    other = replace(header_of(0, 10), layout_hash=bytes(32))
    assert keeping.store.begin(other, SIZE, "n0", None) is not None
