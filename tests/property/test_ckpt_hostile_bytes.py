"""Whatever bytes a reader of the checkpoint engine meets: it says so or reads them right, and never falls over."""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine import wire
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.layout import decode_layout
from ckpt_engine.manifest import (
    Manifest,
    ShardRecord,
    decode_manifest,
    encode_manifest,
    encode_record,
    read_record,
    record_name,
    step_folder,
)
from ckpt_engine.rejection import REJECTED, Rejection, decode_rejections, encode_rejections, read_or_reject_all
from ckpt_engine.segment import (
    PAGE_BYTES,
    SlotState,
    layout_region,
    payload_region,
    read_checksum,
    read_header,
    read_sealed,
    read_state,
    segment_bytes,
    values_region,
    write_checksum,
)
from ckpt_engine.shardfile import Identity, ShardChecks, decode_header, encode_header, identity_of
from ckpt_engine.tree import dump_tree, encode_tree, load_tree
from ckpt_engine.verification import Verification, decode_verifications, encode_verifications
from tests.ckpt_lab import RAW_VALUES, fill_segment, raw_header

PAYLOAD = bytes(range(100))
IDENTITY = Identity("job", 3, 1, 2, -1)


def sealed_segment() -> bytearray:
    header, layout = raw_header(120, len(PAYLOAD), IDENTITY)
    raw = bytearray(segment_bytes(header.payload_offset, len(PAYLOAD)))
    fill_segment(memoryview(raw), header, layout, PAYLOAD)
    write_checksum(memoryview(raw), zlib.crc32(PAYLOAD))
    return raw


def read_all(raw: bytearray) -> tuple[object, ...]:
    """What a load would take from a segment, checks included."""
    view = memoryview(raw)
    header = read_sealed(view)
    crc = read_checksum(view)
    payload = bytes(payload_region(view, header))
    if crc is not None and zlib.crc32(payload) != crc:
        raise CheckpointDamaged("payload")
    layout = decode_layout(bytes(layout_region(view, header)), header.payload_bytes)
    return header, layout, load_tree(bytes(values_region(view, header)), len(layout.places)), payload


