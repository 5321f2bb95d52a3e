"""Whatever a keeper or an engine meets on its socket or in kept memory: it says so or goes on, and never falls over."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine import wire
from ckpt_engine.adoption import take_back
from ckpt_engine.budget import MemoryBudget
from ckpt_engine.clock import HostClock
from ckpt_engine.keeper import Keeper, Refused
from ckpt_engine.keeping import KeptSlot
from ckpt_engine.memfd import create_segment
from ckpt_engine.memory_room import cgroup_rooms, host_room
from ckpt_engine.segment import PAGE_BYTES, read_header
from ckpt_engine.slots import SlotTable
from tests.keeper_lab import sealed_memory

OPERATIONS = ("hello", "fetch", "keep", "drop", "settle", "ping", "end", "status", "eat")
FIELDS = st.dictionaries(
    st.sampled_from(["protocol", "job", "guardian", "guardian_start_time", "shard", "index", "at"]),
    st.none() | st.integers(-3, 2**70) | st.text(max_size=70) | st.booleans() | st.floats() | st.lists(st.integers()),
)
HELLO = {"op": "hello", "protocol": wire.PROTOCOL, "job": "job", "guardian": 0}


@contextmanager
def keeper(folder: Path) -> Iterator[tuple[Keeper, socket.socket]]:
    """A keeper that nobody runs, and a connection that it takes for its engine's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = Keeper(folder / "k.keep", "job", 60.0)
    with ours, theirs:
        made.answer(theirs, HELLO, [])
        yield made, theirs
        made._close()


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), FIELDS, st.integers(0, 2)), max_size=8))
def test_a_keeper_answers_or_refuses_and_leaks_no_descriptor(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[str, dict[str, Any], int]]
) -> None:
    segment = create_segment(PAGE_BYTES)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with keeper(tmp_path_factory.getbasetemp()) as (made, sock):
        for operation, fields, count in requests:
            descriptors = [segment.duplicate() for _ in range(count)]
            with suppress(Refused, wire.WireError):
                reply = made.answer(sock, {**HELLO, **fields, "op": operation}, descriptors)
                if reply is not None:
                    json.dumps(reply[0])
                    wire.close_all(reply[1])
            wire.close_all(descriptors)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    segment.close()


@given(st.integers(0, PAGE_BYTES + 200), st.binary(min_size=1, max_size=40))
def test_kept_memory_with_any_bytes_replaced_is_adopted_as_it_was_or_not_at_all(at: int, piece: bytes) -> None:
    segment = sealed_memory(7, b"good" * 60)
    good = read_header(segment.view)
    segment.view[at : at + len(piece)] = piece
    table = SlotTable("job", MemoryBudget(1 << 30), HostClock())
    adopted = take_back(table, [KeptSlot("0", 0, segment.duplicate())], "job", Path("/nonexistent"))
    segment.close()
    assert adopted.refused == ()
    assert [header for _, header in adopted.sealed] in ([], [good])
    for slot in table._shards[0].slots:
        if slot.segment is not None:
            slot.segment.close()


@given(st.text(max_size=8), st.integers(-5, 99))
def test_a_keepers_names_cannot_reach_beyond_the_table(shard: str, index: int) -> None:
    table = SlotTable("job", MemoryBudget(1 << 30), HostClock())
    segment = sealed_memory(7, b"good")
    adopted = take_back(table, [KeptSlot(shard, index, segment.duplicate())], "job", Path("/nonexistent"))
    segment.close()
    kept = [slot for shard_ in table._shards.values() for slot in shard_.slots if slot.segment is not None]
    assert len(kept) + len(adopted.refused) == 1
    assert all(slot.shard == shard for slot in kept)
    for slot in kept:
        assert slot.segment is not None
        slot.segment.close()


LINES = st.text("0123456789:/.,- maxmemorycgroup2\\\n\x00é", max_size=120)


@settings(max_examples=60)
@given(LINES, LINES, LINES, LINES)
def test_whatever_the_kernels_files_say_is_a_limit_or_none(
    tmp_path_factory: pytest.TempPathFactory, own: str, mounts: str, limit: str, meminfo: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    texts = {
        "proc/self/cgroup": f"0::/\n4:memory:/a\n{own}", "proc/meminfo": f"MemTotal: 5 kB\nMemAvailable: {meminfo}",
        "proc/self/mountinfo": f"1 1 0:1 / /c rw - cgroup2 x rw\n1 1 0:1 / /m rw - cgroup x memory\n{mounts}",
        "c/memory.max": limit, "c/memory.current": limit, "c/memory.stat": limit, "m/a/memory.limit_in_bytes": limit,
    }  # fmt: skip
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for room in [*cgroup_rooms(root), host_room(root)]:
        assert room is None or 0 <= room.free_bytes <= room.limit_bytes


@given(st.binary(max_size=300), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_any_packet_with_any_descriptors_ends_at_most_its_own_connection(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, count: int
) -> None:
    """Over a real socket pair: it is answered or the connection is hung up, and its descriptors are closed."""
    segment = create_segment(PAGE_BYTES)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = Keeper(tmp_path_factory.getbasetemp() / "k.keep", "job", 60.0)
    with ours:
        theirs.settimeout(1.0)
        made._connections.append(theirs)
        made._selector.register(theirs, 1)
        socket.send_fds(ours, [raw or b"x"], [segment.descriptor] * count)
        made._serve(theirs)
        made._close()
    assert threading.active_count() >= 1
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    segment.close()
