"""The ledger's own metrics for Prometheus: base units, no label that grows with the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ingest.bus import TopicPartition

from .ledger import Ledger
from .measures import stage_seconds
from .shapes import Health, JobView

STAGE_BOUNDS_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0)


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
        yield from _of_failures(jobs)
        yield self._stages()
        incidents = GaugeMetricFamily("transom_incidents_open", "Open incidents, by severity", labels=["severity"])
        for severity, count in self._ledger.state.open_by_severity().items():
            incidents.add_metric([severity], count)
        yield incidents

    def _stages(self) -> Metric:
        """How long each stage of recovery took, over the incidents that are remembered."""
        family = HistogramMetricFamily(
            "transom_incident_stage_seconds",
            "Time in one stage of an incident for which a job was stopped, of those that are remembered",
            labels=["stage"],
        )
        taken: dict[str, list[float]] = {}
        for measures in self._ledger.state.measures():
            for stage, seconds in stage_seconds(measures):
                taken.setdefault(stage, []).append(seconds)
        for name, times in taken.items():
            buckets = [(repr(bound), sum(seconds <= bound for seconds in times)) for bound in STAGE_BOUNDS_SECONDS]
            family.add_metric([name], [*buckets, ("+Inf", len(times))], sum(times))
        return family


def _of_failures(jobs: Sequence[JobView]) -> Iterator[Metric]:
    """What each job's failures have cost it."""
    counted = (
        ("transom_job_failures", "Incidents for which the job was stopped", "failures"),
        ("transom_job_restarts", "Restarts after a failure", "restarts"),
        ("transom_job_lost_steps", "Steps that were trained again", "lost_steps"),
    )
    for name, words, field in counted:
        counter = CounterMetricFamily(name, words, labels=["job"])
        for job in jobs:
            counter.add_metric([job.job], float(getattr(job.measures, field)))
        yield counter
    measured = (
        ("transom_job_mttf_seconds", "Time in which nothing was repaired, by failures", "mttf_seconds"),
        ("transom_job_mttr_seconds", "Mean time from an onset to the first new step", "mttr_seconds"),
    )
    for name, words, field in measured:
        gauge = GaugeMetricFamily(name, words, labels=["job"])
        for job in jobs:
            seconds: float | None = getattr(job.measures, field)
            if seconds is not None:
                gauge.add_metric([job.job], seconds)
        yield gauge
