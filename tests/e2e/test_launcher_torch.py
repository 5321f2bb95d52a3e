"""A real torch job: forked from a zygote that has imported torch, killed with it, and started again from another."""

from __future__ import annotations

import os
import signal

from ingest.events import RankExited
from recovery.backend import StartRequest
from tests.launcher_lab import JOB, lab_in_short_folder, wait_for

TRAIN = """
import os, sys, time
started = time.perf_counter()
assert "torch._dynamo" in sys.modules, "imported before the fork"
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.full((4,), float(index))

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for batch in DataLoader(Numbers(), batch_size=4, num_workers=1):
        model(batch).sum().backward()
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    print("total", total.item(), flush=True)
    if os.environ["TRANSOM_ATTEMPT"] == "1":
        time.sleep(600)
    dist.destroy_process_group()
"""


def test_a_torch_job_dies_with_its_zygote_and_starts_again_from_another() -> None:
    with lab_in_short_folder(nodes=1, per_node=2) as lab:
        lab.launch(lab.script(TRAIN), preload_torch=True)
        lab.backend.start(StartRequest(JOB, 1, "one"))
        wait_for(lambda: lab.lines().count("total 3.0") == 2, "both ranks have reduced", 120)
        zygote = lab.node_file().zygote
        os.kill(zygote.pid, signal.SIGKILL)
        wait_for(lambda: lab.backend.observe(JOB).phase == "failed" and not lab.pids(), "both are gone")
        assert lab.backend.stop(JOB, 1, grace_seconds=1, deadline_seconds=10)
        lab.backend.start(StartRequest(JOB, 2, "two"))
        wait_for(lambda: lab.backend.observe(JOB).phase == "finished", lab.shown(), 120)
        assert lab.lines().count("total 3.0") == 4
        exits = [message for message in lab.messages(RankExited) if message.attempt == 2]
        assert {exit.exit_code for exit in exits} == {0}
