"""The ledger's own metrics for Prometheus: base units, no label that grows with the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ingest.bus import TopicPartition

from .ledger import Ledger
from .shapes import Health


class Exposition(Collector):
    """Collects from the live objects at the moment of the question."""

    def __init__(
        self,
        ledger: Ledger,
        health: Callable[[], Health],
        lag: Callable[[], Mapping[TopicPartition, int]],
        dead_letters: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._health = health
        self._lag = lag
        self._dead_letters = dead_letters
        self._now = now
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        health = self._health()
        yield GaugeMetricFamily(
            "transom_ledger_healthy",
            "1 while the ledger takes what the bus has",
            float(health.status == "ok"),
        )
        yield GaugeMetricFamily(
            "transom_ledger_fresh_timestamp_seconds", "Up to when the ledger is complete", health.data_at
        )
        rows = CounterMetricFamily("transom_ledger_rows", "Rows written, by table", labels=["table"])
        for table, count in self._ledger.row_counts().items():
            rows.add_metric([table], count)
        yield rows
        lag = GaugeMetricFamily(
            "transom_ledger_lag_records",
            "Records on the bus that are not read yet",
            labels=["topic", "partition"],
        )
        for place, count in self._lag().items():
            lag.add_metric([place.topic, str(place.partition)], count)
        yield lag
        yield CounterMetricFamily("transom_ledger_commits", "Transactions committed", self._ledger.commits)
        yield CounterMetricFamily("transom_ledger_commit_seconds", "Time spent in commits", self._ledger.commit_seconds)
        yield CounterMetricFamily(
            "transom_ledger_dead_letters", "Records sent to the dead letters", self._dead_letters()
        )
        parts = self._ledger.parts
        yield GaugeMetricFamily("transom_ledger_metric_parts", "Parquet parts of metric samples", parts.part_count)
        yield GaugeMetricFamily(
            "transom_ledger_buffered_samples", "Samples that are in no part yet", parts.buffered_samples
        )
        yield from self._of_jobs()

    def _of_jobs(self) -> Iterator[Metric]:
        jobs = self._ledger.state.jobs(self._now())
        states = GaugeMetricFamily("transom_jobs", "Jobs, by state", labels=["state"])
        for state in ("running", "failed", "finished", "stopped", "lost"):
            states.add_metric([state], sum(job.state == state for job in jobs))
        yield states
        goodput = GaugeMetricFamily(
            "transom_job_goodput_ratio",
            "Useful step time over wall time since the first attempt",
            labels=["job"],
        )
        for job in jobs:
            if job.goodput is not None:
                goodput.add_metric([job.job], job.goodput)
        yield goodput
        incidents = GaugeMetricFamily("transom_incidents_open", "Open incidents, by severity", labels=["severity"])
        for severity, count in self._ledger.state.open_by_severity().items():
            incidents.add_metric([severity], count)
        yield incidents