def test_every_flipped_bit_of_a_segment_is_seen_or_harmless() -> None:
    """All bits of the header page, layout, values and payload, one at a time."""
    raw = sealed_segment()
    good = read_all(raw)
    seen = 0
    for bit in range(len(raw) * 8):
        raw[bit // 8] ^= 1 << bit % 8
        try:
            assert read_all(raw) == good, f"bit {bit} changed what is read"
        except CheckpointDamaged:
            seen += 1
        raw[bit // 8] ^= 1 << bit % 8
    assert seen > 8 * len(PAYLOAD)
    assert read_all(raw) == good


@given(st.binary(max_size=PAGE_BYTES + 600))
def test_garbage_in_a_segment_is_damage(raw: bytes) -> None:
    for read in (read_header, read_sealed, read_state):
        try:
            read(memoryview(bytearray(raw)))
        except CheckpointDamaged:
            continue
        assert read is read_state, "only EMPTY can be read from garbage"


@given(st.integers(0, 199), st.binary(min_size=1, max_size=24))
def test_a_header_with_any_bytes_replaced_is_damage_or_the_same(at: int, piece: bytes) -> None:
    raw = sealed_segment()
    good = read_header(memoryview(raw))
    raw[at : at + len(piece)] = piece
    with contextlib.suppress(CheckpointDamaged):
        assert read_header(memoryview(raw)) == good


def test_a_segment_of_another_size_than_its_header_says_is_damage() -> None:
    raw = sealed_segment()
    with pytest.raises(CheckpointDamaged, match="speaks of"):
        read_header(memoryview(raw + bytes(PAGE_BYTES)))


def test_only_a_sealed_slot_is_read() -> None:
    raw = sealed_segment()
    for state in (SlotState.WRITING, SlotState.EMPTY):
        memoryview(raw)[1024:1032].cast("Q")[0] = state.value
        with pytest.raises(CheckpointDamaged, match="not SEALED"):
            read_sealed(memoryview(raw))


def shard_header() -> bytes:
    header, layout = raw_header(120, len(PAYLOAD), IDENTITY)
    return encode_header(identity_of(header), layout, decode_layout(layout, len(PAYLOAD)), RAW_VALUES)


def manifest_bytes() -> bytes:
    checks = ShardChecks(500, 1, 2)
    records = tuple(ShardRecord("job", 3, rank, 2, 120, "ab", checks) for rank in range(2))
    return encode_manifest(Manifest("job", 3, 2, 120, records))


def replicas_bytes() -> bytes:
    own = ShardRecord("job", 3, 0, 2, 120, "ab", ShardChecks(500, 1, 2))
    other = ShardRecord("job", 3, 1, 2, 120, "ab", ShardChecks(90, 1, 2), 0)
    return encode_manifest(Manifest("job", 3, 2, 120, (own, other)))


READERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "shard header": (lambda raw: decode_header(raw, len(raw) + len(PAYLOAD)), shard_header()),
    "layout": (lambda raw: decode_layout(raw, 8), b'{"tensors":[["w","int8",[8],0]]}'),
    "tree": (lambda raw: load_tree(raw, 1), RAW_VALUES),
    "manifest": (lambda raw: decode_manifest(raw, 120), manifest_bytes()),
    "manifest of replicas": (lambda raw: decode_manifest(raw, 120), replicas_bytes()),
    "rejections": (lambda raw: decode_rejections(raw, "it"), encode_rejections([Rejection(3, 1, "NaN")])),
    "verifications": (lambda raw: decode_verifications(raw, "it"), encode_verifications([Verification(3, 1)])),
    "packet": (wire.decode, b'{"op":"load","step":null}'),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["tensors", "shards", "format", "step", "$tensor", "$tuple", "$ordered", "$dict", "op"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_reader_says_what_is_wrong_and_nothing_else(name: str, data: st.DataObject) -> None:
    read, good = READERS[name]
    raw = data.draw(
        st.binary(max_size=200)
        | JSON.map(lambda value: json.dumps(value).encode())
        | st.tuples(st.integers(0, len(good) - 1), st.binary(max_size=6)).map(
            lambda change: good[: change[0]] + change[1] + good[change[0] + len(change[1]) :]
        )
    )
    with contextlib.suppress(CheckpointDamaged, wire.WireError):
        read(raw)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_survives_deep_nesting(name: str) -> None:
    with pytest.raises((CheckpointDamaged, wire.WireError)):
        READERS[name][0](b"[" * 100_000)


@given(JSON)
def test_unreadable_rejections_reject_everything(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.mktemp("rejections")
    (folder / REJECTED).write_text(json.dumps({"rejected": value}))
    entries = read_or_reject_all(folder)
    assert entries or value == [] or value in ("", {})


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=30)
def test_an_unreadable_record_is_no_record(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    folder = step_folder(tmp_path_factory.mktemp("records"), 7)
    folder.mkdir()
    (folder / record_name(0, 1)).write_bytes(raw)
    assert read_record(folder.parent, 7, 0, 1) is None


def test_a_record_of_another_shard_is_no_record(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 7)
    folder.mkdir()
    other = ShardRecord("job", 1, 0, 2, 8, "ab", ShardChecks(1, 2, 3))
    (folder / record_name(0, 1)).write_bytes(encode_record(other))
    assert read_record(tmp_path, 7, 0, 1) is None


def test_a_manifest_cannot_name_a_file_of_its_own_choice() -> None:
    raw = manifest_bytes().replace(b"shard-00001-a0003.safetensors", b"../../../../etc/shadow/rank-1")
    with pytest.raises(CheckpointDamaged, match="names the file"):
        decode_manifest(raw, 120)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=4) | st.integers() | st.sampled_from(["$tensor", "$dict"]), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(VALUES)
def test_any_tree_of_plain_values_comes_back_exactly(value: Any) -> None:
    back = load_tree(dump_tree(encode_tree(value, "state", lambda value, path: None)), 0)
    assert repr(back) == repr(value)


@given(st.lists(st.floats(width=64), max_size=5))
def test_floats_come_back_to_the_last_bit(values: list[float]) -> None:
    back = load_tree(dump_tree(encode_tree(values, "state", lambda value, path: None)), 0)
    assert [math.isnan(a) or a == b for a, b in zip(values, back, strict=True)] == [True] * len(values)
