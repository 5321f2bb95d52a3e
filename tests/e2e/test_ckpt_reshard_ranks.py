"""Real process groups: what four ranks saved, two load, save, and three load; every bit as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.ckpt_lab import ROOT, EngineProcess

PROGRAM = """
import os, sys
import torch, torch._dynamo, torch.distributed as dist  # DTensor brings _dynamo in: here, once for all children
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard as Along, distribute_tensor
from ckpt_engine.blocks import Shard
from ckpt_engine.client import Checkpointer

folder, socket, tier = sys.argv[1], sys.argv[2] or None, sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(7)
ROWS, COLUMNS, BIAS, FLAT = torch.randn(10, 6), torch.randn(3, 9).bfloat16(), torch.randn(7), torch.arange(1001)

def state_of(mesh, rank, world, values):
    rows, columns, bias, flat = values
    edges = [part * 1001 // world for part in range(world + 1)]
    return {
        "rows": distribute_tensor(rows, mesh, [Along(0)]),
        "columns": distribute_tensor(columns, mesh, [Along(1)]),
        "bias": distribute_tensor(bias, mesh, [Replicate()]),
        "flat": Shard(flat[edges[rank] : edges[rank + 1]].clone(), (1001,), (edges[rank],)),
        "plain": torch.full((3,), 2.5),
        "step": 0,
    }

def work(rank, world, attempt, load):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{attempt}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    directory = None if socket else f"{folder}/ck"
    ckpt = Checkpointer(socket, directory, job="job", attempt=attempt, rank=rank, world_size=world, node="n0")
    values = (ROWS, COLUMNS, BIAS, FLAT)
    if not load:
        state = state_of(mesh, rank, world, values)
        state["step"] = 10
    else:
        state = state_of(mesh, rank, world, [torch.zeros_like(value) for value in values])
        state["plain"].zero_()
        report = ckpt.load(state)
        assert report is not None and (report.step, report.tier) == (10 * (attempt - 1), tier), report
        assert state["step"] == report.step
        assert torch.equal(state["plain"], torch.full((3,), 2.5))
        for name, value in zip(("rows", "columns", "bias"), values):
            assert torch.equal(state[name].full_tensor(), value), name
        begin = state["flat"].offset[0]
        assert torch.equal(state["flat"].tensor, FLAT[begin : begin + len(state["flat"].tensor)])
        state["step"] += 10
    ticket = ckpt.save(state, state["step"])
    assert ticket.durable.wait(120), ticket.failed
    dist.barrier()
    dist.destroy_process_group()

for attempt, world in ((1, 4), (2, 2), (3, 3)):
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                work(rank, world, attempt, attempt > 1)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"attempt {attempt} of {world} ranks ended with {codes}")
print("as it was")
"""


def run(folder: Path, socket: str, tier: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), socket, tier],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as it was" in done.stdout


def test_four_ranks_save_two_go_on_and_then_three(tmp_path: Path) -> None:
    run(tmp_path, "", "disk")


def test_they_go_on_from_what_memory_holds(tmp_path: Path) -> None:
    with EngineProcess(tmp_path) as engine:
        run(tmp_path, str(engine.socket), "memory")
        assert engine.end(15) == 0
