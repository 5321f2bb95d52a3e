"""The demo's six faults as constants: when, who, how bad, what was printed, what was done."""

from __future__ import annotations

JOB = "gpt-small"
WORLD = 4
STEP_SECONDS = 0.25
METRIC_NAMES = (
    "train.step.duration", "train.data.duration", "train.collective.wait", "train.compute.duration",
    "train.compute.own",
    "train.compute.cpu", "train.gradient.local_norm", "train.loss",
)  # fmt: skip
FAULTS = ("straggler", "rank_lost", "hang", "nan", "gpu_lost", "user_error")
# offset of the onset, seconds to the verdict, seconds from the verdict to the next attempt's first step (0: none)
TIMING = {
    "straggler": (40.0, 4.2, 0.0),
    "rank_lost": (80.0, 0.4, 2.9),
    "hang": (115.0, 3.1, 3.6),
    "nan": (150.0, 0.8, 3.2),
    "gpu_lost": (185.0, 0.5, 4.4),
    "user_error": (220.0, 0.3, 0.0),
}
CULPRIT = {
    "straggler": (1, "node-0"),
    "rank_lost": (2, "node-1"),
    "hang": (3, "node-1"),
    "nan": (0, "node-0"),
    "gpu_lost": (None, "node-1"),
    "user_error": (1, "node-0"),
}
SEVERITY = {
    "straggler": "warning",
    "rank_lost": "error",
    "hang": "critical",
    "nan": "error",
    "gpu_lost": "critical",
    "user_error": "error",
}
VERB = {
    "straggler": "notify",
    "rank_lost": "restart",
    "hang": "restart",
    "nan": "restart",
    "gpu_lost": "exclude_and_restart",
    "user_error": "stop",
}
ADVICE = {
    "straggler": "notify",
    "rank_lost": "restart_in_place",
    "hang": "restart_in_place",
    "nan": "rollback_restart",
    "gpu_lost": "restart_exclude_node",
    "user_error": "stop",
}
RULE = {
    "straggler": "straggler: notify only; the job goes on at 62 % of its speed",
    "rank_lost": "rank_lost, settled, 1 of 20 restarts used: restart in place from the newest complete step",
    "hang": "hang, corroborated by 3 waiting peers and process state T: stop after evidence, restart in place",
    "nan": "nan first seen at a step: reject checkpoints from there, restart from the newest complete one before",
    "gpu_lost": "gpu_lost names a node, a spare is free: exclude node-1, restart with node-2",
    "user_error": "user_error is not restarted: the same code would fail again",
}
STRAGGLER_SECONDS = 16.0
LINES = {
    "rank_lost": ("rank 2 exited: signal 9 (SIGKILL), not stopped by the launcher",),
    "hang": (
        "[rank3] Watchdog: collective ALLREDUCE seq 912 has been pending for 2000 ms",
        "Thread 0x7f2a (most recent call first):\n  File \"torch/nn/parallel/distributed.py\", line 1661 in forward",
    ),
    "nan": ("UserWarning: loss is nan, gradient norm is nan",),
    "gpu_lost": (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=4141, GPU has fallen off the bus.",
    ),
    "user_error": (
        "Traceback (most recent call last):\n  File \"train.py\", line 118, in <module>\n    batch = augment(batch)\n"
        "  File \"train.py\", line 61, in augment\n    return batch[:, self.offsets]\n"
        "IndexError: index 4096 is out of bounds for dimension 1 with size 4096",
    ),
}  # fmt: skip
SUMMARY = {
    "straggler": "Rank 1 on node-0 computes 1.62 times as long as its peers; they wait for it in every all-reduce.",
    "rank_lost": "Rank 2 on node-1 was killed by signal 9 after step {step}; the other three ranks waited for it.",
    "hang": "Rank 3 on node-1 is stopped (state T) in step {next}; its three peers are frozen in the all-reduce.",
    "nan": "The loss of rank 0 became NaN at step {step}; checkpoints of step {step} and later are bad.",
    "gpu_lost": "node-1 lost a GPU (Xid 79, fallen off the bus) after step {step}.",
    "user_error": "The training script raised IndexError on rank 1 after step {step}: index 4096 is out of bounds.",
}
OUTCOME = {
    "straggler": "Notified; the rank is as fast as its peers again.",
    "rank_lost": "Attempt 2 runs from step {step}, loaded from memory.",
    "hang": "Attempt 3 runs from step {step}, loaded from memory.",
    "nan": "Attempt 4 runs from step {step}, loaded from memory.",
    "gpu_lost": "Attempt 5 runs on node-0 and node-2 from step {step}.",
    "user_error": "The job is stopped and will not be restarted.",
}
