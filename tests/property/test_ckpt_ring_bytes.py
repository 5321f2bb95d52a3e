"""Whatever bytes an engine of the ring meets, from a stranger or from a peer: a refusal, never an error of ours."""

from __future__ import annotations

import contextlib
import json
import socket
import zlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.checksum import joined
from ckpt_engine.clock import HostClock
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.ring_handshake import Peer, answer, prove
from ckpt_engine.ring_link import Holding, PeerLink
from ckpt_engine.ring_members import decode_member
from ckpt_engine.ring_transfer import cut, describe, header_of, receive_shard
from ckpt_engine.ring_wire import OBJECT_BYTES_MAX, PREFIX, Channel, PeerError, decode_prefix, encode_frame
from ckpt_engine.segment import SlotHeader
from ckpt_engine.shardfile import Identity
from ckpt_engine.wire import WireError
from tests.ckpt_lab import raw_segment

TOKEN = b"t" * 32
FEW = settings(max_examples=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
HEADER, VIEW = raw_segment(7, bytes(range(200)), Identity("job", 1, 0, 2, -1))


def channel_with(raw: bytes) -> tuple[Channel, socket.socket]:
    """A channel whose peer has sent `raw` and then nothing more."""
    left, right = socket.socketpair()
    left.sendall(raw)
    left.shutdown(socket.SHUT_WR)
    return Channel(right, HostClock(), 5.0), left


@given(st.binary(min_size=PREFIX.size, max_size=PREFIX.size), st.integers(0, 1 << 24))
def test_any_twelve_bytes_are_a_bounded_frame_or_refused(prefix: bytes, raw_bytes_max: int) -> None:
    with contextlib.suppress(PeerError):
        object_bytes, raw_bytes = decode_prefix(prefix, raw_bytes_max)
        assert object_bytes <= OBJECT_BYTES_MAX
        assert raw_bytes <= raw_bytes_max


@FEW
@given(st.binary(max_size=300))
def test_a_stranger_can_send_anything(raw: bytes) -> None:
    for greet in (
        lambda channel: answer(channel, TOKEN, "job", Peer("n1", "e"), bytes),
        lambda channel: prove(channel, TOKEN, "job", "n0", bytes),
    ):
        channel, left = channel_with(raw)
        try:
            greet(channel)
            raise AssertionError("nobody proves a token by chance")
        except WireError:
            pass
        finally:
            channel.close()
            left.close()


@FEW
@given(st.dictionaries(st.sampled_from(["protocol", "node", "epoch", "nonce", "job", "proof", "refused"]), JSON))
def test_a_stranger_can_say_anything(fields: dict[str, Any]) -> None:
    test_a_stranger_can_send_anything.hypothesis.inner_test(encode_frame(fields, 0))


@FEW
@given(st.one_of(JSON, st.fixed_dictionaries({name: JSON for name in describe(HEADER)})), st.integers(), st.integers())
def test_any_description_of_a_slot_is_possible_or_refused(fields: Any, segment_bytes: int, chunk_bytes: int) -> None:
    with contextlib.suppress(WireError):
        header = header_of(fields, segment_bytes, chunk_bytes)
        assert header.payload_offset + header.payload_bytes <= segment_bytes


@given(st.sampled_from(sorted(describe(HEADER))), st.integers(-(2**63), 2**63 - 1))
def test_a_slot_with_one_number_replaced_stays_within_its_segment(name: str, number: int) -> None:
    with contextlib.suppress(WireError):
        header = header_of({**describe(HEADER), name: number}, len(VIEW), 1 << 16)
        pieces = cut(header, 1 << 16).pieces
        assert all(0 <= piece.start < piece.stop <= len(VIEW) for piece in pieces)


FRAMES = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(["piece", "crc32", "end", "void", "again", "stored"]), JSON),
        st.binary(max_size=64),
    )
    | st.tuples(st.builds(lambda crc: {"piece": 0, "crc32": crc}, st.integers(0, 2**32)), st.just(b"x" * 64)),
    max_size=6,
)


@FEW
@given(FRAMES)
def test_a_peer_can_send_anything_in_the_place_of_pieces(frames: list[tuple[dict[str, Any], bytes]]) -> None:
    channel, left = channel_with(b"".join(encode_frame(fields, len(raw)) + raw for fields, raw in frames))
    target = memoryview(bytearray(len(VIEW)))
    try:
        receive_shard(channel, HEADER, 64, target)
        raise AssertionError("a whole shard does not come by chance")
    except (WireError, CheckpointDamaged):
        pass
    finally:
        channel.close()
        left.close()


@FEW
@given(JSON)
def test_a_peer_can_answer_anything_to_a_question(reply: Any) -> None:
    def no_memory(header: SlotHeader, size_bytes: int) -> Any:
        raise AssertionError("nothing was offered")

    raw = json.dumps(reply).encode()
    for ask in (
        lambda link: link.holdings(),
        lambda link: link.fetch(Holding("n1", "n0", 0, 7, 1, 2, 200), no_memory),
    ):
        channel, left = channel_with(PREFIX.pack(b"TRN1", len(raw), 0) + raw)
        with contextlib.suppress(WireError):
            ask(PeerLink(channel, Peer("n1", "e"), "job"))
        channel.close()
        left.close()


@given(st.binary(max_size=200))
def test_any_file_is_a_member_or_nobody(raw: bytes) -> None:
    decode_member(raw)


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_the_checksum_of_a_whole_follows_from_those_of_its_pieces(pieces: list[bytes]) -> None:
    crc = 0
    for piece in pieces:
        crc = joined(crc, zlib.crc32(piece), len(piece))
    assert crc == zlib.crc32(b"".join(pieces))
