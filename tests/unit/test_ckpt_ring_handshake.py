"""Engines prove the token to each other; who cannot, gets nothing, however he tries."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckpt_engine.clock import HostClock
from ckpt_engine.ring_handshake import NONCE_BYTES, PROTOCOL, Peer, answer, prove
from ckpt_engine.ring_wire import MAGIC, PREFIX, Channel, PeerError, PeerRefused, encode_frame
from ckpt_engine.wire import WireError
from tests.ring_lab import IO_SECONDS, TOKEN, Recorder, channels

ME = Peer("n1", "epoch-1")


class Meeting:
    """A server in a thread, and the other end of its connection."""

    def __init__(self, token: bytes = TOKEN, job: str = "job", wrap: Any = lambda sock: sock) -> None:
        self.client, self.server = channels(wrap)
        self._pool = ThreadPoolExecutor(1)
        self._answered = self._pool.submit(answer, self.server, token, job, ME, os.urandom)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._pool.shutdown()
        self.server.close()

    def node(self) -> str:
        """Who the server thinks is there. Raises what it raised."""
        return self._answered.result(IO_SECONDS)


def test_both_sides_know_each_other_and_go_on_with_proofs() -> None:
    with Meeting() as meeting:
        assert prove(meeting.client, TOKEN, "job", "n0", os.urandom) == ME
        assert meeting.node() == "n0"
        meeting.client.send({"op": "list"})
        assert meeting.server.receive() == {"op": "list"}
        meeting.server.send({"shards": []})
        assert meeting.client.receive() == {"shards": []}


@pytest.mark.parametrize(("token", "job"), [(b"another token of this length", "job"), (TOKEN, "another job")])
def test_another_token_or_job_is_refused(token: bytes, job: str) -> None:
    with Meeting() as meeting:
        with pytest.raises(PeerRefused, match="share one token"):
            prove(meeting.client, token, job, "n0", os.urandom)
        with pytest.raises(PeerError, match="could not prove"):
            meeting.node()


def test_a_recorded_handshake_opens_nothing_the_second_time() -> None:
    recorders: list[Recorder] = []
    with Meeting(wrap=lambda sock: recorders.append(Recorder(sock)) or recorders[-1]) as meeting:
        prove(meeting.client, TOKEN, "job", "n0", os.urandom)
        meeting.node()
    left, right = socket.socketpair()
    with left, ThreadPoolExecutor(1) as pool:
        left.sendall(recorders[0].sent)
        server = Channel(right, HostClock(), IO_SECONDS)
        with pytest.raises(PeerError, match="could not prove"):
            pool.submit(answer, server, TOKEN, "job", ME, os.urandom).result(IO_SECONDS)
        server.close()


def false_server(channel: Channel, proof: str | None) -> None:
    """Answers as n1 without the token: with `proof`, or (None) with the client's own."""
    channel.send({"protocol": PROTOCOL, "node": "n1", "epoch": "e", "nonce": os.urandom(NONCE_BYTES).hex()})
    fields = channel.receive()
    channel.send({"proof": fields["proof"] if proof is None else proof})


@pytest.mark.parametrize("proof", [None, "00" * 32, "", "\ud800"])
def test_a_server_without_the_token_learns_nothing_and_is_given_nothing(proof: str | None) -> None:
    client, server = channels()
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(false_server, server, proof)
        with pytest.raises(PeerRefused, match="does not know the token"):
            prove(client, TOKEN, "job", "n0", os.urandom)
        answered.result(IO_SECONDS)
    client.close()
    server.close()


def test_a_frame_that_is_not_the_next_one_ends_the_connection() -> None:
    """Repeated, left out, or sent back to where it came from: its number and direction are part of its proof."""
    recorders: list[Recorder] = []
    with Meeting(wrap=lambda sock: recorders.append(Recorder(sock)) or recorders[-1]) as meeting:
        prove(meeting.client, TOKEN, "job", "n0", os.urandom)
        meeting.node()
        before = len(recorders[0].sent)
        meeting.client.send({"op": "list"})
        frame = recorders[0].sent[before:]
        assert meeting.server.receive() == {"op": "list"}
        recorders[0].sendall(frame)
        with pytest.raises(PeerError, match="proof does not fit"):
            meeting.server.receive()
        meeting.server._sock.sendall(frame)
        with pytest.raises(PeerError, match="proof does not fit"):
            meeting.client.receive()


def test_after_the_handshake_an_object_without_its_proof_is_nothing() -> None:
    with Meeting() as meeting:
        prove(meeting.client, TOKEN, "job", "n0", os.urandom)
        meeting.node()
        meeting.client._sock.sendall(encode_frame({"op": "list"}, 0) + bytes(32))
        with pytest.raises(PeerError, match="proof does not fit"):
            meeting.server.receive()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
        PREFIX.pack(MAGIC, 2**32 - 1, 0),
        PREFIX.pack(MAGIC, 2, 2**32 - 1) + b"{}",
        PREFIX.pack(MAGIC, 3, 0) + b"[1]",
        PREFIX.pack(MAGIC, 9, 0) + b"\xff" * 9,
        encode_frame({"job": "job", "node": "n0", "nonce": 7, "proof": "x"}, 0),
        encode_frame({"job": "job", "node": "x" * 999, "nonce": "", "proof": ""}, 0),
        encode_frame({"job": "\ud800", "node": "\ud800", "nonce": "\ud800", "proof": "\ud800"}, 0),
        encode_frame({"job": "job"}, 5) + b"12345",
        b"",
        MAGIC,
        PREFIX.pack(MAGIC, 100, 0) + b"{",
    ],
)
def test_garbage_and_half_frames_are_the_end_of_a_connection_and_of_nothing_else(sent: bytes) -> None:
    with Meeting() as meeting:
        meeting.client.receive()
        meeting.client._sock.sendall(sent)
        meeting.client._sock.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError):
            meeting.node()


def test_a_peer_that_trickles_is_given_up() -> None:
    """Each byte comes in time; the whole does not."""

    class Steps:
        def __init__(self) -> None:
            self.at = 0.0

        def now(self) -> float:
            return 0.0

        def monotonic(self) -> float:
            self.at += 1.0
            return self.at

    left, right = socket.socketpair()
    with left:
        channel = Channel(right, Steps(), 10.0)
        left.sendall(PREFIX.pack(MAGIC, 100, 0))
        original = right.recv_into

        class OneByOne:
            def __getattr__(self, name: str) -> Any:
                return getattr(right, name)

            def recv_into(self, view: memoryview) -> int:
                left.sendall(b" ")
                return original(view[:1])

        channel._sock = OneByOne()  # type: ignore[assignment]
        with pytest.raises(PeerError, match="nothing whole within 10 s"):
            channel.receive()
        channel.close()
