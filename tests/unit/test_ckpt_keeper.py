"""The keeper, a real process: it holds what the engine had, is small, and never stays longer than it should."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket as socket_module
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine import keeping, wire
from ckpt_engine.errors import EngineUnavailable
from ckpt_engine.keeper import KEPT_MAX, Holdings, Keeper, Refused
from ckpt_engine.keeping import KeeperConfig, KeeperLink, keeper_path, keeper_status
from ckpt_engine.memfd import Segment, create_segment
from tests.ckpt_lab import ROOT, eventually
from tests.keeper_lab import is_gone, settled_keeper, status_of

PAGES = 4 * 4096
RESIDENT_KIB_MAX = 15 * 1024


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = create_segment(PAGES)
    yield made
    made.close()


def linked(socket: Path, segments: list[Segment], *, alone: float = 60.0, guardian: int = 0) -> KeeperLink:
    """A keeper that holds these segments as slots of shard 0, and our half of it."""
    link = KeeperLink(KeeperConfig(keeper_path(socket), "job", alone, guardian), threading.RLock())
    assert link.open() == []
    link.watch(lambda: [("0", index, segment.descriptor) for index, segment in enumerate(segments)])
    assert link.alive
    settled_keeper(socket, len(segments))
    return link


def test_what_a_keeper_holds_is_fetched_by_the_next_engine(socket: Path, segment: Segment) -> None:
    segment.view[100:104] = b"kept"
    linked(socket, [segment]).leave()
    link = KeeperLink(KeeperConfig(keeper_path(socket), "job", 60.0), threading.RLock())
    (kept,) = link.open()
    assert (kept.shard, kept.index) == ("0", 0)
    assert keeping_identity(kept.descriptor) == segment.identity
    assert os.pread(kept.descriptor, 4, 100) == b"kept"
    os.close(kept.descriptor)
    link.watch(lambda: [])
    assert settled_keeper(socket, 0), "what the next engine does not hand over is let go"
    link.end()


def keeping_identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def test_what_is_told_of_one_slot_changes_that_slot(socket: Path, segment: Segment) -> None:
    link = linked(socket, [])
    link.keep("7", 1, segment.descriptor)
    eventually(lambda: status_of(socket)["kept"] == 1)
    assert status_of(socket)["size_bytes"] == PAGES
    link.drop("7", 1)
    eventually(lambda: status_of(socket)["kept"] == 0)
    link.end()


def test_a_keeper_is_small_maps_no_slot_and_knows_no_secret(
    socket: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSOM_RING_TOKEN", "a secret of the ring")
    link = linked(socket, [segment])
    resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{link.pid}/status").read_text())
    assert resident is not None
    assert int(resident[1]) < RESIDENT_KIB_MAX
    assert "transom-slot" not in Path(f"/proc/{link.pid}/maps").read_text()
    assert b"a secret of the ring" not in Path(f"/proc/{link.pid}/environ").read_bytes()
    assert os.getsid(link.pid) == link.pid, "a signal for the engine's group is not for it"
    assert stat.S_IMODE(keeper_path(socket).stat().st_mode) == 0o600
    link.end()


def test_a_keeper_that_is_told_to_end_has_ended(socket: Path, segment: Segment) -> None:
    link = linked(socket, [segment])
    pid = link.pid
    link.end()
    assert is_gone(pid)
    assert not keeper_path(socket).exists()
    with pytest.raises(EngineUnavailable, match="no keeper answers"):
        keeper_status(socket)


def test_a_keeper_without_an_engine_ends_by_itself(socket: Path, segment: Segment) -> None:
    link = linked(socket, [segment], alone=0.2)
    pid = link.pid
    link.leave()
    eventually(lambda: is_gone(pid), "its end")
    assert not keeper_path(socket).exists()


def test_a_keeper_stays_while_its_engine_lives_and_goes_when_nobody_would_start_another(
    socket: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    guardian = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    link = linked(socket, [segment], guardian=guardian.pid)
    pid = link.pid
    guardian.kill()
    guardian.wait()
    assert guardian.stdin is not None
    guardian.stdin.close()
    assert status_of(socket)["kept"] == 1, "the engine is still there"
    link.leave()
    eventually(lambda: is_gone(pid), "its end, long before the 60 s without a guardian")


def test_sigterm_ends_a_keeper_at_once(socket: Path, segment: Segment) -> None:
    link = linked(socket, [segment])
    pid = link.pid
    link.leave()
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: is_gone(pid), "its end")
    assert not keeper_path(socket).exists()


def test_a_killed_keeper_is_replaced_and_has_everything_again(socket: Path, segment: Segment) -> None:
    link = linked(socket, [segment])
    first = link.pid
    os.kill(first, signal.SIGKILL)
    second = settled_keeper(socket, 1, but=first)
    assert second == link.pid
    assert link.alive
    link.end()
    assert is_gone(second)


def test_a_stopped_keeper_goes_on_and_loses_nothing(
    socket: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that starts has nothing but what the keeper holds: it must not be killed for being slow."""
    monkeypatch.setattr(keeping, "ANSWER_SECONDS_MAX", 0.1)
    link = linked(socket, [segment])
    pid = link.pid
    link.leave()
    os.kill(pid, signal.SIGSTOP)
    after = KeeperLink(KeeperConfig(keeper_path(socket), "job", 60.0), threading.RLock())
    (kept,) = after.open()
    os.close(kept.descriptor)
    assert after.pid == pid
    after.end()


