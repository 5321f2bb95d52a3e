"""What fails together, as schedulers tell it: asked seldom, shown with each node, never waited for.

The scheduler is simulated. What Slurm prints was recorded from 22.05 with topology/tree; for blocks it is its manual's.
"""

from collections.abc import Iterator, Mapping, Sequence

import pytest

from recovery.backend import Observation, Unavailable
from recovery.backends.scheduled import GROUPS_AGAIN_SECONDS, GROUPS_SECONDS, ScheduledBackend
from recovery.backends.simulated_allocation import SimulatedAllocation
from recovery.backends.slurm_text import leaves_of
from tests.unit.test_scheduled_backend import JOB, NODES, Cluster

TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n3,n4
SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf1,leaf2
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=gpu[001-018] BlockSize=18
BlockName=b2 BlockIndex=1 Nodes=gpu[019-036] BlockSize=18
AggregatedBlock=b1,b2 BlockIndex=2 Nodes=gpu[001-036] BlockSize=36
"""


def test_slurms_lowest_switches_and_blocks_are_read_and_nothing_above_them() -> None:
    assert leaves_of(TREE) == (("leaf1", "n[1-2]"), ("leaf2", "n3,n4"))
    assert leaves_of(BLOCKS) == (("b1", "gpu[001-018]"), ("b2", "gpu[019-036]"))
    assert leaves_of("") == ()
    assert leaves_of("SwitchName=empty Level=0 LinkSpeed=1 Nodes=(null)\n") == ()


class GroupedAllocation(SimulatedAllocation):
    """The simulated scheduler with racks of two nodes."""

    asked = 0
    silent = False

    def groups(self, job: str, nodes: Sequence[str]) -> Mapping[str, str]:
        self.asked += 1
        if self.silent:
            raise Unavailable("nobody answers")
        return {node: f"rack{(NODES.index(node)) // 2}" for node in nodes if node != "n5"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("tests.unit.test_scheduled_backend.SimulatedAllocation", GroupedAllocation)
    cluster = Cluster()
    assert isinstance(cluster.backend, ScheduledBackend)
    yield cluster
    cluster.close()


def grouped(seen: Observation) -> dict[str, str]:
    return {node.name: node.group for node in seen.nodes}


def asked(cluster: Cluster) -> int:
    assert isinstance(cluster.scheduler, GroupedAllocation)
    return cluster.scheduler.asked


def test_each_node_has_its_group_and_the_scheduler_is_asked_once(cluster: Cluster) -> None:
    for _ in range(5):
        assert grouped(cluster.backend.observe(JOB)) == {"n1": "rack0", "n2": "rack0", "n3": "rack1"}
    assert asked(cluster) == 1
    cluster.clock.ahead += GROUPS_SECONDS + 1
    cluster.backend.observe(JOB)
    assert asked(cluster) == 2


def test_a_scheduler_that_does_not_tell_is_asked_again_later_and_nobody_waits(cluster: Cluster) -> None:
    assert isinstance(cluster.scheduler, GroupedAllocation)
    cluster.scheduler.silent = True
    for _ in range(5):
        assert set(grouped(cluster.backend.observe(JOB)).values()) == {""}
    assert asked(cluster) == 1
    cluster.scheduler.silent = False
    cluster.clock.ahead += GROUPS_AGAIN_SECONDS + 1
    assert grouped(cluster.backend.observe(JOB))["n1"] == "rack0"
