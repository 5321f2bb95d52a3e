"""Metric messages as columns: samples in long format, whole lists at a time, sorted as they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ingest.bus import TopicPartition
from ingest.events import DeviceMetrics, Metrics

from .engine import pa

_WORD = pa.dictionary(pa.int32(), pa.string())
PART_SCHEMA = pa.schema(
    [
        ("job", _WORD),
        ("attempt", pa.int64()),
        ("rank", pa.int64()),  # -1: what all ranks of the node share
        ("node", _WORD),
        ("device", _WORD),  # of samples by time: process, host, gpu:0, …; empty for samples by step
        ("step", pa.int64()),
        ("event_at", pa.float64()),
        ("metric", _WORD),
        ("value", pa.float64()),
    ]
)
NO_STEP = -1  # of samples by time


class Buffered(NamedTuple):
    """One metrics message that is in no part yet."""

    place: TopicPartition
    offset: int
    message: Metrics | DeviceMetrics


class _Run(NamedTuple):
    """Samples of one column of one message: where they begin, and what they share. Runs sort as readers ask."""

    job: str
    metric: str
    attempt: int
    rank: int
    node: str
    device: str
    first: int
    amount: int


class SampleColumns:
    """Samples in long format; what a message says once is kept once."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._steps: list[int] = []
        self._times: list[float] = []
        self._values: list[float | None] = []

    def add(self, message: Metrics | DeviceMetrics, metric: str | None = None) -> None:
        """Take a message, or only one of its metrics."""
        steps: Sequence[int]
        times: Sequence[float]
        if isinstance(message, Metrics):
            steps, times, device = message.steps, message.ended_at, ""
            plain = not message.non_finite
        else:
            times, device, plain = message.sampled_at, message.device, True
            steps = (NO_STEP,) * len(times)
        count = len(steps)
        for name, given in message.columns.items():
            if not count or (metric is not None and name != metric):
                continue
            values: Sequence[float | None] = given
            if not plain:
                assert isinstance(message, Metrics)
                values = message.column(name)
            self._runs.append(
                _Run(message.job, name, message.attempt, message.rank, message.node, device, len(self._values), count)
            )
            self._steps.extend(steps)
            self._times.extend(times)
            self._values.extend(values)

    def table(self) -> pa.Table:
        """PART_SCHEMA, ordered by job, metric, attempt, rank, node, device, arrival; without samples that are None."""
        runs = sorted(self._runs)
        counts = np.fromiter((run.amount for run in runs), np.int64, len(runs))
        firsts = np.fromiter((run.first for run in runs), np.int64, len(runs))
        ends = np.cumsum(counts)
        order = np.repeat(firsts - (ends - counts), counts) + np.arange(len(self._values))
        values = pa.array(self._values, pa.float64())
        columns: dict[str, Any] = {
            "step": np.array(self._steps, np.int64)[order],
            "event_at": np.array(self._times, np.float64)[order],
            "value": values.take(pa.array(order)) if values.null_count else values.to_numpy()[order],
        }
        for name in ("attempt", "rank"):
            numbers = np.fromiter((getattr(run, name) for run in runs), np.int64, len(runs))
            columns[name] = np.repeat(numbers, counts)
        for name in ("job", "metric", "node", "device"):
            columns[name] = _words([getattr(run, name) for run in runs], counts)
        table = pa.table({name: columns[name] for name in PART_SCHEMA.names}, schema=PART_SCHEMA)
        return table.filter(table.column("value").is_valid()) if values.null_count else table


def _words(of_runs: list[str], counts: np.ndarray[Any, np.dtype[np.int64]]) -> pa.DictionaryArray:
    known = {word: code for code, word in enumerate(dict.fromkeys(of_runs))}
    codes = np.fromiter((known[word] for word in of_runs), np.int32, len(of_runs))
    return pa.DictionaryArray.from_arrays(pa.array(np.repeat(codes, counts)), pa.array(list(known), pa.string()))


def samples_of(message: Metrics | DeviceMetrics) -> int:
    """An upper bound of the rows that a message becomes."""
    rows = message.steps if isinstance(message, Metrics) else message.sampled_at
    return len(rows) * len(message.columns)


def live_table(buffered: Iterable[Buffered], job: str, metric: str | None) -> pa.Table:
    """The samples of a job (None: of all its metrics) that are in no part yet."""
    columns = SampleColumns()
    for entry in buffered:
        if entry.message.job == job and (metric is None or metric in entry.message.columns):
            columns.add(entry.message, metric)
    return columns.table()