def test_a_keeper_that_takes_nothing_any_more_is_replaced(
    socket: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("PING_SECONDS", 0.05), ("ANSWER_SECONDS_MAX", 0.1)):
        monkeypatch.setattr(keeping, name, seconds)
    monkeypatch.setattr(keeping.signal, "SIGCONT", 0)  # it cannot be woken
    link = linked(socket, [segment])
    first = link.pid
    os.kill(first, signal.SIGSTOP)
    eventually(lambda: link.alive and link.pid != first, "another keeper")
    assert is_gone(first)
    settled_keeper(socket, 1)
    link.end()


def test_a_keeper_that_cannot_be_started_costs_no_engine(socket: Path) -> None:
    def broken(config: KeeperConfig) -> int:
        raise PermissionError(13, "fork is forbidden")

    link = KeeperLink(KeeperConfig(keeper_path(socket), "job", 60.0), threading.RLock(), broken)
    assert link.open() == []
    assert "fork is forbidden" in link.error
    assert not link.alive
    link.keep("0", 0, 0)  # and nobody minds
    link.leave()


def test_one_that_ends_at_once_is_not_started_for_ever(socket: Path) -> None:
    started = []

    def short_lived(config: KeeperConfig) -> int:
        started.append(os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", ""], {}))
        return started[-1]

    link = KeeperLink(KeeperConfig(keeper_path(socket), "job", 60.0), threading.RLock(), short_lived)
    assert link.open() == []
    assert len(started) == keeping.STARTS_MAX
    assert "does not come up" in link.error
    link.leave()


def test_there_is_one_keeper_for_one_path(socket: Path) -> None:
    link = linked(socket, [])
    command = [sys.executable, "-P", "-m", "ckpt_engine.keeper", str(keeper_path(socket)), "job", "60"]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert second.returncode == 1
    assert "cannot serve" in second.stderr
    assert status_of(socket)["pid"] == link.pid
    link.end()


@pytest.fixture
def in_thread(socket: Path) -> Iterator[Keeper]:
    """A keeper of this process; ended by whoever says so on its socket."""
    keeper = Keeper(keeper_path(socket), "job", 60.0)
    thread = threading.Thread(target=keeper.run)
    thread.start()
    eventually(lambda: status_of(socket))
    yield keeper
    with wire.connect(keeper_path(socket), 5.0) as sock:
        wire.send(sock, {"op": "end"})
        thread.join(20)
    assert not thread.is_alive()


HELLO = {"op": "hello", "protocol": wire.PROTOCOL, "job": "job", "guardian": 0}


def asked(path: Path, *requests: dict[str, object]) -> wire.Fields:
    """The answer to the last of these requests on one connection."""
    with wire.connect(path, 5.0) as sock:
        for request in requests:
            wire.send(sock, request)
            fields, descriptors = wire.receive(sock)
            wire.close_all(descriptors)
    return fields


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"op": "keep", "shard": "0", "index": 0}, "says hello first"),
        ({"op": "fetch", "at": 0}, "says hello first"),
        ({**HELLO, "protocol": 99}, "speaks protocol"),
        ({**HELLO, "job": "other"}, "serves job 'job'"),
    ],
)
def test_a_keeper_serves_only_the_engine_of_its_job(
    in_thread: Keeper, socket: Path, request_: dict[str, object], why: str
) -> None:
    assert why in asked(keeper_path(socket), request_)["error"]


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "fetch", "at": 5},
        {"op": "keep", "shard": "0", "index": 0},
        {"op": "keep", "shard": "x" * 65, "index": 0},
        {"op": "keep", "shard": "0", "index": 99},
        {"op": "eat"},
    ],
)
def test_what_cannot_be_is_refused_and_the_keeper_goes_on(
    in_thread: Keeper, socket: Path, request_: dict[str, object]
) -> None:
    assert "error" in asked(keeper_path(socket), HELLO, {"shard": "0", "index": 0, **request_})
    assert status_of(socket)["kept"] == 0


def test_a_second_engine_is_turned_away_while_the_first_lives(in_thread: Keeper, socket: Path) -> None:
    with wire.connect(keeper_path(socket), 5.0) as first:
        wire.send(first, HELLO)
        assert wire.receive(first)[0] == {"kept": 0}
        assert f"process {os.getpid()}, is connected" in asked(keeper_path(socket), HELLO)["error"]
    assert asked(keeper_path(socket), HELLO) == {"kept": 0}


def test_another_user_gets_no_descriptor(in_thread: Keeper, socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = socket_module.socket(socket_module.AF_UNIX, socket_module.SOCK_SEQPACKET)
    with monkeypatch.context() as patch, raw:
        patch.setattr(wire, "peer_uid", lambda sock: os.getuid() + 4242)
        raw.settimeout(20.0)
        raw.connect(str(keeper_path(socket)))
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # closed before it was read, or even sent
            raw.send(b'{"op":"status"}')
            assert raw.recv(100) == b""


def test_holdings_are_bounded_and_close_what_they_let_go(segment: Segment) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the count is all that is wanted
    holdings = Holdings()
    holdings.keep(("0", 0), segment.descriptor)
    holdings.keep(("0", 0), segment.descriptor)
    assert (len(holdings), holdings.size_bytes) == (1, PAGES)
    for number in range(1, KEPT_MAX):
        holdings._kept[(str(number), 1)] = segment.duplicate() if number < 4 else -1
    with pytest.raises(Refused, match=f"holds {KEPT_MAX} descriptors already"):
        holdings.keep(("new", 0), segment.descriptor)
    for number in range(4, KEPT_MAX):
        del holdings._kept[(str(number), 1)]
    holdings.begin()
    holdings.settle()
    assert len(holdings) == 0
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_only_memory_can_be_kept(tmp_path: Path) -> None:
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(Refused, match="cannot be kept"):
        Holdings().keep(("0", 0), plain)
    os.close(plain)
