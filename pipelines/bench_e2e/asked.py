"""What is asked of the whole: one line for each figure of `transom bench e2e`."""

from __future__ import annotations

from pipelines.asked import REPORTED, Asked

ASKED = (
    Asked("e2e.time_saved_crashes", "kills and stragglers: 1 − our wall time ÷ torchrun's", "≥", 0.15, "crashes"),
    Asked("e2e.time_saved", "with hangs too, torchrun charged a 60 s watchdog", "≥", 0.28, "hangs"),
    Asked("e2e.goodput", "with hangs: steps × median step time ÷ our wall time", REPORTED, 0, "hangs"),
    Asked(
        "e2e.same_parameters", "runs whose last parameters are the same, bit for bit, of all runs", "=", 1, "crashes"
    ),
)
