"""A rank that is really killed, between a fenced save and its fence or at any instant: a whole step is left."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.client import Checkpointer
from tests.ckpt_lab import EngineProcess, eventually

WIDTH = 256
KILLS = 4


def training() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Linear(WIDTH, WIDTH)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}


def step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(4, WIDTH)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["step"] += 1


def connected(engine: EngineProcess, attempt: int, **more: Any) -> Checkpointer:
    place: dict[str, Any] = {"job": "job", "attempt": attempt, "rank": 0, "world_size": 1, "node": "n0"}
    return Checkpointer(str(engine.socket), None, **place, **more)


class Rank:
    """A forked process that trains from the first step on, and saves each from `first` to `until`."""

    def __init__(self, engine: EngineProcess, attempt: int, first: int, until: int) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            return
        try:
            torch.set_num_threads(1)
            state, checkpointer = training(), connected(engine, attempt, mode="fenced")
            while state["step"] < until:
                step(state)
                if state["step"] >= first:
                    checkpointer.save(state, state["step"])
            os.write(writing, b"saved\n")
            threading.Event().wait(600)
        finally:
            os._exit(1)

    def await_saved(self) -> None:
        assert os.read(self._reading, 10) == b"saved\n"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._reading)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What the parent expects is computed as the child computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def newest(engine: EngineProcess) -> int:
    from ckpt_engine.admin import EngineAdmin

    return max((shard.step for shard in EngineAdmin(engine.socket).status().shards), default=0)


def loaded(engine: EngineProcess, attempt: int) -> int:
    """The step that a restarted rank gets, after a look whether it is the unbroken run's, to the bit."""
    into = training()
    checkpointer = connected(engine, attempt)
    report = checkpointer.load(into)
    checkpointer.close()
    assert report is not None
    assert (report.tier, report.verified) == ("memory", True)
    right = training()
    while right["step"] < report.step:
        step(right)
    assert into["step"] == report.step
    pairs = zip(into["model"].state_dict().values(), right["model"].state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    mine, theirs = into["optimizer"].state_dict()["state"], right["optimizer"].state_dict()["state"]
    assert all(torch.equal(mine[at][name], theirs[at][name]) for at in theirs for name in theirs[at])
    return report.step


def test_a_save_without_its_fence_is_void_and_the_one_before_is_there(engine: EngineProcess) -> None:
    rank = Rank(engine, 1, 1, 3)
    rank.await_saved()
    rank.kill()  # the save of 3 has no fence: 2 is the newest that is whole
    assert loaded(engine, 2) == 2


def test_a_rank_killed_at_any_instant_leaves_a_whole_step(engine: EngineProcess) -> None:
    dice = random.Random(7)
    first = 1
    for attempt in range(1, KILLS + 1):
        rank = Rank(engine, 2 * attempt, first, 1_000_000)
        eventually(lambda first=first: newest(engine) >= first)  # type: ignore[misc]
        threading.Event().wait(dice.random() * 0.03)
        rank.kill()
        first = loaded(engine, 2 * attempt + 1) + 1
    assert first > KILLS
