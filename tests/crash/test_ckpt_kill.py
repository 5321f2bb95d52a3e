"""Real processes, really killed: ranks while they save, engines while they write, a disk that ends in the middle."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.errors import EngineRefused, EngineUnavailable
from ckpt_engine.manifest import complete_steps, read_manifest, step_folder
from ckpt_engine.shardfile import check_shard
from tests.ckpt_lab import ROOT, EngineProcess, Lab, RawRank, engine_in_thread, eventually

PAYLOAD_BYTES = 3 << 20
KILLS = 8

TORCH_RANK = """
import sys, time, torch
from ckpt_engine.client import Checkpointer
ckpt = Checkpointer(sys.argv[1], None, job="job", attempt=1, rank=0, world_size=1, node="n0")
torch.manual_seed(11)
weights = torch.randn(100_000)
for step in (1, 2, 3):
    weights.mul_(1.5)
    assert ckpt.save({"weights": weights, "step": step}, step).sealed.reached
print("saved", flush=True)
time.sleep(600)
"""

HALF_A_SAVE = """
import sys, time
from pathlib import Path
from tests.ckpt_lab import RawRank
rank = RawRank(Path(sys.argv[1]))
rank.save(1, b"whole" * 1000)
index, generation, view = rank.acquire(2, 5000)
view[-2500:] = b"t" * 2500
print("half", flush=True)
time.sleep(600)
"""

BUSY_RANK = """
import sys
from pathlib import Path
from tests.ckpt_lab import RawRank
rank = RawRank(Path(sys.argv[1]), attempt=int(sys.argv[2]))
first = int(sys.argv[3])
print("saving", flush=True)
for step in range(first, first + 10_000):
    rank.save(step, bytes([step % 251]) * int(sys.argv[4]))
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A child that has said its first word."""
    child = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline()
    return child


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait(20)
    assert child.stdout is not None
    child.stdout.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


def test_a_killed_rank_gets_its_last_save_back_from_memory(lab: Lab) -> None:
    import torch

    from ckpt_engine.client import Checkpointer

    kill(start(TORCH_RANK, lab.socket))
    torch.manual_seed(11)
    expected = torch.randn(100_000)
    for _ in range(3):
        expected.mul_(1.5)
    checkpointer = Checkpointer(str(lab.socket), None, job="job", attempt=2, rank=0, world_size=1, node="n0")
    into = {"weights": torch.zeros(100_000), "step": 0}
    report = checkpointer.load(into, 3)
    checkpointer.close()
    assert report is not None
    assert (report.tier, report.verified, into["step"]) == ("memory", True, 3)
    assert torch.equal(into["weights"], expected)  # type: ignore[arg-type]


def test_a_rank_killed_in_the_middle_of_a_copy_leaves_the_save_before(lab: Lab) -> None:
    kill(start(HALF_A_SAVE, lab.socket))
    eventually(lambda: not lab.engine._sessions)
    assert [shard.step for shard in lab.admin.status().shards] == [1]
    rank = RawRank(lab.socket, attempt=2)
    assert rank.load(None)["payload"] == b"whole" * 1000
    rank.save(2, b"again")
    assert rank.load(2)["payload"] == b"again"
    rank.close()


def test_a_rank_killed_at_any_instant_leaves_a_whole_step(lab: Lab) -> None:
    dice = random.Random(4)
    first = 1
    for attempt in range(1, KILLS + 1):
        child = start(BUSY_RANK, lab.socket, attempt, first, PAYLOAD_BYTES)
        eventually(lambda first=first: any(s.step >= first for s in lab.admin.status().shards))  # type: ignore[misc]
        threading.Event().wait(dice.random() * 0.03)
        kill(child)
        eventually(lambda: not lab.engine._sessions)
        rank = RawRank(lab.socket, attempt=attempt)
        answer = rank.load(None)
        rank.close()
        assert answer["step"] >= first
        assert answer["tier"] == "memory"
        assert answer["payload"] == bytes([answer["step"] % 251]) * PAYLOAD_BYTES
        first = answer["step"] + 1


def save_until_it_dies(rank: RawRank, first: int, ended: list[int]) -> None:
    """Leaves the last step that the engine took in `ended`."""
    step = first
    while True:
        try:
            rank.save(step, bytes([step % 251]) * PAYLOAD_BYTES)
        except (EngineUnavailable, EngineRefused):
            ended.append(step - 1)
            return
        step += 1


def test_an_engine_killed_at_any_instant_leaves_only_whole_steps_on_disk(tmp_path: Path) -> None:
    dice = random.Random(5)
    first, last_complete = 1, 0
    for attempt in range(1, KILLS + 1):
        with EngineProcess(tmp_path) as engine, RawRank(engine.socket, attempt=attempt) as rank:
            ended: list[int] = []
            saver = threading.Thread(target=save_until_it_dies, args=(rank, first, ended))
            saver.start()
            wanted = "complete" if attempt % 2 else "sealed"
            eventually(lambda e=engine, f=first, w=wanted: any(ev[0] == w and ev[1] >= f for ev in e.events()))  # type: ignore[misc]
            threading.Event().wait(dice.random() * 0.08)
            engine.end(signal.SIGKILL)
            saver.join(20)
        for record in complete_steps(engine.directory):
            manifest = read_manifest(engine.directory, record.step)
            assert manifest is not None
            path = step_folder(engine.directory, record.step) / manifest.shards[0].file
            check_shard(path, manifest.shards[0].checks)
        newest = max((record.step for record in complete_steps(engine.directory)), default=0)
        assert newest >= last_complete, "what was complete stays complete"
        first, last_complete = ended[0] + 1, newest
    assert last_complete > 0


def test_an_engine_that_is_told_to_end_brings_the_newest_save_to_disk(tmp_path: Path) -> None:
    with EngineProcess(tmp_path) as engine, RawRank(engine.socket) as rank:
        for step in range(1, 6):
            rank.save(step, bytes([step]) * PAYLOAD_BYTES)
        assert engine.end(signal.SIGTERM) == 0
    assert complete_steps(engine.directory)[-1].step == 5
    assert ["complete", 5, -1, "disk", ""] in engine.events(), "and its last events are told"
    assert not engine.socket.exists()


def test_a_disk_that_ends_in_the_middle_of_a_shard_leaves_the_step_before(tmp_path: Path) -> None:
    """A file size limit: a real write fails after some real bytes, until the limit is lifted."""
    with EngineProcess(tmp_path) as engine, RawRank(engine.socket) as rank:
        for step in (1, 2):  # both slots exist from here on: the limit would hold for them, too
            rank.save(step, bytes(PAYLOAD_BYTES))
            assert rank.durable(step) == ""
        hard = resource.prlimit(engine.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(engine.process.pid, resource.RLIMIT_FSIZE, (300_000, hard))
        rank.save(3, bytes([3]) * PAYLOAD_BYTES)
        failed = eventually(lambda: [event for event in engine.events() if event[0] == "failed"])
        assert failed[0][1] == 3
        assert "File too large" in failed[0][4]
        assert rank.load(3)["payload"] == bytes([3]) * PAYLOAD_BYTES
        assert [record.step for record in complete_steps(engine.directory)] == [1, 2]
        eventually(lambda: not list(engine.directory.rglob("*.tmp")), "giving a full disk its space back")
        resource.prlimit(engine.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert rank.durable(3) == ""
        assert [record.step for record in complete_steps(engine.directory)] == [1, 2, 3]
        assert engine.end(signal.SIGTERM) == 0
