"""The backend for schedulers, step by step: the right rung, once, whatever fails between two steps.

The scheduler and the ranks are simulated; sockets, proofs and everything between them are real.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from ingest.clock import SystemClock
from recovery.backend import (
    Ambiguous,
    Conflict,
    Observation,
    Rejected,
    StartRequest,
    TooFewNodes,
    Unavailable,
)
from recovery.backends.scheduled import LAUNCHERS_SECONDS_MAX, ScheduledBackend
from recovery.backends.simulated_allocation import SimulatedAllocation
from recovery.launcher.protocol import JobSpec
from tests.simulated_launchers import SimulatedLauncher, key

JOB = "job"
NODES = ("n1", "n2", "n3", "n4", "n5")


class Killed(BaseException):
    """The controller dies here."""


class SteppedClock(SystemClock):
    """The host's clock, which a test can set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.01))
        self.ahead += seconds


class Cluster:
    """A job of two nodes and one spare on a scheduler of five nodes, with launchers that come up when told to."""

    def __init__(self) -> None:
        self.clock = SteppedClock()
        self.scheduler = SimulatedAllocation(NODES, self.clock)
        self.records = self.scheduler.register(JobSpec(job=JOB, script="x", nodes=2, nproc_per_node=2, backend="s"))
        self.launchers: dict[str, SimulatedLauncher] = {}
        self.every: list[SimulatedLauncher] = []
        self.slow: set[str] = set()  # nodes whose launchers come up later
        self.scheduler.on_nodes = lambda job, generation, nodes: [self.up(node) for node in nodes]
        self.scheduler.on_back = lambda job, generation, nodes: [self.lose(node) for node in nodes]
        self.scheduler.lives = lambda job, node: node in self.launchers
        self.backend = self.anew()
        self.backend.submit(JOB, nodes=3, command=("x",))

    def anew(self) -> ScheduledBackend:
        """The backend of a controller that was started just now."""
        return ScheduledBackend(self.scheduler, lambda job: key(), self.clock, random.Random(1))

    def up(self, node: str) -> None:
        if node in self.slow:
            return
        launcher = SimulatedLauncher(node)
        self.every.append(launcher)
        self.launchers[node] = launcher
        self.scheduler.tell(JOB, launcher.where)

    def lose(self, node: str) -> None:
        launcher = self.launchers.pop(node, None)
        if launcher is not None:
            launcher.kill()

    def start(self, attempt: int, *excluded: str, token: str = "", resume_step: int | None = None) -> Observation:
        token = token or f"token-{attempt}"
        return self.backend.start(StartRequest(JOB, attempt, token, tuple(excluded), resume_step))

    def started(self, attempt: int) -> list[str]:
        """The nodes on which an attempt's start took effect, once for each time it did."""
        return sorted(launcher.node for launcher in self.every for number in launcher.starts if number == attempt)

    def stop(self, attempt: int, deadline_seconds: float = 5.0) -> bool:
        return self.backend.stop(JOB, attempt, grace_seconds=0.0, deadline_seconds=deadline_seconds)

    def close(self) -> None:
        for node in list(self.launchers):
            self.lose(node)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def placed(seen: Observation) -> list[str]:
    return list(dict.fromkeys(rank.node for rank in seen.ranks))


def test_the_first_rung_is_enough_where_enough_nodes_answer(cluster: Cluster) -> None:
    assert placed(cluster.start(1)) == ["n1", "n2"]
    assert cluster.stop(1)
    seen = cluster.start(2, "n2")
    assert (seen.phase, placed(seen)) == ("running", ["n1", "n3"])
    assert cluster.scheduler.replaced == []


def test_ranks_meet_where_group_rank_0_is_reached(cluster: Cluster) -> None:
    cluster.launchers["n1"].host = "n1.fast.example"
    cluster.start(1, resume_step=7)
    placement = cluster.records.placement()
    assert placement is not None
    for node in ("n1", "n2"):
        order = cluster.launchers[node].order
        assert order is not None
        assert (order.master_addr, order.master_port, order.resume_step) == (
            "n1.fast.example", placement.master_port, 7,
        )  # fmt: skip


