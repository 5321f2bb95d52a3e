"""A rank's first request is with the engine before it answers that it takes the rank: one wait, not two."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpt_engine import wire
from ckpt_engine.clock import HostClock
from ckpt_engine.errors import EngineRefused, EngineUnavailable
from ckpt_engine.link import EngineLink
from ckpt_engine.shardfile import Identity

ADMITTED = {"directory": "/", "node": "n0", "kept": []}


def _meet(folder: Path, answers: Sequence[wire.Fields]) -> tuple[EngineLink, list[object]]:
    """A link to an engine that answers only when it has read so many packets."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "e.sock"))
    listener.listen(1)
    heard: list[object] = []

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            for _ in range(2):
                heard.append(wire.receive(connection)[0]["op"])
            for answer in answers:
                wire.send(connection, answer)
            connection.settimeout(60.0)
            with contextlib.suppress(OSError):  # it hangs up with answers unread, or requests
                connection.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    identity = Identity("gpt", 1, 0, 1, -1)
    return EngineLink(str(folder / "e.sock"), identity, HostClock(), list, lambda slots, generations: None), heard


def test_it_goes_out_before_the_engine_has_answered_the_registration(tmp_path: Path) -> None:
    link, heard = _meet(tmp_path, [ADMITTED, {"tier": ""}])
    assert link.ask({"op": "load"}) == ({"tier": ""}, [])
    assert heard == ["register", "load"]
    link.close()


def test_a_rank_that_is_refused_gets_no_answer_to_it(tmp_path: Path) -> None:
    link, _ = _meet(tmp_path, [{"error": "another job"}, {"tier": "memory"}])
    with pytest.raises(EngineRefused, match="another job"):
        link.ask({"op": "load"})
    with pytest.raises(EngineUnavailable, match="another job"):
        link.ask({"op": "load"})
