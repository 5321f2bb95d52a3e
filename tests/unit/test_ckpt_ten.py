"""The ten failures that users of other checkpoint systems report, as tests of the whole way from a rank and back.

E1 a state changed after its save · E2 two quick saves, slow storage · E3 a flipped bit in any tier · E4 another
layout · E5 optimizer groups · E6 tied weights and views · E7 storage that fails · E8 the engine killed at any moment
(also tests/crash) · E9 a trainer that ends at once · E10 retention.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.errors import CheckpointNotFound
from ckpt_engine.manifest import MANIFEST, complete_steps, step_folder
from ckpt_engine.storage import OutputFile, Storage
from tests.ckpt_lab import ROOT, EngineProcess, Lab, engine_in_thread, eventually, put_step
from tests.ckpt_torch import Make, await_checksum, checkpointers, fresh, same, shard_path, train, trained


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


@pytest.fixture
def make() -> Iterator[Make]:
    with checkpointers() as make:
        yield make


def full(step: int) -> dict[str, Any]:
    return {"x": torch.full((600,), float(step)), "step": step}


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_e1_what_changes_after_the_save_is_not_in_it(lab: Lab, make: Make, tier: str) -> None:
    """Parameters, the optimizer's step counters (which change in place) and the lists of the loop."""
    model, optimizer = trained()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    losses = [3.0, 2.0]
    ticket = make(lab.socket).save({"model": model, "optimizer": optimizer, "losses": losses}, 1)
    train(model, optimizer)
    losses.append(1.0)
    assert ticket.durable.wait(20)
    other, other_optimizer = fresh()
    into: dict[str, Any] = {"model": other, "optimizer": other_optimizer, "losses": None}
    reader = make(lab.socket, attempt=2) if tier == "memory" else make(None, lab.directory, attempt=2)
    report = reader.load(into, 1)
    assert report is not None
    assert report.tier == tier
    assert same(dict(other.state_dict()), expected)
    assert {float(entry["step"]) for entry in other_optimizer.state.values()} == {3.0}
    assert into["losses"] == [3.0, 2.0]


class GatedShards(Storage):
    """Writing a shard begins when the gate is open."""

    def __init__(self) -> None:
        self.gate, self.reached = threading.Event(), threading.Event()

    def create(self, path: Path) -> OutputFile:
        if "safetensors" in path.name:
            self.reached.set()
            assert self.gate.wait(20)
        return super().create(path)


def test_e2_two_quick_saves_while_the_disk_is_slow_are_two_checkpoints(tmp_path: Path, make: Make) -> None:
    storage = GatedShards()
    with engine_in_thread(tmp_path, storage=storage) as lab:
        writer = make(lab.socket)
        first = writer.save(full(1), 1)
        assert storage.reached.wait(20)
        second = writer.save(full(2), 2)
        assert (first.failed, second.failed) == ("", "")
        storage.gate.set()
        assert first.durable.wait(20), first.durable.reason
        assert second.durable.wait(20), second.durable.reason
        reader = make(None, lab.directory, attempt=2)
        for step in (1, 2):
            into = full(0)
            reader.load(into, step)
            assert same(into, full(step))


def _flip_somewhere(dice: random.Random, raw: Any) -> None:
    at = dice.randrange(len(raw))
    raw[at] ^= 1 << dice.randrange(8)


@pytest.mark.parametrize("seed", range(12))
def test_e3_a_flipped_bit_in_memory_is_found_and_the_disk_used(lab: Lab, make: Make, seed: int) -> None:
    """Anywhere in what a slot says: fields, layout, values, tensors."""
    dice = random.Random(seed)
    assert make(lab.socket).save(full(5), 5).durable.wait(20)
    slot, header = await_checksum(lab, 5)
    assert slot.segment is not None
    view = slot.segment.view
    start = header.payload_offset
    parts = [view[:200], view[4096 : 4096 + header.layout_bytes], view[start : start + header.payload_bytes]]
    parts.append(view[header.values_offset : header.values_offset + header.values_bytes])
    _flip_somewhere(dice, parts[seed % 4])
    into = full(0)
    report = make(lab.socket, attempt=2).load(into)
    assert report is not None
    assert (report.step, report.tier) == (5, "disk")
    assert same(into, full(5))
    eventually(lambda: lab.told("damaged", 5, "memory"))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["shard", "manifest"])
