"""What an engine takes for a rank's memory, and that the copy of it is that memory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from ckpt_engine import live_copy
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.live_copy import LiveMemories, LiveMemory
from ckpt_engine.memfd import Segment, create_segment, madvise
from ckpt_engine.segment import FIELDS_END, PAGE_BYTES, SlotHeader, SlotState, payload_region, read_state
from ckpt_engine.shardfile import Identity
from tests.ckpt_lab import fill_segment, raw_header

PAYLOAD = os.urandom(3 * PAGE_BYTES + 5)
SIZE = 8 * PAGE_BYTES
MADV_REMOVE = 9


def image(step: int = 3, payload: bytes = PAYLOAD) -> tuple[Segment, SlotHeader]:
    """A rank's memory with a shard in it."""
    segment = create_segment(SIZE)
    header, layout = raw_header(step, len(payload), Identity("job", 1, 0, 1, -1))
    fill_segment(segment.view, header, layout, payload)
    return segment, header


@pytest.fixture
def memories() -> Iterator[LiveMemories]:
    memories = LiveMemories()
    yield memories
    memories.close()


@pytest.mark.parametrize("slot_bytes", [SIZE, SIZE + PAGE_BYTES], ids=["as long", "longer"])
def test_the_slot_gets_all_but_the_state_word(memories: LiveMemories, slot_bytes: int) -> None:
    segment, header = image()
    slot = create_segment(slot_bytes)
    assert memories.of(segment.descriptor, SIZE).copy(segment.descriptor, slot.view) == header
    assert bytes(payload_region(slot.view, header)) == PAYLOAD
    assert read_state(slot.view) is SlotState.EMPTY
    assert bytes(slot.view[FIELDS_END:PAGE_BYTES]) == bytes(PAGE_BYTES - FIELDS_END)


def test_it_is_mapped_once_and_read_as_it_is_then(memories: LiveMemories, monkeypatch: pytest.MonkeyPatch) -> None:
    segment, header = image()
    slot, mapped = create_segment(SIZE), memories.of(segment.descriptor, SIZE)
    monkeypatch.setattr(live_copy, "LiveMemory", lambda *_: pytest.fail("it was mapped once more"))
    for byte in (b"a", b"b"):
        payload_region(segment.view, header)[:1] = byte
        again = os.dup(segment.descriptor)  # each save brings a descriptor of its own
        assert memories.of(again, SIZE) is mapped
        mapped.copy(again, slot.view)
        os.close(again)
        assert bytes(payload_region(slot.view, header)[:1]) == byte


def test_other_memory_takes_the_place_of_the_first(memories: LiveMemories) -> None:
    slot = create_segment(SIZE)
    for step in (1, 2):
        segment, header = image(step, bytes([step]) * 100)
        memories.of(segment.descriptor, SIZE).copy(segment.descriptor, slot.view)
        assert bytes(payload_region(slot.view, header)) == bytes([step]) * 100


def test_what_is_not_a_sealed_memfd_of_that_size_is_refused(memories: LiveMemories) -> None:
    segment, _ = image()
    reading, writing = os.pipe()
    loose = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, SIZE)
    fcntl.fcntl(loose, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    for descriptor, size in ((reading, SIZE), (loose, SIZE), (segment.descriptor, 2 * SIZE), (segment.descriptor, 0)):
        with pytest.raises(CheckpointDamaged, match="the rank's memory is not"):
            memories.of(descriptor, size)
    for descriptor in (reading, writing, loose):
        os.close(descriptor)


def test_what_does_not_fit_is_no_shard_or_has_holes_is_refused() -> None:
    segment, _ = image()
    memory = LiveMemory(segment.descriptor, SIZE)
    with pytest.raises(CheckpointDamaged, match="does not fit a slot of 4096"):
        memory.copy(segment.descriptor, create_segment(PAGE_BYTES).view)
    slot = create_segment(SIZE)
    segment.view[0:4] = b"XXXX"
    with pytest.raises(CheckpointDamaged, match="does not start with a slot header"):
        memory.copy(segment.descriptor, slot.view)
    madvise(segment.view[4 * PAGE_BYTES :], MADV_REMOVE)
    with pytest.raises(CheckpointDamaged, match="has given pages of its memory back"):
        memory.copy(segment.descriptor, slot.view)
    memory.close()
