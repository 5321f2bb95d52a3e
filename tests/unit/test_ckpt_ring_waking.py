"""A receiver of raw bytes sleeps until many are there, and for an object until the first byte is."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from ckpt_engine.clock import HostClock
from ckpt_engine.ring_wire import WAKE_BYTES, Channel


def test_a_small_object_behind_many_raw_bytes_is_not_waited_for_in_vain() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    sender, receiver = Channel(left, HostClock(), 60.0), Channel(right, HostClock(), 60.0)
    raw = bytes(range(256)) * (2 * WAKE_BYTES // 256 + 1)
    into = bytearray(len(raw))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, {"piece": 0}, raw)
        assert receiver.receive(len(raw)) == {"piece": 0}
        receiver.receive_raw(memoryview(into)[:WAKE_BYTES])
        assert right.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) > 1
        receiver.receive_raw(memoryview(into)[WAKE_BYTES:])
        sent.result(60.0)
    assert into == raw
    sender.send({"end": 1})
    assert receiver.receive() == {"end": 1}
    assert right.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    sender.close()
    receiver.close()
