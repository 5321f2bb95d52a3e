"""The two sockets of a launcher against garbage, strangers and crowds: refused, counted, and nobody else is held up."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ingest.events import Logs, Metrics, RankStarted
from recovery.backend import StartRequest
from recovery.launcher.client import ask
from recovery.launcher.protocol import Observe, decode_reply, encode_line
from tests.launcher_lab import JOB, Lab, lab_in_short_folder, wait_for


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_in_short_folder(per_node=2) as lab:
        yield lab


def start(lab: Lab, script: str) -> None:
    lab.launch(lab.script(script, client=True))
    lab.backend.start(StartRequest(JOB, 1, "token-1"))


def reasons(lab: Lab) -> list[str]:
    return [dict(record.headers)["transom_reason"].decode() for record in lab.records(("dead-letters",))]


def test_sockets_and_folders_are_for_their_owner_alone(lab: Lab) -> None:
    lab.launch(lab.script("import time\ntime.sleep(600)"))
    for name in ("node0.c", "node0.t"):
        assert (lab.folder / name).stat().st_mode & 0o777 == 0o600
    assert lab.files.nodes_folder.stat().st_mode & 0o777 == 0o700


LIES = [
    ("token='guessed'", "token that is not this attempt's"),
    ("attempt=77", "which does not run here"),
    ("rank=5", "which does not run here"),
    ("rank=1 - int(E['RANK'])", "not in that rank's session"),
    ("job='other'", "which does not run here"),
]


def test_a_hello_that_lies_is_refused_and_its_token_is_not_published(lab: Lab) -> None:
    lies = [lie for lie, _ in LIES]
    lab.launch(
        lab.script(
            f"""
            s = connect()
            exec("hello(s, " + {lies}[int(E['TRANSOM_ATTEMPT']) - 1] + ")")
            try:
                metrics(s, 0, 1)
            except OSError:
                pass
            """,
            client=True,
        )
    )
    for number, (lie, reason) in enumerate(LIES):
        lab.backend.start(StartRequest(JOB, number + 1, "token-1"))
        wait_for(lambda number=number: lab.backend.observe(JOB).phase == "finished", "the end")
        found = wait_for(lambda number=number: len(all_ := reasons(lab)) == 2 * number + 2 and all_, lie)
        assert all(reason in text for text in found[-2:]), (lie, found)
        assert lab.backend.stop(JOB, number + 1, grace_seconds=1, deadline_seconds=5)
    assert lab.messages(Metrics) == []
    assert not any(b"token-1" in record.value for record in lab.records())


def test_a_stranger_who_knows_the_token_is_refused(lab: Lab) -> None:
    start(lab, "time.sleep(600)")
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(str(lab.folder / "node0.t"))
    stranger.send(b'hello.v1\n{"job":"job","attempt":1,"rank":0,"token":"token-1","pid":1}')
    wait_for(lambda: reasons(lab), "the dead letter")
    assert "not in that rank's session" in reasons(lab)[0]
    stranger.close()


def test_garbage_is_dead_letters_with_a_bound_and_good_packets_go_through(lab: Lab) -> None:
    start(
        lab,
        """
        s = connect(); hello(s)
        for bad in (b"no newline", b"metrics.v1\\n{",
                    b"metrics.v1\\n[]", b"\\xff\\xfe\\n{}", b"logs.v1\\n" + b"[" * 50_000):
            s.send(bad)
        s.send(b"metrics.v1\\n" + b"x" * 100_000)       # larger than any packet
        send(s, "metrics.v1", stamp(0) | {"rank": 9, "phase": "train", "step": 1})
        send(s, "future.v9", {})                        # unknown: ignored
        for n in range(1000):
            s.send(b"garbage")
        metrics(s, 1, 41)
        t = connect(); t.send(b"metrics.v1\\n{}")        # no hello first
        time.sleep(600)
    """,
    )
    wait_for(lambda: {m.rank for m in lab.messages(Metrics)} == {0, 1}, "good packets go through")
    assert {m.step for m in lab.messages(Metrics)} == {41}
    wait_for(lambda: sum("first packet" in text for text in reasons(lab)) == 2, "the last ones")
    found = reasons(lab)
    assert 2 * 7 < len(found) <= 2 * 21
    for part in ("newline", "not a metrics.v1", "more than 65536 bytes", "stamp is not that of the rank"):
        assert any(part in text for text in found), part


def test_logs_of_the_logging_handler_join_the_stream_of_the_rank(lab: Lab) -> None:
    start(
        lab,
        """
        s = connect(); hello(s)
        print("printed", flush=True)
        line = dict(at=time.time(), stream="logging", text="logged")
        send(s, "logs.v1", stamp(77) | dict(lines=[line]))
        time.sleep(600)
    """,
    )
    wait_for(lambda: len(lab.lines()) == 4, "all lines")
    for rank in (0, 1):
        logs = [message for message in lab.messages(Logs) if message.rank == rank]
        assert [message.sequence for message in logs] == list(range(len(logs)))
        assert {line.text for message in logs for line in message.lines} == {"printed", "logged"}


def test_a_hello_that_knows_the_gpu_is_told_again(lab: Lab) -> None:
    start(
        lab,
        """
        s = connect(); hello(s); hello(s); hello(s, gpu_uuid="GPU-1", pci_address="0000:3b:00.0"); hello(s)
        time.sleep(600)
    """,
    )
    wait_for(lambda: len(lab.messages(RankStarted)) >= 4, "both twice")
    found = [m.gpu_uuid for m in lab.messages(RankStarted) if m.rank == 0]
    assert found[:2] == [None, "GPU-1"]


def test_a_rank_that_never_says_hello_is_told_all_the_same(lab: Lab) -> None:
    lab.launch(lab.script("import time\ntime.sleep(600)"), limits={"hello_wait_seconds": 0.2})
    lab.backend.start(StartRequest(JOB, 1, "token-1"))
    wait_for(lambda: len(lab.messages(RankStarted)) == 2, "both are told")


def test_control_garbage_is_answered_in_words_and_harms_nobody(lab: Lab) -> None:
    lab.launch(lab.script("import time\ntime.sleep(600)"))
    path = str(lab.folder / "node0.c")
    for garbage in (b"{}\n", b"\xff\n", b'{"type":"start"}\n', b"[" * 100_000 + b"\n", b"x" * 1_100_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(path)
            connection.sendall(garbage)
            reply = decode_reply(connection.makefile("rb").readline())
            assert reply.refusal == "undecodable"
    idle = []
    for _ in range(40):  # more than it takes in; they say nothing
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        idle.append(connection)
    for connection in idle:
        connection.close()
    address = f"unix:{path}"
    seen = wait_for(lambda: ask(address, Observe(), timeout_seconds=5, clock=lab.clock).state, "it answers")
    assert seen.node == "node0"


def test_requests_on_one_connection_are_answered_in_turn(lab: Lab) -> None:
    lab.launch(lab.script("import time\ntime.sleep(600)"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(str(lab.folder / "node0.c"))
        connection.sendall(encode_line(Observe()) * 3)
        stream = connection.makefile("rb")
        assert [decode_reply(stream.readline()).state.attempt for _ in range(3)] == [0, 0, 0]
