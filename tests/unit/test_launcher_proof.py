"""Who asks a launcher over TCP, and the launcher itself, prove that they know the token; nothing can be forged."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ingest.clock import SystemClock
from recovery.launcher.address import TcpAddress, host_and_port, parse_address
from recovery.launcher.client import LauncherSilent, LauncherUnreachable, ask
from recovery.launcher.control import CONNECTIONS_MAX, CannotListen, listen_tcp
from recovery.launcher.proof import GREETING_BYTES_MAX, AskerEnd, JobKey, LauncherEnd, NotProved, Seals
from recovery.launcher.protocol import Observe, Reply
from tests.simulated_launchers import TOKEN, SimulatedLauncher, key

CLOCK = SystemClock()


@pytest.fixture
def launcher() -> Iterator[SimulatedLauncher]:
    launcher = SimulatedLauncher("n1")
    yield launcher
    launcher.kill()


def observe(launcher: SimulatedLauncher, key: JobKey | None, node: str = "", seconds: float = 10.0) -> Reply:
    return ask(launcher.address, Observe(), timeout_seconds=seconds, clock=CLOCK, key=key, node=node)


def greeted(asker: JobKey, launcher: JobKey) -> tuple[Seals, LauncherEnd, list[bytes]]:
    """Both ends after their greeting, and every line that went over the wire."""
    there, here = LauncherEnd(launcher, "n1"), AskerEnd(asker)
    lines = [there.challenge()]
    lines.append(here.claim(lines[-1].rstrip()))
    lines.append(there.welcome(lines[-1].rstrip()))
    return here.finish(lines[-1].rstrip()), there, lines


def test_with_the_token_it_answers_and_says_whose_it_is(launcher: SimulatedLauncher) -> None:
    state = observe(launcher, key()).state
    assert state is not None
    assert (state.node, state.host) == ("n1", "127.0.0.1")
    assert observe(launcher, key(), node="n1").state is not None


def test_another_token_another_job_and_another_node_are_refused_before_anything_is_asked(
    launcher: SimulatedLauncher,
) -> None:
    for wrong, node in ((key(token=b"x" * 32), ""), (key("other"), ""), (key(), "n2"), (None, "")):
        with pytest.raises(LauncherUnreachable):
            observe(launcher, wrong, node)
    assert launcher.control.turned_away == 2


def test_the_token_is_never_on_the_wire_and_no_two_greetings_are_alike() -> None:
    _, _, first = greeted(key(), key())
    _, _, second = greeted(key(), key())
    assert not any(TOKEN in line or TOKEN.hex().encode() in line for line in first)
    assert not set(first) & set(second)
    assert TOKEN.decode() not in repr(key())


def test_an_impostor_without_the_token_cannot_be_the_launcher() -> None:
    with pytest.raises(NotProved):
        greeted(key(), key(token=b"y" * 32))
    there, here = LauncherEnd(key(), "n1"), AskerEnd(key())
    claim = here.claim(there.challenge().rstrip())
    with pytest.raises(NotProved):  # our own claim, sent back as its proof
        here.finish(claim.rstrip())


def test_a_recorded_claim_is_worth_nothing_on_another_connection() -> None:
    _, _, lines = greeted(key(), key())
    with pytest.raises(NotProved):
        LauncherEnd(key(), "n1").welcome(lines[1].rstrip())


def test_lines_cannot_be_changed_repeated_left_out_or_sent_back() -> None:
    seals, there, _ = greeted(key(), key())
    first, second = seals.seal(b'{"a":1}\n').rstrip(), seals.seal(b'{"b":2}\n').rstrip()
    for forged in (first.replace(b"1", b"2"), second, b"", first[:64], first.replace(b" ", b"\t", 1)):
        with pytest.raises(NotProved):
            there.open(forged)
    assert there.open(first) == b'{"a":1}'
    with pytest.raises(NotProved):
        there.open(first)
    with pytest.raises(NotProved):
        seals.open(first)
    assert seals.open(there.seal(b'{"c":3}\n').rstrip()) == b'{"c":3}'


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ValueError, match="openssl rand"):
        JobKey("job", b"short")


def test_a_launcher_that_takes_a_request_and_does_not_answer_is_silent(launcher: SimulatedLauncher) -> None:
    launcher.silent = True
    with pytest.raises(LauncherSilent, match="in time"):
        observe(launcher, key(), seconds=0.2)


def test_where_nobody_listens_or_nobody_greets_nothing_was_asked() -> None:
    deaf = socket.create_server(("127.0.0.1", 0))
    address = f"tcp:127.0.0.1:{deaf.getsockname()[1]}"
    with pytest.raises(LauncherUnreachable, match="does not greet"):
        ask(address, Observe(), timeout_seconds=0.2, clock=CLOCK, key=key())
    deaf.close()
    with pytest.raises(LauncherUnreachable, match="no launcher answers"):
        ask(address, Observe(), timeout_seconds=5, clock=CLOCK, key=key())


def test_a_crowd_of_strangers_keeps_nobody_out(launcher: SimulatedLauncher) -> None:
    where = parse_address(launcher.address)
    crowd = [socket.create_connection(where) for _ in range(CONNECTIONS_MAX + 8)]
    for stranger in crowd[:8]:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert observe(launcher, key()).state is not None
    for stranger in crowd:
        stranger.close()


def test_a_stranger_that_sends_too_much_is_told_and_turned_away(launcher: SimulatedLauncher) -> None:
    with socket.create_connection(parse_address(launcher.address), 10) as stranger:
        stream = stranger.makefile("rb")
        assert b"transom-launcher/1" in stream.readline()
        stranger.sendall(b"x" * (GREETING_BYTES_MAX + 1))
        assert b"refused" in stream.readline()
        assert stream.read() == b""


def test_many_requests_at_once_on_one_connection_are_answered_one_after_the_other(launcher: SimulatedLauncher) -> None:
    with socket.create_connection(parse_address(launcher.address), 10) as connection:
        stream = connection.makefile("rb")
        end = AskerEnd(key())
        connection.sendall(end.claim(stream.readline().rstrip()))
        seals = end.finish(stream.readline().rstrip())
        connection.sendall(b"".join(seals.seal(b'{"type":"observe"}\n') for _ in range(2000)))
        for _ in range(2000):
            assert b'"n1"' in seals.open(stream.readline().rstrip(b"\n"))


def test_an_address_that_is_taken_is_said_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CannotListen, match="cannot listen on 127"):
        listen_tcp("127.0.0.1", taken.getsockname()[1])


def test_a_host_that_can_be_none_is_said_on_both_sides() -> None:
    with pytest.raises(CannotListen):
        listen_tcp("x" * 70, 0)
    with pytest.raises(LauncherUnreachable):
        ask(f"tcp:{'x' * 70}:80", Observe(), timeout_seconds=5, clock=CLOCK, key=key())


def test_addresses_are_read_as_they_are_written() -> None:
    assert parse_address("unix:/run/a.sock") == "/run/a.sock"
    assert parse_address("tcp:n1:80") == TcpAddress("n1", 80)
    assert parse_address(str(TcpAddress("::1", 80))) == TcpAddress("::1", 80)
    assert host_and_port(":0") == ("", 0)
    for wrong in ("", "n1:80", "tcp:n1", "tcp:n1:x", "tcp:n1:70000", "unix:", "udp:n1:80"):
        with pytest.raises(ValueError):
            parse_address(wrong)