def test_where_too_few_are_left_the_scheduler_gives_others_and_the_start_goes_on(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.stop(1)
    cluster.slow = {"n3", "n4"}
    seen = cluster.start(2, "n1", "n2")
    assert (seen.attempt, seen.token, seen.phase, seen.ranks) == (2, "token-2", "starting", ())
    assert cluster.backend.observe(JOB).phase == "starting"
    assert cluster.start(2, "n1", "n2").phase == "starting"
    assert "1 of 3 launchers answer" in cluster.start(2, "n1", "n2").note
    cluster.slow = set()
    cluster.up("n3")
    cluster.up("n4")
    seen = cluster.start(2, "n1", "n2")
    assert (seen.phase, len(seen.ranks)) == ("running", 4)
    assert set(placed(seen)) <= {"n3", "n4", "n5"}
    assert cluster.scheduler.replaced == [(JOB, 2, "token-2")]
    assert cluster.start(2, "n1", "n2").phase == "running"
    assert len(cluster.started(2)) == 2
    assert cluster.records.excluded() == {"n1", "n2"}


def test_before_a_jobs_nodes_go_what_only_their_memory_holds_is_saved_once(cluster: Cluster) -> None:
    cluster.start(1)
    saved: list[tuple[str, int]] = []
    cluster.backend.before_nodes_go = lambda job: saved.append((job, len(cluster.scheduler.replaced)))
    cluster.stop(1)
    cluster.start(2, "n2")
    assert saved == [], "nothing goes in the first rung"
    cluster.stop(2)
    cluster.slow = {"n4", "n5"}
    cluster.start(3, "n1", "n2")
    cluster.start(3, "n1", "n2")
    assert saved == [(JOB, 0)], "and before the scheduler is asked"


def test_a_scheduler_that_takes_its_time_is_waited_for_and_says_why(cluster: Cluster) -> None:
    cluster.scheduler._pending_seconds = 60.0
    cluster.start(1)
    cluster.stop(1)
    seen = cluster.start(2, "n1", "n2")
    assert (seen.phase, seen.note) == ("starting", "Resources")
    cluster.clock.ahead += 61.0
    assert cluster.start(2, "n1", "n2").phase == "running"


CRASHES: list[tuple[str, bool]] = [
    ("look", False), ("records", False), ("replace", False), ("replace", True), ("launchers", False),
]  # fmt: skip


@pytest.mark.parametrize(("method", "after"), CRASHES, ids=lambda value: str(value))
@pytest.mark.parametrize("excluded", [("n2",), ("n1", "n2")], ids=["first-rung", "second-rung"])
def test_killed_anywhere_in_a_start_there_is_one_set_of_ranks(
    cluster: Cluster, method: Any, after: bool, excluded: tuple[str, ...]
) -> None:
    cluster.start(1)
    cluster.stop(1)
    cluster.scheduler.fail_next(method, Killed(), after_effect=after)
    for _ in range(4):
        try:
            cluster.start(2, *excluded)
        except Killed:
            cluster.backend = cluster.anew()
    assert cluster.backend.observe(JOB).phase == "running"
    assert len(cluster.started(2)) == 2
    assert len(cluster.scheduler.replaced) == (len(excluded) == 2)


def test_killed_between_the_placement_and_the_launchers_the_same_nodes_are_told(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.stop(1)
    write = cluster.records.write_placement

    def write_and_die(placement: Any) -> None:
        write(placement)
        raise Killed

    cluster.records.write_placement = write_and_die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        cluster.start(2, "n1")
    cluster.records.write_placement = write  # type: ignore[method-assign]
    cluster.backend = cluster.anew()
    seen = cluster.backend.observe(JOB)
    assert (seen.attempt, seen.token, seen.phase) == (2, "token-2", "starting")
    assert placed(cluster.start(2, "n1")) == ["n3", "n2"]
    assert cluster.started(2) == ["n2", "n3"]


def test_an_answer_that_is_lost_after_its_effect_is_observed_and_not_repeated(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.stop(1)
    cluster.scheduler.fail_next("replace", Ambiguous("no answer"), after_effect=True)
    with pytest.raises(Ambiguous):
        cluster.start(2, "n1", "n2")
    cluster.start(2, "n1", "n2")
    assert cluster.scheduler.replaced == [(JOB, 2, "token-2")]
    assert len(cluster.started(2)) == 2


def test_two_controllers_with_one_attempt_get_one_placement(cluster: Cluster) -> None:
    other = cluster.anew()
    cluster.start(1)
    cluster.stop(1)
    cluster.start(2, token="mine")
    with pytest.raises(Conflict):
        other.start(StartRequest(JOB, 2, "theirs"))
    assert cluster.backend.observe(JOB).token == "mine"
    assert len(cluster.started(2)) == 2


def test_an_older_attempt_than_the_one_on_the_allocation_is_a_conflict(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.stop(1)
    cluster.slow = set(NODES)
    cluster.start(5, "n1", "n2")
    with pytest.raises(Conflict):
        cluster.start(4)
    assert cluster.backend.observe(JOB).attempt == 5


def test_while_the_scheduler_is_away_launchers_tell_and_obey(cluster: Cluster) -> None:
    cluster.start(1)
    for method in ("look", "look", "records"):
        cluster.scheduler.fail_next(method, Unavailable("the scheduler is away"))  # type: ignore[arg-type]
    seen = cluster.backend.observe(JOB)  # without its view
    assert (seen.phase, len(seen.ranks)) == ("running", 4)
    seen = cluster.backend.observe(JOB)  # without its records too: as they were read last
    assert (seen.phase, len(seen.ranks)) == ("running", 4)
    assert "away" in seen.note
    assert cluster.stop(1)
    cluster.scheduler.fail_next("look", Unavailable("the scheduler is away"))
    assert cluster.start(2, "n2").phase == "running"


def test_where_neither_scheduler_nor_launchers_answer_nothing_is_concluded(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.backend.observe(JOB)
    for node in ("n1", "n2", "n3"):
        cluster.launchers[node].kill()
    cluster.scheduler.fail_next("look", Unavailable("the scheduler is away"))
    cluster.scheduler.fail_next("records", Unavailable("the scheduler is away"))
    with pytest.raises(Unavailable, match="away"):
        cluster.backend.observe(JOB)
    cluster.launchers.clear()


def test_a_node_that_cannot_be_asked_is_lost_and_its_ranks_may_live_until_the_scheduler_vouches(
    cluster: Cluster,
) -> None:
    cluster.start(1)
    cluster.launchers["n2"].kill()  # the scheduler does not know yet
    seen = cluster.backend.observe(JOB)
    assert {node.name: node.state for node in seen.nodes}["n2"] == "lost"
    assert {rank.state for rank in seen.ranks if rank.node == "n2"} == {"running"}
    assert not cluster.stop(1, deadline_seconds=1.0)
    with pytest.raises(Unavailable, match="n2"):
        cluster.start(2, "n2")
    assert cluster.started(2) == []
    cluster.launchers.pop("n2")  # now it does
    assert {rank.state for rank in cluster.backend.observe(JOB).ranks} == {"exited"}
    assert cluster.stop(1)
    assert placed(cluster.start(2, "n2")) == ["n1", "n3"]


def test_a_node_that_the_scheduler_has_given_up_is_excluded_before_it_counts_as_gone(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.launchers["n2"].kill()
    cluster.scheduler.take_down("n2")
    assert cluster.records.excluded() == frozenset()
    assert cluster.stop(1)
    assert cluster.records.excluded() == {"n2"}
    assert placed(cluster.start(2)) == ["n1", "n3"]
    cluster.launchers.pop("n2")


def test_launchers_that_come_up_after_an_operators_requeue_are_waited_for_a_while(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.slow = {"n2", "n3"}
    cluster.scheduler.requeue(JOB)
    seen = cluster.backend.observe(JOB)
    assert (seen.phase, seen.attempt) == ("failed", 1)
    with pytest.raises(Unavailable, match="come up on n2, n3"):
        cluster.start(2)
    cluster.clock.ahead += LAUNCHERS_SECONDS_MAX + 1.0
    cluster.slow = set()
    assert cluster.start(2).phase == "starting"
    assert cluster.start(2).phase == "running"


def test_what_an_operator_holds_is_not_started(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.stop(1)
    cluster.scheduler.hold(JOB, "JobHeldAdmin")
    assert cluster.backend.observe(JOB).held == "JobHeldAdmin"
    with pytest.raises(Unavailable, match="JobHeldAdmin"):
        cluster.start(2)
    cluster.scheduler.hold(JOB, "")
    assert cluster.start(2).phase == "running"


def test_too_few_nodes_in_the_whole_cluster_is_said_and_a_smaller_attempt_can_run(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.stop(1)
    with pytest.raises(TooFewNodes) as caught:
        cluster.start(2, "n1", "n2", "n3", "n4")
    assert caught.value.usable == 1
    seen = cluster.backend.start(StartRequest(JOB, 2, "token-2", ("n1", "n2"), nodes=1))
    assert (seen.phase, len(seen.ranks)) == ("running", 2)


def test_an_end_is_written_launchers_go_and_the_nodes_go_back(cluster: Cluster) -> None:
    cluster.start(1)
    launchers = dict(cluster.launchers)
    cluster.backend.finish(JOB, "failed", "user error")
    assert all(launcher.finished for launcher in launchers.values())
    assert cluster.scheduler.look(JOB).phase == "ended"
    assert cluster.backend.observe(JOB).phase == "failed"
    cluster.backend.finish(JOB, "finished", "no")
    end = cluster.backend.end(JOB)
    assert end is not None
    assert (end.outcome, end.reason) == ("failed", "user error")
    with pytest.raises(Rejected, match="terminal stays terminal"):
        cluster.start(2)


def test_stacks_come_from_every_node(cluster: Cluster) -> None:
    cluster.start(1)
    assert sorted(cluster.backend.collect_evidence(JOB, 1, deadline_seconds=1.0)) == [0, 1, 2, 3]


def test_released_nodes_may_be_used_again(cluster: Cluster) -> None:
    cluster.start(1)
    cluster.stop(1)
    cluster.start(2, "n1")
    cluster.stop(2)
    seen = cluster.backend.start(StartRequest(JOB, 3, "token-3", ("n2",), released_nodes=("n1",)))
    assert "n1" in placed(seen)
    assert cluster.records.excluded() == {"n2"}
