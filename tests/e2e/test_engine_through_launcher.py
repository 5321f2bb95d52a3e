"""A checkpoint engine on another machine is asked through its node's launcher: engine, launcher and TCP are real."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from ckpt_engine.admin import EngineAdmin
from ckpt_engine.errors import EngineUnavailable
from pipelines.checkpoints import EngineCatalog
from pipelines.places import Places
from pipelines.run import RunOptions, register_job
from recovery.backend import Unavailable
from recovery.backends.in_allocation import told_by
from recovery.backends.scheduled import ScheduledBackend
from recovery.backends.simulated_allocation import SimulatedAllocation
from recovery.launcher.proof import JobKey
from recovery.launcher.protocol import JobSpec
from tests.ckpt_lab import Lab as EngineLab
from tests.ckpt_lab import RawRank, engine_in_thread, eventually
from tests.launcher_lab import JOB, lab_in_short_folder

TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass
class Remote:
    """One node whose engine is only reached through its launcher; no file of it lies where sockets are looked for."""

    backend: ScheduledBackend
    engine: EngineLab
    places: Places

    @property
    def catalog(self) -> EngineCatalog:
        return EngineCatalog(self.places, lambda job: self.backend)

    def admin(self, timeout_seconds: float = 5.0) -> EngineAdmin:
        def relay(packet: str, seconds: float) -> str:
            return self.backend.ask_engine(JOB, "node0", packet, seconds)

        return EngineAdmin("node0", timeout_seconds, relay)


@pytest.fixture
def remote() -> Iterator[Remote]:
    with lab_in_short_folder() as lab, engine_in_thread(lab.folder, node="node0", job=JOB) as engine:
        env = {"TRANSOM_CKPT_SOCKET": str(engine.socket)}
        lab.launch(lab.script("pass"), tcp_token=TOKEN, env=env)
        allocation = SimulatedAllocation(["node0"], lab.clock)
        allocation.register(lab.spec)
        allocation.on_nodes = lambda job, generation, nodes: [
            allocation.tell(job, launcher) for launcher in told_by(list(lab.files.nodes().values()), nodes)
        ]
        key = JobKey(JOB, TOKEN.encode())
        backend = ScheduledBackend(allocation, lambda job: key, lab.clock, random.Random(1))
        backend.submit(JOB, nodes=1, command=())
        places = Places(lab.folder / "elsewhere", lab.folder)
        register_job(places, JobSpec(job=JOB, script="x", backend="simulated"), RunOptions())
        yield Remote(backend, engine, places)


def save(remote: Remote) -> None:
    with closing(RawRank(remote.engine.socket, job=JOB)) as rank:
        rank.save(7, b"x" * 100)


def test_what_a_remote_engine_holds_counts_for_a_restart(remote: Remote) -> None:
    save(remote)
    choice = remote.catalog.newest_complete(JOB, before_step=None, places=[(0, "node0")])
    assert choice is not None
    assert (choice.step, choice.tier.split("+")[0]) == (7, "memory")
    assert remote.catalog.newest_complete(JOB, before_step=7, places=[(0, "node0")]) is None


def test_it_is_told_what_to_reject_and_brings_its_memory_to_disk(remote: Remote) -> None:
    save(remote)
    (drained,) = remote.catalog.drain(JOB, 10.0)
    assert (drained.node, drained.done) == ("node0", True)
    remote.catalog.reject_from(JOB, 7, 1, "for the test")
    eventually(lambda: remote.admin().status().shards == ())
    assert remote.catalog.newest_complete(JOB, before_step=None, places=[(0, "node0")]) is None


def test_only_what_tools_ask_is_passed_on(remote: Remote) -> None:
    for packet in ('{"op":"acquire","step":1}', '{"op":1}', "[]", "x", '{"op":"status","pad":"' + "x" * 70_000 + '"}'):
        with pytest.raises(Unavailable, match="an engine is asked one of status"):
            remote.backend.ask_engine(JOB, "node0", packet, 5.0)


def test_an_engine_that_is_gone_is_said_to_be(remote: Remote) -> None:
    remote.engine.engine.stop()

    def refused() -> bool:
        try:
            remote.admin(0.5).status()
        except (EngineUnavailable, Unavailable):
            return True
        return False

    eventually(refused)
    assert remote.catalog.statuses(JOB) == []
