"""A resumed run sees the samples that the unbroken one saw: loaders, samplers and schedulers keep their place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.client import Checkpointer
from tests.ckpt_lab import engine_in_thread

SAMPLES, BATCH, EPOCHS, STEPS = 23, 4, 3, 17


class ShuffledLoader:
    """Batches of sample ids, shuffled anew each epoch; resumes in the middle of one."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(SAMPLES, generator=self._generator)
        self._at = self._epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            if self._at >= SAMPLES:
                self._order, self._at = torch.randperm(SAMPLES, generator=self._generator), 0
                self._epoch += 1
            batch = self._order[self._at : self._at + BATCH].tolist()
            self._at += BATCH
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self._generator.get_state(),
            "order": self._order,
            "position": (self._epoch, self._at),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._order = state["order"]
        self._epoch, self._at = state["position"]


class Run:
    """A training run whose loss depends on which samples it saw, in which order."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.3, total_steps=200)
        self.loader = ShuffledLoader(seed)
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "rng": torch.get_rng_state(),
        }

    def train(self, steps: int) -> None:
        batches = iter(self.loader)
        for _ in range(steps):
            batch = next(batches)
            noise = torch.rand(len(batch), 1)
            loss = (self.model(torch.tensor(batch).float().unsqueeze(1) / SAMPLES) - noise).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.seen.append(batch)
            self.losses.append(loss.item())


@pytest.mark.parametrize("broken_at", [1, 5, 6, 13])
@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_a_resumed_run_sees_what_the_unbroken_one_saw(tmp_path: Path, broken_at: int, tier: str) -> None:
    whole = Run(seed=1)
    whole.train(STEPS)
    with engine_in_thread(tmp_path) as lab:
        place: dict[str, Any] = {"job": "job", "rank": 0, "world_size": 1, "node": "n0"}
        first = Run(seed=1)
        ckpt = Checkpointer(str(lab.socket), None, attempt=1, **place)
        first.train(broken_at)
        assert ckpt.save(first.state(), broken_at).durable.wait(20)
        first.train(2)  # what is lost
        ckpt.close()
        second = Run(seed=2)
        socket = str(lab.socket) if tier == "memory" else None
        again = Checkpointer(socket, str(lab.directory), attempt=2, **place)
        state = second.state()
        report = again.load(state)
        assert report is not None
        assert (report.step, report.tier) == (broken_at, tier)
        torch.set_rng_state(state["rng"])
        second.train(STEPS - broken_at)
        again.close()
    assert second.seen == whole.seen[broken_at:]
    assert second.losses == whole.losses[broken_at:]
