"""Saves from a real GPU: `make test-gpu` runs what is here, on a machine that has one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.client import Checkpointer
from pipelines.bench_ckpt_states import difference
from tests.ckpt_lab import engine_in_thread


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[Checkpointer]:
    with engine_in_thread(tmp_path) as lab:
        checkpointer = Checkpointer(str(lab.socket), None, job="job", attempt=1, rank=0, world_size=1, node="n0")
        yield checkpointer
        checkpointer.close()


def test_tensors_of_a_gpu_come_back_bit_for_bit(ckpt: Checkpointer) -> None:
    base = torch.randn(1000, 1000, device="cuda")
    state = {
        "tensors": [base, base.T, base[::3], base.bfloat16(), torch.ones((), device="cuda"), torch.randn(50)],
        "empty": torch.empty(0, device="cuda"),
    }
    for step in (1, 2, 3):
        assert ckpt.save(state, step).sealed.reached
        into: dict[str, Any] = dict.fromkeys(state)
        ckpt.load(into, step=step)
        on_host = {"tensors": [tensor.cpu() for tensor in state["tensors"]], "empty": torch.empty(0)}
        assert all(torch.equal(one, two) for one, two in zip(into["tensors"], on_host["tensors"], strict=True))
        base.add_(1)


def test_the_copy_is_of_the_moment_of_the_save(ckpt: Checkpointer) -> None:
    """Work that is queued before the save is in it, work that is queued after it is not."""
    values = torch.zeros(1 << 22, device="cuda")
    for step in range(1, 6):
        for _ in range(50):
            values.add_(1)
        ckpt.save({"values": values}, step)
        values.fill_(-1)
        into: dict[str, Any] = {"values": None}
        ckpt.load(into, step=step)
        assert difference(torch, {"v": into["values"]}, {"v": torch.full((1 << 22,), 50.0)}) == ""
        values.zero_()


def test_loaded_into_a_gpu(ckpt: Checkpointer) -> None:
    model = torch.nn.Linear(100, 100).cuda()
    before = model.weight.detach().clone()
    ckpt.save({"model": model}, 1)
    with torch.no_grad():
        model.weight.zero_()
    ckpt.load({"model": model}, step=1)
    assert torch.equal(model.weight, before)
