"""torch.distributed.checkpoint saves and loads through the engine and its folder, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from ckpt_engine.adapters.dcp import EngineReader, EngineWriter, step_in
from ckpt_engine.adapters.dcp_export import export_dcp
from ckpt_engine.client import Checkpointer
from ckpt_engine.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from ckpt_engine.inspection import verify_steps
from ckpt_engine.manifest import complete_steps, step_folder
from tests.ckpt_lab import ROOT, Lab, engine_in_thread

pytestmark = pytest.mark.filterwarnings("ignore")  # that there is no process group, and torch's own deprecations


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


@pytest.fixture
def ckpt(lab: Lab) -> Iterator[Checkpointer]:
    checkpointer = Checkpointer(str(lab.socket), None, job="job", attempt=1, rank=0, world_size=1, node="n0")
    yield checkpointer
    checkpointer.close()


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    tied = torch.randn(3, 4)
    return {
        "model": {
            "a": tied,
            "tied": tied,
            "half": torch.randn(5).bfloat16(),
            "count": torch.tensor(seed),
            "none": torch.ones(0),
        },
        "optimizer": {"state": {"0": {"exp_avg": torch.randn(4, 3).t(), "lr": 0.1 * seed}}, "betas": (0.9, 0.95)},
        "epoch": seed,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def save(checkpointer: Checkpointer, lab: Lab, step: int, seed: int, **options: Any) -> None:
    dcp.save(state(seed), storage_writer=EngineWriter(checkpointer, step, lab.directory, **options), no_dist=True)


def test_what_is_saved_by_dcp_is_loaded_by_dcp(ckpt: Checkpointer, lab: Lab) -> None:
    save(ckpt, lab, 10, 1)
    save(ckpt, lab, 20, 2)
    assert [record.step for record in complete_steps(lab.directory)] == [10, 20]
    assert all(verdict.whole for verdict in verify_steps(lab.directory))
    for step, seed in ((10, 1), (20, 2), (None, 2)):
        into = state(99)
        dcp.load(into, storage_reader=EngineReader(lab.directory, step), no_dist=True)
        assert same(into, state(seed))


def test_the_checkpoint_id_names_the_step(ckpt: Checkpointer, lab: Lab) -> None:
    writer, reader = EngineWriter(ckpt, 0, lab.directory), EngineReader(lab.directory)
    dcp.save(state(1), checkpoint_id="run/step-00000030", storage_writer=writer, no_dist=True)
    into = state(9)
    dcp.load(into, checkpoint_id="30", storage_reader=reader, no_dist=True)
    assert same(into, state(1))
    assert [step_in(name) for name in ("7", "a/7", "step-00000007", "/x/step-0000007/")] == [7] * 4
    with pytest.raises(ValueError, match="does not end in a step"):
        step_in("latest")


def test_an_async_save_of_dcp_goes_through_the_engine(ckpt: Checkpointer, lab: Lab) -> None:
    work = state(3)
    future = dcp.async_save(work, storage_writer=EngineWriter(ckpt, 40, lab.directory), no_dist=True)
    for tensor in (work["model"]["a"], work["model"]["half"]):
        tensor.zero_()
    future.result()
    into = state(9)
    dcp.load(into, storage_reader=EngineReader(lab.directory, 40), no_dist=True)
    assert same(into, state(3)), "as it was when it was called"


def test_a_sealed_save_returns_before_the_disk_has_it(ckpt: Checkpointer, lab: Lab) -> None:
    save(ckpt, lab, 50, 5, wait="sealed")
    assert lab.admin.status().shards[0].step == 50


def test_without_an_engine_dcp_saves_to_the_folder(tmp_path: Path) -> None:
    alone = Checkpointer(None, str(tmp_path), job="job", attempt=1, rank=0, world_size=1, node="n0")
    for wait, step in (("durable", 1), ("sealed", 2)):
        writer = EngineWriter(alone, step, tmp_path, wait=wait)  # type: ignore[arg-type]
        dcp.save(state(step), storage_writer=writer, no_dist=True)
    into = state(9)
    dcp.load(into, storage_reader=EngineReader(tmp_path), no_dist=True)
    assert same(into, state(2))
    alone.close()


def test_tensors_that_our_own_save_wrote_are_read_by_name(ckpt: Checkpointer, lab: Lab) -> None:
    torch.manual_seed(4)
    model = torch.nn.Linear(4, 3)
    assert ckpt.save({"model": model, "step": 60}, 60).durable.wait(20)
    other = torch.nn.Linear(4, 3)
    into = {"model": other.state_dict()}
    dcp.load(into, storage_reader=EngineReader(lab.directory, 60), no_dist=True)
    assert torch.equal(into["model"]["weight"], model.weight)


class Refusing:
    """A checkpointer whose saves come to nothing."""

    def save(self, state: dict[str, Any], step: int) -> Any:
        from ckpt_engine.ticket import Ticket

        return Ticket.refused(step, "the disk is on fire")


@pytest.mark.parametrize("wait", ["durable", "sealed"])
def test_a_save_that_is_not_reached_fails_and_says_why(tmp_path: Path, wait: Any) -> None:
    writer = EngineWriter(Refusing(), 1, tmp_path, wait=wait, wait_seconds_max=0.1)
    with pytest.raises((CheckpointError, dcp.CheckpointException), match="the disk is on fire"):
        dcp.save(state(1), storage_writer=writer, no_dist=True)


def test_a_damaged_shard_is_not_loaded(ckpt: Checkpointer, lab: Lab) -> None:
    save(ckpt, lab, 10, 1)
    path = next(step_folder(lab.directory, 10).glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    into = state(9)
    with pytest.raises((CheckpointDamaged, dcp.CheckpointException), match="do not match their checksum"):
        dcp.load(into, storage_reader=EngineReader(lab.directory, 10), no_dist=True)
    for reader in (EngineReader(lab.directory, 11), EngineReader(lab.directory / "none")):
        with pytest.raises((CheckpointNotFound, dcp.CheckpointException), match="complete"):
            dcp.load(state(9), storage_reader=reader, no_dist=True)


def test_a_step_is_exported_for_tools_that_read_only_dcp(ckpt: Checkpointer, lab: Lab, tmp_path: Path) -> None:
    torch.manual_seed(4)
    weights = torch.randn(6, 2)
    assert ckpt.save({"w": weights, "deep": {"b": torch.ones(3).half()}}, 70).durable.wait(20)
    assert export_dcp(lab.directory, None, tmp_path / "out") == 2
    into = {"w": torch.zeros(6, 2), "deep.b": torch.zeros(3).half()}
    dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(into["w"], weights)
    with pytest.raises(FileExistsError, match="is there already"):
        export_dcp(lab.directory, None, tmp_path / "out")


def test_a_rank_gets_the_pair_under_our_private_names(tmp_path: Path) -> None:
    """A user's own folder `ckpt_engine` is not ours, and a tensor's block is the same class to both halves."""
    (tmp_path / "ckpt_engine").mkdir()
    (tmp_path / "ckpt_engine" / "__init__.py").write_text("raise RuntimeError('the user\\'s own')")
    program = (
        "import sys, torch, transom\n"
        "from torch.distributed import checkpoint as dcp\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "ckpt = transom.Checkpointer(None, 'ck', job='job')\n"
        "ckpt.save({'w': transom.Shard(torch.ones(2), (4,), (1,))}, 1)\n"
        "into = {'w': transom.Shard(torch.zeros(2), (4,), (1,))}\n"
        "assert ckpt.load(into).step == 1 and into['w'].tensor.tolist() == [1, 1]\n"
        "state = {'a': torch.arange(3)}\n"
        "dcp.save(state, storage_writer=transom.EngineWriter(ckpt, 2, 'ck'), no_dist=True)\n"
        "state = {'a': torch.zeros(3, dtype=torch.int64)}\n"
        "dcp.load(state, storage_reader=transom.EngineReader('ck', 2), no_dist=True)\n"
        "assert state['a'].tolist() == [0, 1, 2]\n"
        "sys.exit('ckpt_engine' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120, env=environment)
