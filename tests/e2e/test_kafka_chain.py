"""The whole chain on a real broker: the broker crashes in mid-stream, poison lies on the bus, detectors come and go."""

import os
import re
import signal
from pathlib import Path

from detectors.verdict import Verdict
from ingest.codec import MESSAGE_BYTES_MAX
from ingest.dead_letters import original
from ingest.events import JOB_TOPICS, RankExited
from ingest.partitioning import partition_of
from recovery.action import Action, Receipt
from tests.chain_lab import (
    CLOCK,
    Chain,
    ExpectedRows,
    LedgerRows,
    chain,
    culprits_of,
    sequence_faults,
    verdicts_among,
)
from tests.kafka_fixture import make_broker

JOB = "chained"
JOBS = ("left", "right")  # one for each partition
OUTAGE_SECONDS = 6.0  # longer than `node_silent_seconds`: only the bus was silent, not the nodes
METRICS = (("ce_type", b"org.transom.metrics.v1"),)
LOGS = (("ce_type", b"org.transom.logs.v1"),)
POISON = (
    ("metrics", METRICS, b"\x00\xff\xfe garbage"),
    ("logs", (), b'{"no": "headers"}'),
    ("events", (("ce_type", b"org.transom.coffee_break.v7"),), b"{}"),
    ("metrics", METRICS, b"x" * MESSAGE_BYTES_MAX),
    ("logs", LOGS, b'{"job": "chained", "attempt": 1'),
    ("events", (("ce_type", b"\xff\xff"),), b"\x80"),
)


def check_one_restart_for_each_death(lab: Chain, job: str, deaths: list[int]) -> None:
    """Attempt n of the job ended by the death of rank deaths[n - 1], and by nothing else."""
    killed = [
        (exit.attempt, exit.rank)
        for exit in lab.said(RankExited, job)
        if exit.signal == signal.SIGKILL and not exit.stopped_by_launcher
    ]
    assert killed == list(enumerate(deaths, 1))
    # By id: what recovery could not get acknowledged it tells again.
    restarts = {action.action_id: action for action in lab.said(Action, job) if action.verb == "restart"}
    assert [restart.attempt for restart in restarts.values()] == [attempt for attempt, _ in killed]
    assert restarts.keys() <= {receipt.action_id for receipt in lab.said(Receipt, job) if receipt.outcome == "done"}
    attempts = {message.attempt for _, message in lab.messages if getattr(message, "job", "") == job}
    assert max(attempts) == len(deaths) + 1


def all_closed(lab: Chain) -> bool:
    """Whether every death so far is told, and told to be over."""
    lab.look()
    verdicts = verdicts_among([message for _, message in lab.messages]).values()
    lost = [verdict for verdict in verdicts if verdict.fault_class == "rank_lost"]
    return {verdict.verdict_id for verdict in lost if verdict.status == "closed"} == {
        f"{job}/{attempt}/{attempt - 1}/events/1" for job in JOBS for attempt in (1, 2)
    }


def check_ledger(lab: Chain) -> None:
    """Each message of the bus is in the ledger once."""
    kept, wanted = LedgerRows(lab.places.ledger), ExpectedRows(lab.messages)
    assert kept.story == wanted.story
    assert kept.lines == wanted.lines
    assert kept.samples == wanted.samples
    assert len(wanted.samples) > 200
    assert len(wanted.lines) > 100


def check_dead_letters(lab: Chain) -> None:
    """All poison is there as it was, with the reason and the place where it lay, and nothing else."""
    poison = {(record.topic, record.partition, record.offset): record for record in lab.unreadable
              if record.topic != "dead-letters"}  # fmt: skip
    assert sorted(record.value for record in poison.values()) == sorted(value for _, _, value in POISON)
    buried = set()
    for letter in (record for record in lab.seen if record.topic == "dead-letters"):
        notes = dict(letter.headers)
        place = (notes["dlq_topic"].decode(), int(notes["dlq_partition"]), int(notes["dlq_offset"]))
        assert original(letter) == (poison[place].headers, poison[place].value)
        assert notes["dlq_reason"]
        buried.add(place)
    assert buried == set(poison)


