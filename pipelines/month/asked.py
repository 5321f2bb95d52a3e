"""What is asked of the simulated month: one line for each figure of `transom simulate month`."""

from __future__ import annotations

from pipelines.asked import REPORTED, Asked

ASKED = (
    Asked("sim.goodput_1k", "1,024 GPUs for a month, 5 min checkpoints", "≥", 0.96, "month"),
    Asked("sim.goodput_16k", "16,384 GPUs for a month, 5 min checkpoints", "≥", 0.86, "month"),
    Asked("sim.pages", "times that a person had to act, 1,024 GPUs", "≤", 5, "month"),
    Asked("sim.pages_16k", "the same, 16,384 GPUs", REPORTED, 0, "month"),
    Asked("sim.wall_seconds", "one month of 16,384 GPUs on one core", "<", 10, "month"),
)
