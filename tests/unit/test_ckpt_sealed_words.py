"""Layout and values of a slot have no checksum but the slot's own: whoever copies them elsewhere compares it first."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from ckpt_engine.commit import commit_shard
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.manifest import step_folder
from ckpt_engine.outline import Outlines, decode_outline, outline_of
from ckpt_engine.ring_transfer import Source, SourceDamaged, receive_shard, send_shard
from ckpt_engine.ring_wire import PeerRefused
from ckpt_engine.segment import SlotHeader
from ckpt_engine.shardfile import Identity, identity_of
from ckpt_engine.storage import Storage
from tests.ckpt_lab import raw_segment
from tests.ring_lab import channels

CHUNK_BYTES = 64 << 10


def slot() -> tuple[SlotHeader, memoryview]:
    return raw_segment(7, bytes(range(256)) * 300, Identity("job", 1, 0, 1, -1))


@pytest.mark.parametrize("region", ["values_offset", "layout"])
def test_a_bit_that_flips_before_a_slot_is_written_does_not_reach_the_disk(tmp_path: Path, region: str) -> None:
    header, view = slot()
    view[header.values_offset + 3 if region == "values_offset" else 4096 + 5] ^= 1
    with pytest.raises(CheckpointDamaged):
        commit_shard(Storage(), tmp_path, header, view, writer="n0")
    assert not list(step_folder(tmp_path, 7).iterdir()), "not even for a moment"


def test_a_bit_that_flips_before_a_slot_is_copied_does_not_reach_a_peer() -> None:
    header, view = slot()
    view[header.values_offset + 3] ^= 1
    left, right = channels()
    refused: list[Exception] = []

    def receive() -> None:
        try:
            receive_shard(right, header, CHUNK_BYTES, memoryview(bytearray(len(view))))
        except PeerRefused as error:
            refused.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    with pytest.raises(SourceDamaged, match="its layout or values have changed since it was sealed"):
        send_shard(left, Source(header, view, len(view), CHUNK_BYTES, lambda: True), lambda _: None)
    thread.join(20)
    assert len(refused) == 1
    left.close()
    right.close()


def test_an_outline_is_read_as_it_was_written_and_nothing_else_is_one() -> None:
    header, view = slot()
    outline = outline_of(header, view)
    raw = outline.encoded()
    assert decode_outline(raw) == outline
    assert set(outline.digests) == {"bytes"}
    for cut in (0, 10, 24, len(raw) // 2, len(raw) - 1):
        with pytest.raises(CheckpointDamaged):
            decode_outline(raw[:cut])
    for at in range(0, len(raw), 7):
        changed = bytearray(raw)
        changed[at] ^= 0x20
        with contextlib.suppress(CheckpointDamaged):
            assert decode_outline(bytes(changed)) != outline
    view[header.payload_offset] ^= 1
    assert outline_of(header, view).digests != outline.digests
    view[header.values_offset] ^= 1
    with pytest.raises(CheckpointDamaged):
        outline_of(header, view)


def test_outlines_are_made_once_and_forgotten_when_they_are_too_many() -> None:
    header, view = slot()
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return outline_of(header, view).encoded()

    whole = identity_of(header)
    roomy, tight = Outlines(), Outlines(bytes_max=100)
    assert roomy.of(whole, make) == roomy.of(whole, make)
    assert len(made) == 1
    tight.of(whole, make)
    tight.of(whole, make)
    assert len(made) == 3
