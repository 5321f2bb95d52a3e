"""How the console says things: severities, classes, states, times and durations in words."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

SEVERITIES = ("critical", "error", "warning", "info")
# A shape of its own for each severity: the meaning survives without colour.
SEVERITY_MARKS = {"critical": "■", "error": "◆", "warning": "▲", "info": "●"}
SEVERITY_MEANINGS = {
    "critical": "the job cannot go on",
    "error": "the job is failing or its result is wrong",
    "warning": "the job goes on, slower or at risk",
    "info": "worth knowing",
}
CLASS_WORDS = {
    "straggler": "Straggler",
    "rank_lost": "Rank lost",
    "node_lost": "Node lost",
    "hang": "Hang",
    "nan": "NaN loss",
    "numeric": "Numeric trouble",
    "gpu_lost": "GPU lost",
    "gpu_ecc": "GPU memory error",
    "nvlink_error": "NVLink error",
    "network_error": "Network error",
    "cuda_error": "CUDA error",
    "illegal_memory_access": "Illegal memory access",
    "oom": "Out of GPU memory",
    "host_oom": "Out of host memory",
    "storage_error": "Storage error",
    "disk_full": "Disk full",
    "data_stall": "Data stall",
    "contended_node": "Contended node",
    "job_slow": "Whole job slow",
    "start_failure": "Start failed",
    "preempted": "Preempted",
    "planned": "Planned restart",
    "user_error": "User error",
    "collective_timeout": "Collective time-out",
    "loss_spike": "Loss spike",
    "divergence": "Divergence",
    "regime_change": "Regime change",
    "memory_growth": "Memory growth",
    "throttled": "Throttled",
    "link_degraded": "Link degraded",
    "checkpoint_failed": "Checkpoint failed",
    "telemetry_gap": "Telemetry gap",
    "warning": "Warning",
    "unknown": "Unknown cause",
}
VERB_WORDS = {
    "notify": "notified",
    "restart": "restarted in place",
    "exclude_and_restart": "node excluded, restarted",
    "stop": "job stopped",
    "hold": "job held",
    "ignore": "no action",
}
OUTCOME_WORDS = {
    "done": "done",
    "failed": "failed",
    "ambiguous": "not known yet",
    "awaiting_approval": "waits for approval",
    "observed": "observed only",
}
JOB_STATE_MARKS = {"running": "▶", "finished": "✓", "failed": "✕", "stopped": "■", "lost": "?"}
METRIC_WORDS = {
    "train.step.duration": "Step time",
    "train.data.duration": "Data wait",
    "train.forward.duration": "Forward",
    "train.backward.duration": "Backward",
    "train.optimizer.duration": "Optimizer",
    "train.collective.wait": "Collective wait",
    "train.compute.duration": "Compute",
    "train.compute.own": "Own compute",
    "train.compute.cpu": "CPU time in compute",
    "train.run_queue.delay": "Run-queue delay",
    "train.gradient.local_norm": "Local gradient norm",
    "train.loss": "Loss",
}
METRICS = tuple(METRIC_WORDS)
CULPRITS_SHOWN_MAX = 4


def severity_words(severity: str) -> str:
    """The severity with its own shape, so that colour is never needed."""
    return f"{SEVERITY_MARKS.get(severity, '○')} {severity}"


def class_words(fault_class: str) -> str:
    return CLASS_WORDS.get(fault_class, fault_class.replace("_", " ").capitalize())


def metric_words(metric: str) -> str:
    return METRIC_WORDS.get(metric, metric)


def metric_unit(metric: str) -> str:
    """The unit of one of our own metrics; empty where it has none or is the user's."""
    return "s" if metric.endswith((".duration", ".wait", ".own", ".cpu", ".delay")) else ""


def state_words(state: str | None, status: str) -> str:
    """The incident's state in words; detection's status where recovery has not spoken yet."""
    return (state or status).replace("_", " ")


def seconds_words(seconds: float | None) -> str:
    """A duration with two significant parts: 0.42 s, 3.1 s, 2 min 05 s, 3 h 10 min, 2 d 4 h."""
    if seconds is None:
        return "–"
    if seconds < 0:
        return "−" + seconds_words(-seconds)
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"


def age_words(at: float | None, now: float) -> str:
    """How long ago; a clock that runs ahead of ours is not news."""
    if at is None:
        return "–"
    seconds = max(0.0, now - at)
    return "now" if seconds < 1.0 else f"{seconds_words(float(int(seconds)))} ago"


def local_zone(name: str | None) -> tzinfo | None:
    """The reader's zone by the browser's name for it; None where it is UTC or not known here."""
    if not name or name in {"UTC", "Etc/UTC", "Etc/GMT", "GMT"}:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        return None


def clock_words(at: float | None, zone: tzinfo | None, *, day: bool = False) -> str:
    """UTC first, the reader's own time after it: 14:02:11 UTC · 15:02:11 local."""
    if at is None:
        return "–"
    moment = datetime.fromtimestamp(at, UTC)
    shape = "%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S"
    text = f"{moment:{shape}} UTC"
    return text if zone is None else f"{text} · {moment.astimezone(zone):%H:%M:%S} local"


def precise_clock(at: float) -> str:
    """UTC to the tenth of a second: 14:02:11.4."""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S}.{int(at * 10) % 10}"


def culprit_words(culprits: tuple[tuple[int | None, str | None], ...]) -> str:
    """Who did it, short: 'rank 2 on node-1', 'node-1', 'unknown'."""
    if not culprits:
        return "unknown"
    shown = [_one_culprit(rank, node) for rank, node in culprits[:CULPRITS_SHOWN_MAX]]
    rest = len(culprits) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _one_culprit(rank: int | None, node: str | None) -> str:
    if rank is None:
        return node or "unknown"
    return f"rank {rank}" + (f" on {node}" if node else "")


def number_words(value: float | None, unit: str = "") -> str:
    """Four significant digits with the unit, never in exponents where a person can avoid them."""
    if value is None:
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{text} {unit}".rstrip()
