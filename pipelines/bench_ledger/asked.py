"""What is asked of the ledger and its API: one line for each figure of two benches."""

from __future__ import annotations

from pipelines.asked import Asked

LEDGER = (
    Asked("ledger.bytes_10m", "10M metric samples on disk: bytes", "≤", 100e6, "sizes"),
    Asked("ledger.chart_ms", "one metric of 256 ranks over all of them, as a chart: ms, the median", "≤", 300, "sizes"),
)
API = (
    Asked("api.p50_ms", "reads beside 1,000 verdicts/s, 1M verdicts in the ledger: ms", "≤", 5, "api"),
    Asked("api.p99_ms", "the same, the slowest of a hundred", "≤", 50, "api"),
)
