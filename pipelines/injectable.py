"""The faults that `transom inject` can do: what each does, and which of its options each one reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Injectable(NamedTuple):
    """One fault. Those `by_rank` are done by the rank to itself, in a training step; the others from outside."""

    text: str
    parameters: tuple[str, ...] = ()
    by_rank: bool = True


FAULTS: Mapping[str, Injectable] = {
    "kill": Injectable("SIGKILL the rank", by_rank=False),
    "stop": Injectable("SIGSTOP the rank", by_rank=False),
    "cont": Injectable("SIGCONT the rank", by_rank=False),
    "kill_worker": Injectable("SIGKILL a worker of the rank's data loader", by_rank=False),
    "cpu_hog": Injectable("run `processes` busy processes on the rank's processors, for `seconds`",
                          ("processes", "seconds"), by_rank=False),
    "disk_full": Injectable("fill the disk of the checkpoints (at most 2 GiB large), for `seconds`",
                            ("seconds",), by_rank=False),
    "slow": Injectable("compute the forward pass `factor` times, for `seconds`", ("at_step", "factor", "seconds")),
    "slow_backward": Injectable("do as much more in the backward pass as makes it take `factor` times as long, for "
                                "`seconds`", ("at_step", "factor", "seconds")),
    "sleep": Injectable("sleep `delay_seconds` in each forward pass, for `seconds`",
                        ("at_step", "delay_seconds", "seconds")),
    "slow_data": Injectable("keep each batch back for `delay_seconds`, for `seconds`; needs the loader that watch() "
                            "returns", ("at_step", "delay_seconds", "seconds")),
    "gil_hog": Injectable("a Python thread holds the interpreter, for `seconds`", ("at_step", "seconds")),
    "memory_hog": Injectable("grow by `megabytes_per_second` up to `megabytes_max`, for `seconds`",
                             ("at_step", "megabytes_per_second", "megabytes_max", "seconds")),
    "nan": Injectable("multiply the forward's output by NaN in step `at_step`", ("at_step",)),
    "nan_gradient": Injectable("make the rank's own gradients NaN in step `at_step`", ("at_step",)),
    "scale_gradient": Injectable("multiply the rank's own gradients by `factor` in step `at_step`",
                                 ("at_step", "factor")),
    "drop_telemetry": Injectable("lose everything the rank reports, for `seconds`", ("at_step", "seconds")),
    "delay_telemetry": Injectable("report everything `delay_seconds` late, for `seconds`",
                                  ("at_step", "delay_seconds", "seconds")),
    "raise": Injectable("raise an exception in the forward of step `at_step`", ("at_step",)),
    "xid": Injectable("print a GPU Xid 79 line and die", ("at_step",)),
}  # fmt: skip


def listed() -> str:
    """One fault a line, for help and errors."""
    return "\n\n".join(f"{name}: {fault.text}." for name, fault in FAULTS.items())
