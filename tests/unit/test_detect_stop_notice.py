"""A node that is taken away on purpose: preempted, and nobody's fault, whatever its peers print afterwards."""

from ingest.events import StopNotice
from tests.synthetic_job import SyntheticJob, detect


def taken(job: SyntheticJob, *nodes: str, apart: float = 0.0) -> SyntheticJob:
    for index, node in enumerate(nodes):
        at = job.at + 0.05 + apart * index
        job.say(StopNotice(**job.stamp(-1, "events", at, node), reason="walltime", grace_seconds=30.0))
    for rank in range(job.world):
        if job.node(rank) in nodes:
            job.exits(rank, after=0.5 + 0.1 * rank, signal=15, stopped=True)
    return job


def test_the_lost_peers_of_a_node_that_leaves_blame_nobody() -> None:
    job = taken(SyntheticJob(seed=3).start().train(60), "node1")
    job.peers_fall(after=0.6)
    job.idle(8.0, "train", job.step)
    (first, *later) = detect(job.ordered())
    newest = (later or [first])[-1]
    assert (newest.fault_class, newest.settled, newest.severity) == ("preempted", True, "info")
    assert [(culprit.rank, culprit.node) for culprit in newest.culprits] == [(None, "node1")]
    assert "walltime" in newest.summary


def test_it_is_told_before_the_first_rank_has_ended() -> None:
    job = taken(SyntheticJob(seed=3).start().train(60), "node1")
    told_at = detect(job.idle(8.0, "train", job.step).ordered())[0].at
    assert told_at <= job.messages[-1].at
    assert told_at < min(one.at for one in job.messages if type(one).__name__ == "RankExited") + 0.25


def test_an_allocation_that_ends_takes_all_its_nodes_and_that_is_one_incident() -> None:
    job = taken(SyntheticJob(seed=3).start().train(60), "node0", "node1", apart=0.02)
    verdicts = detect(job.idle(8.0, "train", job.step).ordered())
    assert {one.verdict_id for one in verdicts} == {verdicts[0].verdict_id}
    assert verdicts[-1].fault_class == "preempted"
