"""Nodes with a network of their own: namespaces joined by a bridge, an engine in each, and links that can be cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.admin import EngineAdmin
from tests.ckpt_lab import DEADLINE_SECONDS, ROOT, RawRank
from tests.machine import program

TOKEN = "the token of four nodes in their namespaces"
NETWORK = "10.77.9"
PROGRAM = """
import json, sys
from pathlib import Path
from ckpt_engine.engine import Engine, EngineConfig
from ckpt_engine.ring_config import RingConfig
options, log = json.loads(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
ring = options["ring"]
ring |= {"token": ring["token"].encode(), "nodes": tuple(ring["nodes"])}
config = EngineConfig(
    "job", options["node"], Path(options["socket"]), Path(options["directory"]),
    retry_seconds_min=0.05, retry_seconds_max=0.1, ring=RingConfig(**ring),
)
def tell(event):
    log.write(json.dumps([event.state, event.step, event.rank, event.tier, event.reason]) + "\\n")
Engine(config, tell).run(lambda: print("ready", flush=True))
"""


class Network:
    """Four nodes n0 … n3, each with an address on one bridge, which stands in a namespace of its own."""

    def __init__(self, ip: Path, nodes: tuple[str, ...]) -> None:
        self._ip = ip
        self._prefix = f"transom{os.getpid()}"
        self._made: list[str] = []
        self.nodes = nodes

    def build(self) -> None:
        """Skips, with the reason, where this is not allowed."""
        try:
            self._add("switch")
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"this machine allows no network namespaces ({error.stderr.strip()}): run as root to run this test"
            )
        self._in("switch", "link", "add", "br0", "type", "bridge")
        self._in("switch", "link", "set", "br0", "up")
        for number, node in enumerate(self.nodes):
            self._add(node)
            peer = ("peer", "name", node, "netns", self._name("switch"))
            self._in(node, "link", "add", "eth0", "type", "veth", *peer)
            self._in("switch", "link", "set", node, "master", "br0", "up")
            self._in(node, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            self._in(node, "link", "set", "eth0", "up")
            self._in(node, "link", "set", "lo", "up")
            assert number < 200

    def address(self, node: str) -> str:
        return f"{NETWORK}.{self.nodes.index(node) + 1}"

    def command(self, node: str) -> list[str]:
        """What a program starts with that is to run on `node`."""
        return [str(self._ip), "netns", "exec", self._name(node)]

    def cut(self, node: str) -> None:
        """Pull the cable."""
        self._in("switch", "link", "set", node, "down")

    def join(self, node: str) -> None:
        self._in("switch", "link", "set", node, "up")

    def remove(self) -> None:
        for name in reversed(self._made):
            subprocess.run([self._ip, "netns", "del", name], check=False, capture_output=True)

    def _name(self, node: str) -> str:
        return f"{self._prefix}-{node}"

    def _add(self, node: str) -> None:
        self._run("netns", "add", self._name(node))
        self._made.append(self._name(node))

    def _in(self, node: str, *arguments: str) -> None:
        self._run("-n", self._name(node), *arguments)

    def _run(self, *arguments: str) -> None:
        subprocess.run([self._ip, *arguments], check=True, capture_output=True, text=True, timeout=DEADLINE_SECONDS)


@contextmanager
def network(*nodes: str) -> Iterator[Network]:
    net = Network(program("ip"), nodes)
    try:
        net.build()
        yield net
    finally:
        net.remove()


class Node:
    """One engine in one namespace. The file system is the same for all: it is what the nodes of a job share."""

    def __init__(
        self, net: Network, folder: Path, place: str, nodes: tuple[str, ...], node: str = "", **ring: Any
    ) -> None:
        self.place, self.node = place, node or place
        self.socket = folder / f"{self.node}-{len(list(folder.iterdir()))}.sock"
        self.log = folder / f"{self.socket.name}.jsonl"
        options = {
            "node": self.node, "socket": str(self.socket), "directory": str(folder / "ck"),
            "ring": {
                "token": TOKEN, "nodes": nodes, "listen_host": net.address(place), "beat_seconds": 0.1,
                "dead_seconds": 0.6, "dial_seconds_max": 0.5, "io_seconds_max": 1.0, "retry_seconds_min": 0.1,
                "retry_seconds_max": 0.3, "chunk_bytes": 64 << 10, **ring,
            },
        }  # fmt: skip
        command = [*net.command(place), sys.executable, "-c", PROGRAM, json.dumps(options), str(self.log)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def ready(self) -> Node:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    @property
    def admin(self) -> EngineAdmin:
        return EngineAdmin(self.socket)

    def rank(self, rank: int, attempt: int = 1) -> RawRank:
        return RawRank(self.socket, rank=rank, world_size=4, attempt=attempt)

    def kept(self) -> list[tuple[int, int]]:
        """(rank, step) of what it keeps for others."""
        return sorted((shard.rank, shard.step) for shard in self.admin.status().peer_shards)

    def told(self, state: str, step: int | None = None, tier: str = "peer") -> list[str]:
        """The reasons of its events."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [line[4] for line in lines if line[0] == state and line[3] == tier and step in (None, line[1])]

    def end(self, number: int = 9) -> None:
        """Lose the node, with all that is in its memory."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(DEADLINE_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
