"""Whatever bytes a launcher, or whoever asks it, meets on TCP: a refusal, never an error of ours."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.clock import SystemClock
from recovery.launcher.address import parse_address
from recovery.launcher.client import LauncherSilent, LauncherUnreachable, ask
from recovery.launcher.engine_question import EngineQuestion, EngineSilent
from recovery.launcher.proof import AskerEnd, LauncherEnd, NotProved, Seals
from recovery.launcher.protocol import Observe
from tests.simulated_launchers import key

FEW = settings(max_examples=60, deadline=None)
WORDS = st.sampled_from(["protocol", "nonce", "proof", "node", "refused"])
LINES = st.one_of(
    st.binary(max_size=300),
    st.dictionaries(WORDS, st.one_of(st.text(max_size=80), st.integers(), st.none())).map(msgspec.json.encode),
)


@given(LINES)
def test_a_claim_may_be_anything(line: bytes) -> None:
    with contextlib.suppress(NotProved):
        LauncherEnd(key(), "n1").welcome(line)
        raise AssertionError("nobody proves a token by chance")


@given(LINES, LINES)
def test_a_challenge_and_a_welcome_may_be_anything(challenge: bytes, welcome: bytes) -> None:
    end = AskerEnd(key())
    with contextlib.suppress(NotProved):
        end.claim(challenge)
    with contextlib.suppress(NotProved):
        end.finish(welcome)
        raise AssertionError("nobody proves a token by chance")


@given(st.binary(max_size=200))
def test_a_line_may_be_anything(line: bytes) -> None:
    with contextlib.suppress(NotProved):
        Seals(b"k" * 32, launcher=True).open(line)
        raise AssertionError("nobody proves a line by chance")


@given(st.text(max_size=40))
def test_an_address_may_be_anything(text: str) -> None:
    with contextlib.suppress(ValueError):
        parse_address(text)


@FEW
@given(st.binary(max_size=3000))
def test_what_answers_at_an_address_may_say_anything(raw: bytes) -> None:
    def impostor() -> None:
        with contextlib.suppress(OSError):
            peer, _ = listener.accept()
            with peer:
                peer.sendall(raw)
                peer.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor)
        thread.start()
        try:
            port = listener.getsockname()[1]
            ask(f"tcp:127.0.0.1:{port}", Observe(), timeout_seconds=10, clock=SystemClock(), key=key())
            raise AssertionError("it is no launcher")
        except (LauncherUnreachable, LauncherSilent):
            pass
        finally:
            thread.join()


@given(st.one_of(st.text(max_size=100), st.dictionaries(st.text(max_size=4), st.integers()).map(json.dumps)))
def test_a_question_to_an_engine_may_be_anything(packet: str) -> None:
    with contextlib.suppress(EngineSilent):
        EngineQuestion("/nowhere/engine.sock", packet, 1.0, SystemClock())
        raise AssertionError("there is no engine")


@FEW
@given(st.binary(max_size=300))
def test_an_engine_may_answer_anything(raw: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="eng-") as folder:
        path = f"{folder}/e.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen()
            question = EngineQuestion(path, '{"op":"status"}', 10.0, SystemClock())
            assert question.look() is None
            peer, _ = listener.accept()
            with peer:
                assert peer.recv(100) == b'{"op":"status"}'
                if raw:
                    peer.send(raw)
            try:
                assert question.look() == raw.decode("utf-8", "replace")
            except EngineSilent:
                assert not raw
