"""A shard between two engines: what arrives damaged is sent again, and what is not whole never counts."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.pace import TokenBucket
from ckpt_engine.ring_transfer import (
    RESENDS_MAX,
    Source,
    SourceDamaged,
    SourceGone,
    cut,
    describe,
    header_of,
    receive_shard,
    seal_received,
    send_shard,
)
from ckpt_engine.ring_wire import PeerError, PeerRefused
from ckpt_engine.segment import SlotState, payload_region, read_checksum, read_sealed, read_state
from ckpt_engine.shardfile import Identity
from ckpt_engine.wire import WireError
from tests.ckpt_lab import raw_segment
from tests.ring_lab import IO_SECONDS, Meddler, channels

CHUNK = 100
PAYLOAD = bytes(range(256)) * 4
IDENTITY = Identity("job", 3, 1, 2, -1)
KEY = b"k" * 32


class Transfer:
    """One shard on its way, the sender in a thread; `meddle` damages raw pieces by their number."""

    def __init__(
        self, payload: bytes = PAYLOAD, meddle: Callable[[int], bool] = lambda number: False, **source: Any
    ) -> None:
        in_object = source.pop("in_object", False)
        self.header, self.view = raw_segment(120, payload, IDENTITY)
        self.sender, self.receiver = channels(lambda sock: Meddler(sock, meddle, in_object=in_object))
        self.sender.secure(KEY, as_server=False)
        self.receiver.secure(KEY, as_server=True)
        self.source = Source(self.header, self.view, len(self.view), CHUNK, **{"unchanged": lambda: True, **source})
        self.target = memoryview(bytearray(len(self.view)))
        self.paced: list[int] = []

    def run(self) -> tuple[int, ...]:
        """Receive and seal; the checksums. Raises what either side raises, the receiver's first."""
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send_shard, self.sender, self.source, self.paced.append)
            try:
                crcs = receive_shard(self.receiver, self.header, CHUNK, self.target)
                payload_crc = cut(self.header, CHUNK).payload_crc32(crcs)
                seal_received(self.target, self.header, payload_crc)
                self.receiver.send({"stored": True})
            except CheckpointDamaged as error:
                self.receiver.send({"void": str(error)})
                with pytest.raises(PeerError):
                    sent.result(IO_SECONDS)
                raise
            except PeerError:
                self.receiver.close()
                self.failure = sent.exception(IO_SECONDS)
                raise
            finally:
                self.sent = sent
            assert sent.result(IO_SECONDS) == crcs
            return crcs

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def test_what_arrives_is_sealed_and_the_same() -> None:
    transfer = Transfer()
    transfer.run()
    assert read_sealed(transfer.target) == transfer.header
    assert bytes(payload_region(transfer.target, transfer.header)) == PAYLOAD
    assert read_checksum(transfer.target) == zlib.crc32(PAYLOAD)
    assert sum(transfer.paced) >= len(PAYLOAD), "each piece asks the pace first"
    transfer.close()


def test_a_shard_without_tensors_arrives_too() -> None:
    transfer = Transfer(b"")
    transfer.run()
    assert read_sealed(transfer.target) == transfer.header
    assert read_checksum(transfer.target) == 0
    transfer.close()


@pytest.mark.parametrize("number", [0, 3, 11])
def test_a_flipped_bit_in_a_piece_has_that_piece_sent_again(number: int) -> None:
    transfer = Transfer(meddle=lambda at: at == number)
    crcs = transfer.run()
    assert bytes(payload_region(transfer.target, transfer.header)) == PAYLOAD
    plan = cut(transfer.header, CHUNK)
    assert len(transfer.paced) == len(plan.pieces) + 1
    assert transfer.paced[-1] == plan.pieces[number].size_bytes
    assert len(crcs) == len(plan.pieces)
    transfer.close()


def test_a_line_that_damages_everything_is_given_up_and_nothing_is_sealed() -> None:
    transfer = Transfer(meddle=lambda at: True)
    with pytest.raises(CheckpointDamaged, match="kept arriving damaged"):
        transfer.run()
    assert len(transfer.paced) == len(cut(transfer.header, CHUNK).pieces) * (RESENDS_MAX + 1)
    assert read_state(transfer.target) is SlotState.WRITING
    transfer.close()


