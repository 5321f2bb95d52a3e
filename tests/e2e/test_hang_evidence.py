"""Real ranks that hang: one sleeps in its data loader, the others wait for it in a real collective."""

from __future__ import annotations

from detectors.silence.stack_groups import groups_of, odd_of, stand_of
from ingest.events import DeviceMetrics, RankStacks
from recovery.backend import StartRequest
from tests.launcher_lab import JOB, lab_in_short_folder, wait_for

TRAIN = """
import os, time
import torch, torch.distributed as dist
from pathlib import Path

def load_batch():
    Path(os.environ["HANGS_IN"], "sleeping").touch()
    time.sleep(600)

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("together", flush=True)
if dist.get_rank() == 2:
    load_batch()
dist.all_reduce(total)
"""


def test_the_rank_that_sleeps_in_its_loader_is_told_from_three_that_wait_for_it_in_a_collective() -> None:
    with lab_in_short_folder(nodes=1, per_node=4) as lab:
        script = lab.script(TRAIN)
        lab.launch(script, preload_torch=True, env={"HANGS_IN": str(lab.folder), "OMP_NUM_THREADS": "1"})
        lab.backend.start(StartRequest(JOB, 1, "one"))
        wait_for((lab.folder / "sleeping").exists, lab.shown(), 120)

        def groups() -> list[tuple[str, tuple[int, ...]]]:
            lab.backend.collect_evidence(JOB, 1, deadline_seconds=10)
            newest = {message.rank: message for message in lab.messages(RankStacks)}
            stands = [stand_of(rank, "node0", told.stacks, in_collective=False) for rank, told in newest.items()]
            found = groups_of(stands)
            waiting = found[0].kind == "collective" and len(found[0].ranks) == 3
            return [(group.place, group.ranks) for group in found] if waiting else []

        assert wait_for(groups, "three ranks wait") == [("all_reduce", (0, 1, 3)), ("train.py:load_batch", (2,))]
        told = {message.rank: message for message in lab.messages(RankStacks)}
        assert {message.state for message in told.values()} <= {"S", "R"}
        assert all(message.attempt == 1 for message in told.values())
        stands = [stand_of(rank, "node0", message.stacks, in_collective=False) for rank, message in told.items()]
        pointing = odd_of(groups_of(stands))
        assert pointing.ranks == (2,)
        assert pointing.reason == "stands in train.py:load_batch, 3 others in all_reduce"

        def all_measured() -> bool:
            measured = {(message.rank, message.device) for message in lab.messages(DeviceMetrics)}
            return measured >= {(0, "process"), (3, "process"), (-1, "host")}

        wait_for(all_measured, "every process and the host are measured")