def test_a_broker_killed_in_mid_stream_loses_and_doubles_nothing_from_rank_to_ledger(tmp_path: Path) -> None:
    broker = make_broker(tmp_path / "broker")
    broker.start()
    try:
        with chain(tmp_path, broker.bootstrap, "chain") as lab:
            for service in ("record", "detect", "recover"):
                lab.start(service, service)
            lab.run_job(JOB, nodes=2, per_node=2)
            poisoner = lab.bus.producer()
            lab.eventually(lambda: lab.reached(JOB, 1, 20), "attempt 1 trains")
            lab.eventually(
                lambda: lab.ledger_knows(JOB), "the services are there: who starts without a broker says so and ends"
            )
            for topic, headers, value in POISON[:3]:
                poisoner.send(topic, JOB, headers, value)
            poisoner.flush(30.0)
            broker.kill()
            down_at = CLOCK.monotonic()
            for topic, headers, value in POISON[3:]:
                poisoner.send(topic, JOB, headers, value)
            lab.eventually(lambda: CLOCK.monotonic() - down_at > OUTAGE_SECONDS / 2, "half of the outage")
            os.kill(lab.pid_of(JOB, 2), signal.SIGKILL)
            lab.eventually(lambda: CLOCK.monotonic() - down_at > OUTAGE_SECONDS, "the outage")
            broker.start()
            poisoner.flush(60.0)
            poisoner.close()
            lab.eventually(lambda: lab.reached(JOB, 2, 20), "the job whose rank died in the dark is back")
            lab.end_jobs(JOB)
            lab.end("recover")
            lab.end("detect")
            lab.eventually(lab.ledger_has_all, "the ledger has all that is on the bus")
            lab.end("record")
            lab.read_to_the_end()
        check_ledger(lab)
        check_dead_letters(lab)
        told = [message for record, message in lab.messages if record.topic in JOB_TOPICS]
        assert sequence_faults(told) == {}
        verdicts = verdicts_among([message for _, message in lab.messages])
        assert culprits_of(verdicts) == {JOB: [("rank_lost", [2])]}
        check_one_restart_for_each_death(lab, JOB, [2])
    finally:
        broker.kill()


def test_detectors_that_leave_or_die_hand_their_partitions_over_and_nothing_is_lost_or_contradicted(
    tmp_path: Path, kafka_bootstrap: str, kafka_prefix: str
) -> None:
    assert {partition_of(job, 2) for job in JOBS} == {0, 1}
    with chain(tmp_path, kafka_bootstrap, kafka_prefix, state_seconds=4.0) as lab:
        for job in JOBS:
            lab.run_job(job, nodes=1, per_node=2)
        lab.start("recover", "recover")
        lab.start("first", "detect")
        lab.start("second", "detect")

        def shares(name: str) -> set[int]:
            told = re.findall(r"reads partitions \[(.*)\]", lab.log(name).read_text())[-1:]
            return {int(partition) for each in told for partition in each.split(", ")}

        def both_have_one(*names: str) -> bool:
            lab.look()
            return sorted(sorted(shares(name)) for name in names) == [[0], [1]]

        def kill_ranks(rank: int) -> None:
            for job in JOBS:
                os.kill(lab.pid_of(job, rank), signal.SIGKILL)

        for job in JOBS:
            lab.eventually(lambda job=job: lab.reached(job, 1, 40), f"attempt 1 of {job} trains")
        lab.eventually(lambda: both_have_one("first", "second"), "two detectors share the partitions")
        kill_ranks(0)
        lab.end("first")
        lab.start("third", "detect")
        for job in JOBS:
            lab.eventually(lambda job=job: lab.reached(job, 2, 40), f"attempt 2 of {job} trains")
        lab.eventually(lambda: both_have_one("second", "third"), "two detectors share the partitions again")
        (partition,) = {partition_of(job, 2) for job in JOBS} - shares("third")
        (job_of_second,) = [job for job in JOBS if partition_of(job, 2) == partition]
        kill_ranks(1)

        def told_of_second_death() -> bool:
            lab.look()
            return any(verdict.attempt == 2 for verdict in lab.said(Verdict, job_of_second))

        # Its state is older than this verdict: whoever reads from there again must say the same again.
        lab.eventually(told_of_second_death, "the second detector has told of the second death")
        lab.end("second", signal.SIGKILL)
        for job in JOBS:
            lab.eventually(lambda job=job: lab.reached(job, 3, 40), f"attempt 3 of {job} trains")
        lab.eventually(lambda: all_closed(lab) and shares("third") == {0, 1}, "the third has taken over and closed")
        lab.end_jobs(*JOBS)
        lab.end("third")
        lab.end("recover")
        lab.read_to_the_end()
    verdicts = verdicts_among([message for _, message in lab.messages])
    assert culprits_of(verdicts) == {job: [("rank_lost", [0]), ("rank_lost", [1])] for job in JOBS}
    for job in JOBS:
        check_one_restart_for_each_death(lab, job, [0, 1])
