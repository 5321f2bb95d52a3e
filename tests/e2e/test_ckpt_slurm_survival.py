"""What memory survives under a real Slurm: the ends of steps and of the job, and who has it when the next step asks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_engine.keeping import keeper_status
from ckpt_engine.manifest import complete_steps
from tests.ckpt_lab import ROOT, EngineProcess, eventually
from tests.slurm_lab import SlurmLab

PAYLOAD_BYTES = 20 << 20  # three pieces, of which the second waits
SLOW_BYTES_PER_SECOND = 100_000  # a minute and more for a piece, unless the engine is told to end

SAVE = """
import sys
from pathlib import Path
from tests.ckpt_lab import RawRank
with RawRank(Path(sys.argv[1]), attempt=int(sys.argv[2])) as rank:
    rank.save(int(sys.argv[3]), bytes([int(sys.argv[3])]) * int(sys.argv[4]))
"""
LOAD = """
import sys
from pathlib import Path
from tests.ckpt_lab import RawRank
with RawRank(Path(sys.argv[1]), attempt=int(sys.argv[2])) as rank:
    found = rank.load()
    print(found["tier"], found["step"], found.get("payload") == bytes([found["step"]]) * int(sys.argv[3]))
"""
TOGETHER = """
trap : TERM  # as a launcher, which stays until its engine has ended
"$@" &
while [ ! -S "$SOCKET" ]; do sleep 0.05; done
"$0" -c "$SAVE" "$SOCKET" 1 9 "$BYTES" && touch "$SAVED"
wait
wait
"""


@pytest.fixture
def allocation(slurm: SlurmLab) -> Iterator[int]:
    """A job that holds one node; its number."""
    said = slurm.run("sbatch", "--parsable", "--nodes=1", "--output=/dev/null", "--wrap=sleep 600")
    number = int(said.split(";")[0])
    slurm.wait_for_phase(number, "running")
    yield number
    slurm.cancel(number)


def step_of(slurm: SlurmLab, allocation: int) -> tuple[str, ...]:
    """What a command begins with that is to be a step of its own."""
    srun = ("srun", f"--jobid={allocation}", "--overlap", "--ntasks=1", f"--chdir={ROOT}")
    return ("env", f"SLURM_CONF={slurm.config}", *srun)


def engine_step(slurm: SlurmLab, allocation: int, folder: Path) -> EngineProcess:
    return EngineProcess(
        folder, *step_of(slurm, allocation), keeper_seconds=30.0, persist_bytes_per_second_max=SLOW_BYTES_PER_SECOND
    )


def in_a_step(slurm: SlurmLab, allocation: int, program: str, *words: object) -> str:
    return slurm.run(*step_of(slurm, allocation)[2:], sys.executable, "-c", program, *map(str, words))


def is_gone(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def test_an_engine_in_a_step_of_its_own_outlives_the_steps_of_ranks_and_writes_when_the_job_ends(
    slurm: SlurmLab, allocation: int, tmp_path: Path
) -> None:
    with engine_step(slurm, allocation, tmp_path) as engine:
        in_a_step(slurm, allocation, SAVE, engine.socket, 1, 7, PAYLOAD_BYTES)
        said = in_a_step(slurm, allocation, LOAD, engine.socket, 2, PAYLOAD_BYTES)
        assert said.split() == ["memory", "7", "True"], "the step that saved it is over"
        assert complete_steps(engine.directory) == [], "the disk is slow"
        keeper = int(eventually(lambda: keeper_status(engine.socket)["pid"], "a keeper"))
        slurm.run("scancel", str(allocation))
        slurm.wait_for_phase(allocation, "ended")
        engine.end(0)
    assert [record.step for record in complete_steps(engine.directory)] == [7]
    eventually(lambda: is_gone(keeper), "the keeper's end")


def test_an_engine_in_the_step_of_the_ranks_writes_when_the_step_is_told_to_end_and_is_gone(
    slurm: SlurmLab, allocation: int, tmp_path: Path
) -> None:
    """The batch script of the job goes on: only the step ends."""
    saved, sock = tmp_path / "saved", tmp_path / "engine.sock"
    environ = (f"SAVE={SAVE}", f"SOCKET={sock}", f"BYTES={PAYLOAD_BYTES}", f"SAVED={saved}")
    step = (*step_of(slurm, allocation), "env", *environ, "sh", "-c", TOGETHER, sys.executable)
    with EngineProcess(
        tmp_path, *step, keeper_seconds=30.0, persist_bytes_per_second_max=SLOW_BYTES_PER_SECOND
    ) as engine:  # fmt: skip
        eventually(saved.exists, "the save")
        keeper = int(eventually(lambda: keeper_status(engine.socket)["pid"], "a keeper"))
        assert complete_steps(engine.directory) == []
        slurm.run("scancel", "--signal=TERM", f"{allocation}.0")
        engine.end(0)
        assert slurm.state(allocation) == "RUNNING"
    assert [record.step for record in complete_steps(engine.directory)] == [9]
    eventually(lambda: is_gone(keeper), "the keeper's end")