def test_e3_a_flipped_bit_on_disk_is_found_and_the_step_before_used(
    tmp_path: Path, make: Make, name: str, seed: int
) -> None:
    writer = make(None, tmp_path)
    for step in (1, 2):
        writer.save(full(step), step)
    path = shard_path(tmp_path, 2) if name == "shard" else step_folder(tmp_path, 2) / MANIFEST
    raw = bytearray(path.read_bytes())
    _flip_somewhere(random.Random(seed), raw)
    path.write_bytes(raw)
    into = full(0)
    report = make(None, tmp_path, attempt=2).load(into)
    assert report is not None
    assert (report.step, report.tier) == (1, "disk")
    assert same(into, full(1))


def test_e4_a_layout_that_changes_from_save_to_save_loses_nothing(lab: Lab, make: Make) -> None:
    """A key at the second save, a grown tensor at the third."""
    writer = make(lab.socket)
    states: list[dict[str, Any]] = [
        {"a": torch.full((10,), 1.0)},
        {"a": torch.full((10,), 2.0), "b": torch.ones(3)},
        {"a": torch.full((500_000,), 3.0), "b": torch.ones(3)},
    ]
    for step, state in enumerate(states):
        assert writer.save(state, step).durable.wait(20)
    reader = make(None, lab.directory, attempt=2)
    for step, state in enumerate(states):
        into: dict[str, Any] = dict.fromkeys(state)
        reader.load(into, step)
        assert same(into, state)


def test_e5_an_optimizer_comes_back_with_all_its_groups(lab: Lab, make: Make) -> None:
    """An empty group keeps its betas, a scheduler's `initial_lr` stays, None stays None, tuples stay tuples."""
    model, _ = fresh()
    first, rest = [*model[0].parameters()], [*model[1:].parameters()]

    def tuner(lr: float) -> torch.optim.Optimizer:
        groups = [
            {"params": first, "betas": (0.7, 0.9)},
            {"params": [], "betas": (0.5, 0.6)},
            {"params": rest, "eps": 1e-5},
        ]
        return torch.optim.AdamW(groups, lr=lr, foreach=None, amsgrad=True)

    optimizer = tuner(0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        train(model, optimizer)
        scheduler.step()
    make(lab.socket).save({"optimizer": optimizer, "scheduler": scheduler}, 1)
    other = tuner(0.9)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other, step_size=1, gamma=0.5)
    make(lab.socket, attempt=2).load({"optimizer": other, "scheduler": other_scheduler})
    assert same(other.state_dict(), optimizer.state_dict())
    assert other.param_groups[1]["betas"] == (0.5, 0.6)
    assert [group["initial_lr"] for group in other.param_groups] == [0.2] * 3
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()


def test_e6_what_was_tied_is_stored_once_and_tied_again(lab: Lab, make: Make) -> None:
    weight = torch.randn(40, 8)
    state = {"embed": weight, "head": weight, "rows": weight[:10], "turned": weight.t()}
    make(lab.socket).save(state, 1)
    assert lab.admin.status().shards[0].size_bytes == weight.numel() * 4
    into: dict[str, Any] = dict.fromkeys(state)
    make(lab.socket, attempt=2).load(into)
    assert same(into, state)
    assert into["embed"] is into["head"]
    into["embed"][0, 0] = 77.0
    assert float(into["rows"][0, 0]) == float(into["turned"][0, 0]) == 77.0


class FailingStorage(Storage):
    """The n-th operation fails, and all after it, until it is mended."""

    def __init__(self, good: int) -> None:
        self.good = good
        self.mended = False

    def _count(self) -> None:
        self.good -= 1
        if self.good < 0 and not self.mended:
            raise OSError(5, "Input/output error")

    def create(self, path: Path) -> OutputFile:
        self._count()
        return FailingFile(path, self)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        self._count()
        super().sync_folder(path)


class FailingFile(OutputFile):
    def __init__(self, path: Path, storage: FailingStorage) -> None:
        super().__init__(path)
        self._storage = storage

    def write(self, piece: bytes | memoryview) -> None:
        self._storage._count()
        super().write(piece)

    def sync(self) -> None:
        self._storage._count()
        super().sync()


