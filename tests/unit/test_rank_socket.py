"""The rank's end of the telemetry socket: bounded, never blocking, back after a launcher's death."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from ingest.clock import ManualClock, SystemClock
from ingest.rank_socket import (
    PACKET_BYTES_MAX,
    RECEIVED_PACKETS_MAX,
    RECONNECT_SECONDS,
    Hello,
    QueueLimits,
    RankSocket,
    pack,
    unpack,
)
from tests.fake_launcher import FakeLauncher

HELLO = Hello(job="job", attempt=1, rank=2, token="secret", pid=42)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0.0)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[FakeLauncher]:
    launcher = FakeLauncher(tmp_path / "t.sock")
    yield launcher
    launcher.close()


@pytest.fixture
def many_files() -> Iterator[None]:
    """So many that the next descriptor is beyond what select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4_096, hard)), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    yield
    for descriptor in taken:
        os.close(descriptor)


class Connect(Protocol):
    """Makes the rank's end of a connection, closed after the test."""

    def __call__(
        self, path: Path, *, limits: QueueLimits | None = None, clock: ManualClock | None = None
    ) -> RankSocket: ...


@pytest.fixture
def connect(clock: ManualClock) -> Iterator[Connect]:
    made: list[RankSocket] = []
    usual = clock

    def make(path: Path, *, limits: QueueLimits | None = None, clock: ManualClock | None = None) -> RankSocket:
        made.append(RankSocket(str(path), HELLO, clock or usual, limits))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def deaf_listener(path: Path) -> socket.socket:
    """A launcher that accepts and then never reads."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(1)
    return listener


def test_a_packet_is_a_type_a_newline_and_the_body() -> None:
    assert pack("metrics.v1", b"{}\n{}") == b"metrics.v1\n{}\n{}"
    assert unpack(b"metrics.v1\n{}\n{}") == ("metrics.v1", b"{}\n{}")


@pytest.mark.parametrize("packet", [b"", b"metrics.v1", "é\n{}".encode()])
def test_what_is_no_packet_is_refused(packet: bytes) -> None:
    with pytest.raises(ValueError, match="a type, a newline and JSON"):
        unpack(packet)


def test_a_packet_over_the_limit_is_not_made() -> None:
    pack("x", b"a" * (PACKET_BYTES_MAX - 2))
    with pytest.raises(ValueError, match="over the limit"):
        pack("x", b"a" * (PACKET_BYTES_MAX - 1))


def test_a_connection_begins_with_hello_and_keeps_the_order(launcher: FakeLauncher, connect: Connect) -> None:
    rank = connect(launcher.path)
    for number in range(5):
        rank.put(pack("x.v1", b"%d" % number))
    rank.pump()
    launcher.wait_for(lambda: len(launcher.packets) == 6)
    assert launcher.packets[0][0] == "hello.v1"
    assert launcher.hellos == [HELLO]
    assert launcher.of("x.v1") == [0, 1, 2, 3, 4]
    assert rank.pending == 0


def test_without_a_launcher_packets_wait_and_connecting_is_tried_once_a_second(
    tmp_path: Path, connect: Connect, clock: ManualClock
) -> None:
    path = tmp_path / "t.sock"
    rank = connect(path)
    rank.put(pack("x.v1", b"1"))
    rank.pump()
    assert not rank.connected
    launcher = FakeLauncher(path)
    clock.advance(RECONNECT_SECONDS / 2)
    rank.pump()
    assert not rank.connected
    clock.advance(RECONNECT_SECONDS / 2)
    rank.pump()
    assert rank.connected
    launcher.wait_for(lambda: launcher.of("x.v1") == [1])
    launcher.close()


def test_after_a_launcher_died_the_next_one_gets_hello_and_what_was_kept(
    tmp_path: Path, connect: Connect, clock: ManualClock
) -> None:
    path = tmp_path / "t.sock"
    first = FakeLauncher(path)
    rank = connect(path)
    rank.pump()
    first.wait_for(lambda: first.hellos)
    first.close()
    rank.put(pack("x.v1", b"1"))
    rank.pump()
    assert not rank.connected
    second = FakeLauncher(path)
    clock.advance(RECONNECT_SECONDS)
    rank.pump()
    second.wait_for(lambda: second.of("x.v1") == [1])
    assert second.hellos == [HELLO]
    second.close()


@pytest.mark.parametrize("limits", [QueueLimits(packets_max=3), QueueLimits(bytes_max=3 * 6)])
def test_a_full_queue_drops_its_oldest_and_counts(tmp_path: Path, connect: Connect, limits: QueueLimits) -> None:
    rank = connect(tmp_path / "none", limits=limits)
    for number in range(5):
        rank.put(pack("x.v1", b"%d" % number))
    assert (rank.pending, rank.dropped) == (3, 2)
    launcher = FakeLauncher(tmp_path / "none")
    rank.pump()
    launcher.wait_for(lambda: launcher.of("x.v1") == [2, 3, 4])
    launcher.close()


def test_a_launcher_that_does_not_read_blocks_nothing(tmp_path: Path, connect: Connect) -> None:
    listener = deaf_listener(tmp_path / "t.sock")
    rank = connect(tmp_path / "t.sock")
    for _ in range(200):
        rank.put(pack("x.v1", b"a" * 60_000))
        rank.pump()
    assert rank.connected
    assert rank.pending > 0
    assert rank.dropped > 0
    listener.close()


def test_last_words_are_bounded_where_nobody_listens(tmp_path: Path, connect: Connect) -> None:
    class CountingClock(ManualClock):
        """Every look costs 0.1 s."""

        def monotonic(self) -> float:
            self.advance(0.1)
            return super().monotonic()

    listener = deaf_listener(tmp_path / "t.sock")
    rank = connect(tmp_path / "t.sock", clock=CountingClock())
    for _ in range(100):
        rank.put(pack("x.v1", b"a" * 60_000))
    rank.drain(0.5)
    assert rank.pending > 0
    listener.close()


def test_last_words_are_handed_over_beside_a_thousand_open_files(
    tmp_path: Path, connect: Connect, many_files: None
) -> None:
    listener = deaf_listener(tmp_path / "t.sock")
    rank = connect(tmp_path / "t.sock", clock=SystemClock())
    for _ in range(100):
        rank.put(pack("x.v1", b"a" * 60_000))
    rank.drain(0.1)
    assert rank.pending > 0
    listener.close()


def test_packets_from_the_launcher_are_received_without_waiting(launcher: FakeLauncher, connect: Connect) -> None:
    rank = connect(launcher.path)
    assert rank.receive() == []
    rank.pump()
    launcher.wait_for(lambda: launcher.connections)
    for _ in range(RECEIVED_PACKETS_MAX + 1):
        launcher.inject(fault="nan")
    assert len(rank.receive()) == RECEIVED_PACKETS_MAX
    assert rank.receive() == [b'inject.v1\n{"fault": "nan"}']
    assert rank.receive() == []


def test_a_better_hello_is_sent_at_once_and_after_a_reconnect(
    tmp_path: Path, connect: Connect, clock: ManualClock
) -> None:
    better = Hello(job="job", attempt=1, rank=2, token="secret", pid=42, gpu_uuid="GPU-1")
    path = tmp_path / "t.sock"
    first = FakeLauncher(path)
    rank = connect(path)
    rank.pump()
    rank.introduce(better)
    rank.pump()
    first.wait_for(lambda: first.hellos == [HELLO, better])
    first.close()
    rank.receive()
    second = FakeLauncher(path)
    clock.advance(RECONNECT_SECONDS)
    rank.pump()
    second.wait_for(lambda: second.hellos == [better])
    second.close()
