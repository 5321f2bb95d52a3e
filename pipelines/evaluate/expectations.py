"""Which verdict is right for which injected fault. docs/evaluation.md has the same table, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

from detectors.verdict import FaultClass
from ingest.events import FaultInjected
from pipelines.evaluate.matching import Label, Right


def _right(*classes: FaultClass, tolerated: tuple[FaultClass, ...] = ()) -> Right:
    return Right(frozenset(classes), tolerated=frozenset(tolerated))


_PACE: tuple[FaultClass, ...] = ("job_slow", "regime_change")  # when one rank is slow, all its peers' steps are longer
RIGHT: Mapping[str, Right] = {
    "slow": _right("straggler", tolerated=_PACE),
    "slow_backward": _right("straggler", tolerated=_PACE),
    "sleep": _right("straggler", tolerated=_PACE),
    # It holds one interpreter, and the core that a neighbour shares with it.
    "gil_hog": _right("straggler", tolerated=(*_PACE, "contended_node")),
    "slow_data": _right("data_stall", tolerated=_PACE),
    # Nobody's own work is slow: blaming a rank for its node's load is wrong.
    "cpu_hog": Right(frozenset(("contended_node",)), culprit="node", tolerated=frozenset(_PACE)),
    # Pages that are written cost time: its rank may be slow as well.
    "memory_hog": _right("memory_growth", tolerated=("straggler", *_PACE)),
    "stop": _right("hang"),
    "kill": _right("rank_lost"),
    "nan": _right("nan"),
    "nan_gradient": _right("nan"),
    # One wild step: the norm spikes, the loss follows or the optimizer never recovers.
    "scale_gradient": _right("loss_spike", "divergence", "nan", "numeric"),
    "raise": _right("user_error"),
    "xid": Right(frozenset(("gpu_lost",)), culprit="node"),
    # torch raises in the rank that waits for the worker: it ends with code 1, through no fault of its code.
    "kill_worker": _right("rank_lost", "host_oom"),
    # Training goes on: the disk is everybody's, and no rank is to blame.
    "disk_full": Right(
        frozenset(("checkpoint_failed", "disk_full")), culprit="any", tolerated=frozenset(("warning",))
    ),
    "drop_telemetry": Right(
        frozenset(("telemetry_gap",)), must_be_found=False, tolerated=frozenset(("warning",))
    ),
    "delay_telemetry": Right(frozenset(("telemetry_gap",)), must_be_found=False),
}  # fmt: skip
IN_STEP_TIMES = frozenset(("slow", "slow_backward", "sleep", "gil_hog", "slow_data", "cpu_hog"))
LASTING = frozenset(
    (*IN_STEP_TIMES, "memory_hog", "disk_full", "drop_telemetry", "delay_telemetry")
)  # for `seconds`; the others break the run, or strike once and are felt until its end


def label_of(fault: FaultInjected, severity: float = 0.0) -> Label | None:
    """The label of a fault that stands on the bus; None for what is no fault, or none that is known."""
    right = RIGHT.get(fault.fault)
    if right is None:
        return None
    seconds = fault.parameters.get("seconds")
    lasting = fault.fault in LASTING and seconds is not None
    late = fault.parameters.get("delay_seconds", 0.0) if fault.fault == "delay_telemetry" else 0.0
    return Label(
        kind=fault.fault, right=right, onset_at=fault.at,
        ended_at=fault.at + (seconds or 0.0) + late if lasting else None,
        ranks=(fault.rank,), node=fault.node, severity=severity,
    )  # fmt: skip