@pytest.mark.parametrize("good", range(0, 18, 2))
def test_e7_storage_that_fails_publishes_nothing_and_loses_nothing(tmp_path: Path, make: Make, good: int) -> None:
    storage = FailingStorage(10**9)
    with engine_in_thread(tmp_path, storage=storage) as lab:
        writer = make(lab.socket)
        assert writer.save(full(1), 1).durable.wait(20)
        storage.good = good
        ticket = writer.save(full(2), 2)
        assert not ticket.failed, "memory has it"
        eventually(lambda: lab.told("failed", 2) or ticket.durable.wait(0.0))
        for record in complete_steps(lab.directory):
            into = full(0)
            make(None, lab.directory, attempt=9).load(into, record.step)
            assert same(into, full(record.step))
        storage.mended = True
        assert ticket.durable.wait(20), ticket.durable.reason
        eventually(lambda: [record.step for record in complete_steps(lab.directory)] == [1, 2])


def test_e8_an_engine_killed_while_it_writes_leaves_the_step_before(tmp_path: Path, make: Make) -> None:
    dice = random.Random(8)
    for attempt in range(1, 4):
        with EngineProcess(tmp_path) as engine:
            writer = make(engine.socket, attempt=attempt)
            base = 10 * attempt
            assert writer.save(full(base), base).durable.wait(20)
            writer.save({"x": torch.full((600_000,), 1.0), "step": base + 1}, base + 1)
            threading.Event().wait(dice.random() * 0.02)
            engine.end(signal.SIGKILL)
        into: dict[str, Any] = {"x": None, "step": None}
        report = make(None, engine.directory, attempt=attempt + 1).load(into)
        assert report is not None
        assert report.step in (base, base + 1)
        assert into["step"] == report.step
        assert into["x"].tolist() == ([1.0] * 600_000 if report.step > base else full(base)["x"].tolist())


HASTY_TRAINER = """
import os, sys, torch
from ckpt_engine.client import Checkpointer
ckpt = Checkpointer(sys.argv[1], None, job="job", attempt=1, rank=0, world_size=1, node="n0")
ckpt.save({"x": torch.full((600,), 3.0), "step": 3}, 3)
os._exit(0)
"""


def test_e9_a_trainer_that_ends_right_after_its_save_loses_nothing(lab: Lab, make: Make) -> None:
    subprocess.run([sys.executable, "-c", HASTY_TRAINER, str(lab.socket)], cwd=ROOT, check=True, timeout=60)
    into = full(0)
    report = make(lab.socket, attempt=2).load(into)
    assert report is not None
    assert (report.step, report.tier) == (3, "memory")
    assert same(into, full(3))
    eventually(lambda: lab.told("complete", 3), "the step on disk")


def test_e10_retention_keeps_the_newest_by_number_and_never_gives_up_the_last_good_one(tmp_path: Path) -> None:
    """Steps 900 to 10000 (by name 10000 is the oldest), a stale 99999 of a run before, and saves that fail."""
    directory = tmp_path / "ck"
    put_step(directory, 99_999, attempt=1)
    storage = FailingStorage(10**9)
    with checkpointers() as make, engine_in_thread(tmp_path, storage=storage, retention_steps=2) as lab:
        writer = make(lab.socket, attempt=2)
        for step in (900, 1000, 9900, 10_000):
            assert writer.save(full(step), step).durable.wait(20)
            eventually(lambda step=step: lab.told("complete", step))  # type: ignore[misc]
        eventually(lambda: [record.step for record in complete_steps(directory)] == [9900, 10_000])
        assert not step_folder(directory, 99_999).exists()
        storage.good = 0
        for step in (10_100, 10_200, 10_300):
            writer.save(full(step), step)
        eventually(lambda: lab.told("failed", 10_300))
        assert [record.step for record in complete_steps(directory)] == [9900, 10_000]
        into = full(0)
        make(None, directory, attempt=3).load(into)
        assert same(into, full(10_000))
        storage.mended = True


def test_e3_when_the_only_file_is_cut_short_training_does_not_begin_with_bad_bytes(tmp_path: Path, make: Make) -> None:
    make(None, tmp_path).save(full(1), 1)
    path = shard_path(tmp_path, 1)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointNotFound, match="step 1 is neither in memory nor complete"):
        make(None, tmp_path, attempt=2).load(full(0), 1)
