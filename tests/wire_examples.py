"""One message of every type, all fields set: what the golden files and the codec's tests are made of."""

from detectors.verdict import Culprit, Evidence, Verdict
from ingest.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointEvent,
    DeviceMetrics,
    ErrorRecord,
    FaultInjected,
    LogLine,
    Logs,
    Metrics,
    NodeHeartbeat,
    RankExited,
    RankPlace,
    RankStacks,
    RankStalled,
    RankStarted,
    StopNotice,
    split_non_finite,
)
from recovery.action import Action, CheckResult, Command, Incident, Receipt

STAMP = {"job": "demo", "attempt": 2, "rank": 3, "node": "node-1", "sequence": 17, "at": 1_790_000_000.25}
NODE_STAMP = {**STAMP, "rank": -1}
COLUMNS, NON_FINITE = split_non_finite(
    {
        "train.loss": [float("nan"), 2.5, float("-inf")],
        "train.step.duration": [0.125, None, float("inf")],
    }
)

EXAMPLES = {
    "metrics.v1": Metrics(
        **STAMP, phase="train", step=43, steps=(40, 41, 42),
        ended_at=(1_789_999_999.5, 1_789_999_999.75, 1_790_000_000.0),
        columns=COLUMNS, non_finite=NON_FINITE, dropped=1,
    ),
    "logs.v1": Logs(
        **STAMP,
        lines=(
            LogLine(at=1_790_000_000.0, stream="stderr", text="Traceback (most recent call last):\n  …\nValueError: ü"),
            LogLine(at=1_790_000_000.125, stream="stdout", text='{"step": 42}'),
        ),
        collector="collect/logs",
    ),
    "device_metrics.v1": DeviceMetrics(
        **STAMP, device="process", sampled_at=(1_790_000_000.0, 1_790_000_001.0),
        columns={"process.memory.usage": (8.0e8, None)}, collector="collect/host",
    ),
    "attempt_started.v1": AttemptStarted(
        **NODE_STAMP, world_size=2,
        places=(RankPlace(rank=0, local_rank=0, node="node-0"), RankPlace(rank=1, local_rank=0, node="node-1")),
        spares=("node-2",), resume_step=40, restarts_by="torchrun",
    ),
    "rank_started.v1": RankStarted(
        **STAMP, pid=4711, local_rank=1, gpu_uuid="GPU-5f4e", pci_address="0000:3b:00.0",
        scheduler_ids={"SLURM_JOB_ID": "12"}, role="stage1",
    ),
    "rank_stalled.v1": RankStalled(**STAMP, state="T", since=1_789_999_990.0),
    "rank_stacks.v1": RankStacks(
        **STAMP, stacks='Thread 0x1 (most recent call first):\n  File "train.py", line 7 in main', state="S",
        wchan="ep_poll", collective="all_reduce", enqueued=641, completed=640,
    ),
    "rank_exited.v1": RankExited(
        **STAMP, exit_code=1, stopped_by_launcher=False,
        error=ErrorRecord(type="ValueError", text="bad batch", traceback="Traceback …"),
        last_lines=("ValueError: bad batch",),
    ),
    "attempt_ended.v1": AttemptEnded(**NODE_STAMP, outcome="failed"),
    "stop_notice.v1": StopNotice(**NODE_STAMP, reason="the launcher was told to stop", grace_seconds=30.0),
    "node_heartbeat.v1": NodeHeartbeat(**NODE_STAMP, ranks_alive=(2, 3), dropped=0),
    "checkpoint.v1": CheckpointEvent(
        **STAMP, state="sealed", step=40, tier="memory", size_bytes=1_048_576, seconds=0.0625, reason=""
    ),
    "fault_injected.v1": FaultInjected(**STAMP, fault="slow", parameters={"factor": 3.0, "seconds": 20.0}),
    "verdict.v1": Verdict(
        restarts_by="torchrun",
        verdict_id="demo/2/3/metrics/17", revision=1, job="demo", attempt=2, fault_class="nan", severity="error",
        status="open", settled=True, culprits=(Culprit(rank=3, node="node-1", confidence=0.9),), victims=1,
        onset_at=1_790_000_000.0, at=1_790_000_000.25, onset_step=40, first_bad_step=40, advice="rollback_restart",
        summary="The loss of rank 3 is NaN since step 40.",
        evidence=(
            Evidence(
                kind="metric", text="train.loss is NaN", at=1_790_000_000.0, rank=3, node="node-1", rule="",
                metric="train.loss", step=40, value=None, peers_median=2.5, unit="1", topic="metrics", partition=0,
                offset=1234,
            ),
        ),
        detector="job",
    ),
    "action.v1": Action(
        action_id="demo/2/restart", job="demo", attempt=2, at=1_790_000_001.0, verb="restart", mode="auto",
        verdict_id="demo/2/3/metrics/17", verdict_revision=1, fault_class="nan", rule="nan: roll back",
        rung="in_place", excluded_nodes=(), spared_nodes=("node-4",), next_attempt=3,
        resume_step=38, resume_tier="memory", reject_from_step=40, plan_hash="9f2c",
        checks=(CheckResult(node="node-4", check="matmul", outcome="failed", seconds=0.4, text="slow"),),
    ),
    "receipt.v1": Receipt(
        action_id="demo/2/restart", job="demo", attempt=2, at=1_790_000_002.0, outcome="done",
        text="4 ranks run attempt 3", next_attempt=3,
    ),
    "incident.v1": Incident(
        incident_id="demo/2/3/metrics/17", job="demo", attempt=2, at=1_790_000_001.0, state="acting",
        cause="a settled verdict", sequence=2,
    ),
    "command.v1": Command(
        command_id="c-1", job="demo", at=1_790_000_003.0, verb="feedback", incident_id="demo/2/3/metrics/17",
        author="ada", plan_hash="", feedback="true_positive", note="bad batch", until=None, node="",
    ),
}  # fmt: skip