def test_a_flipped_bit_in_what_describes_a_piece_ends_the_connection() -> None:
    transfer = Transfer(meddle=lambda at: at == 3, in_object=True)
    with pytest.raises(PeerError):
        transfer.run()
    assert read_state(transfer.target) is SlotState.WRITING
    transfer.close()


def test_a_slot_that_a_save_takes_meanwhile_is_called_void_and_the_connection_goes_on() -> None:
    """No lease holds a save up; what was read of two saves must then never be whole."""
    looks = iter([True, True, True] + [False] * 99)
    transfer = Transfer(unchanged=lambda: next(looks))
    with pytest.raises(PeerRefused, match="overtaken by a newer save"):
        transfer.run()
    assert isinstance(transfer.failure, SourceGone)
    assert read_state(transfer.target) is SlotState.WRITING
    transfer.sender.close()


def test_a_save_that_takes_the_slot_after_the_last_piece_is_seen_too() -> None:
    header, _ = raw_segment(120, PAYLOAD, IDENTITY)
    looks = iter([True] * len(cut(header, CHUNK).pieces) + [False] * 9)
    transfer = Transfer(unchanged=lambda: next(looks))
    with pytest.raises(PeerRefused, match="overtaken"):
        transfer.run()
    transfer.sender.close()


def test_memory_that_is_not_what_its_checksum_says_is_not_handed_on() -> None:
    transfer = Transfer(payload_crc32=zlib.crc32(PAYLOAD) ^ 1)
    with pytest.raises(PeerRefused, match="does not match its checksum"):
        transfer.run()
    assert isinstance(transfer.failure, SourceDamaged)
    transfer.sender.close()


def test_a_kept_copy_that_has_decayed_is_found_by_the_checksums_that_it_came_with() -> None:
    first = Transfer()
    crcs = first.run()
    first.close()
    transfer = Transfer(crcs=crcs, payload_crc32=zlib.crc32(PAYLOAD))
    transfer.view[transfer.header.payload_offset + 250] ^= 1
    with pytest.raises(PeerRefused, match="memory has changed"):
        transfer.run()
    assert isinstance(transfer.failure, SourceDamaged)
    assert len(transfer.paced) == len(crcs) + 1, "only the piece that was asked for again is read again"
    transfer.sender.close()


def test_a_sender_that_dies_leaves_a_void() -> None:
    transfer = Transfer()
    transfer.sender.send({"piece": 0, "crc32": 1}, b"x" * 44)
    transfer.sender.close()
    with pytest.raises(PeerError):
        receive_shard(transfer.receiver, transfer.header, CHUNK, transfer.target)
    assert read_state(transfer.target) is SlotState.WRITING
    transfer.receiver.close()


def test_a_header_goes_through_json_and_comes_back() -> None:
    header, view = raw_segment(120, PAYLOAD, IDENTITY)
    assert header_of(describe(header), len(view), CHUNK) == header


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2}, {"rank": -1}, {"payload_bytes": 2**40}, {"layout_bytes": 2**40}, {"values_offset": 0},
        {"layout_hash": "zz"}, {"layout_hash": "00"}, {"job": 7}, {"job": ""}, {"job": "x" * 200}, {"step": True},
        {"payload_offset": "4096"},
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    header, view = raw_segment(120, PAYLOAD, IDENTITY)
    with pytest.raises(WireError):
        header_of({**describe(header), **change}, len(view), CHUNK)


@pytest.mark.parametrize(("segment_bytes", "chunk_bytes"), [(-4096, CHUNK), (8193, CHUNK), (1 << 60, 1), (8192, 0)])
def test_sizes_that_cannot_be_are_refused(segment_bytes: int, chunk_bytes: int) -> None:
    header, _ = raw_segment(120, PAYLOAD, IDENTITY)
    with pytest.raises(PeerError):
        header_of(describe(header), segment_bytes, chunk_bytes)


def test_a_rate_is_kept_on_the_clock_it_is_given() -> None:
    class Still:
        def now(self) -> float:
            return 0.0

        def monotonic(self) -> float:
            return 5.0

    bucket = TokenBucket(1000, Still())
    waits = [bucket.take(500) for _ in range(5)]
    assert waits[-1] == pytest.approx(waits[-2] + 0.5)
