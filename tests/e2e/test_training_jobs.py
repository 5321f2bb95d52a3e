"""Real training: a user's project whose folders have our names, and the demo's own job."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_launcher import FakeLauncher

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "pipelines" / "demo_job" / "train.py"
NAN_JOB_STEPS = 40
TIMEOUT_SECONDS = 120


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[FakeLauncher]:
    launcher = FakeLauncher(tmp_path / "t.sock")
    yield launcher
    launcher.close()


FORKING = """
import json, os, runpy, sys
import torch, torch._dynamo, torch.distributed, torch.nn.parallel, torch.optim
for line in sys.stdin:
    children = []
    for order in json.loads(line):
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)
            os.environ.update(order["env"])
            sys.argv = order["argv"]
            runpy.run_path(sys.argv[0], run_name="__main__")
            sys.exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)
"""


class Forker:
    """Forks ranks of the demo's job from one process that has imported torch, as the launcher does."""

    def __init__(self, output: Path) -> None:
        self.output = output
        with output.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-c", FORKING],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def start(self, *ranks: dict[str, str], arguments: tuple[str, ...]) -> None:
        """Start ranks with these environments."""
        port = free_port()
        orders = [
            {"env": {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, "argv": [str(TRAIN), *arguments]}
            for env in ranks
        ]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        """Return when all have ended well."""
        assert self._process.stdout is not None
        codes = json.loads(self._process.stdout.readline())
        assert set(codes) == {0}, self.output.read_text()

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    forker = Forker(tmp_path_factory.mktemp("ranks") / "output")
    yield forker
    forker.close()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_a_project_with_folders_of_our_names_trains_with_spawned_workers(
    launcher: FakeLauncher, tmp_path: Path
) -> None:
    environment = launcher.environment(TRANSOM_CKPT_DIR=str(tmp_path / "checkpoints"))
    result = subprocess.run(
        [sys.executable, ROOT / "tests" / "user_project" / "train.py"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == "trained 8\n"
    launcher.wait_for(lambda: launcher.metrics() and launcher.metrics()[-1].phase == "finished")
    rows = launcher.rows()
    assert list(rows) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all({"train.loss", "train.data.duration", "train.compute.duration"} <= set(row) for row in rows.values())
    assert len(launcher.hellos) == 1


def test_the_demos_job_goes_on_after_a_resume_exactly_as_if_it_had_not_stopped(
    launcher: FakeLauncher, forker: Forker, tmp_path: Path
) -> None:
    first = launcher.environment(TRANSOM_CKPT_DIR=str(tmp_path / "checkpoints"))
    forker.start(first, arguments=("--steps", "6", "--save-every", "3"))
    forker.wait()
    second = {**first, "TRANSOM_ATTEMPT": "4", "TRANSOM_RESUME_STEP": "3"}
    forker.start(second, arguments=("--steps", "6", "--save-every", "1000"))
    forker.wait()
    launcher.wait_for(lambda: [m.phase for m in launcher.metrics()].count("finished") >= 2)
    losses = {
        attempt: {
            step: loss
            for message in launcher.metrics()
            if message.attempt == attempt and "train.loss" in message.columns
            for step, loss in zip(message.steps, message.column("train.loss"), strict=True)
        }
        for attempt in (3, 4)
    }
    assert list(losses[3]) == [1, 2, 3, 4, 5, 6]
    assert losses[4] == {step: losses[3][step] for step in (4, 5, 6)}


def test_two_ranks_of_the_demos_job_tell_who_had_the_nan_first(
    launcher: FakeLauncher, forker: Forker, tmp_path: Path
) -> None:
    common = launcher.environment(
        WORLD_SIZE="2", TRANSOM_ALLOW_INJECT="1", TRANSOM_CKPT_DIR=str(tmp_path / "checkpoints")
    )
    ranks = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    forker.start(*ranks, arguments=("--steps", str(NAN_JOB_STEPS)))
    launcher.wait_for(lambda: len(launcher.hellos) == 2, TIMEOUT_SECONDS)
    culprit = next(index for index, hello in enumerate(launcher.hellos) if hello.rank == 1)
    launcher.connections[culprit].send(b'inject.v1\n{"fault":"nan","at_step":6}')
    forker.wait()
    launcher.wait_for(lambda: [m.phase for m in launcher.metrics()].count("finished") == 2)
    innocent, guilty = launcher.rows(0), launcher.rows(1)
    assert list(innocent) == list(guilty) == list(range(1, NAN_JOB_STEPS + 1))
    (told,) = launcher.of("fault_injected.v1")
    first = int(told["parameters"]["step"])  # where it fired: 6, or later where the ranks were there first
    last = NAN_JOB_STEPS + 1

    def bad_steps(rows: dict[int, dict[str, float]], name: str) -> list[int]:
        return [step for step, row in rows.items() if not math.isfinite(row[name])]

    assert bad_steps(guilty, "train.loss") == list(range(first, last))
    assert bad_steps(innocent, "train.loss") == list(range(first + 1, last))
    assert bad_steps(guilty, "train.gradient.local_norm")[0] == first
    assert bad_steps(innocent, "train.gradient.local_norm")[0] == first + 1
    assert {"train.collective.wait", "train.compute.duration", "train.compute.cpu"} <= set(innocent[5])
    assert {"init", "train", "finished"} <= {message.phase for message in launcher.metrics()}
