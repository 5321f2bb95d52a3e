"""Metric samples as Parquet parts: written aside, durable, renamed; a part exists only through its row."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ingest.bus import TopicPartition
from ingest.events import DeviceMetrics, Metrics

from .columns import Buffered, SampleColumns, samples_of
from .engine import pa, pq

MERGE_PARTS = 32  # parts of one level that become one of the next
MERGE_ROWS_MAX = 4_000_000  # a merge runs in the writer thread, so it must stay short
MERGE_GAIN = 4  # fewer large parts than that are not worth a merge
ROW_GROUP_ROWS = 122_880  # DuckDB's own
TEMPORARY_SUFFIX = ".tmp"


@dataclass(frozen=True, slots=True)
class Part:
    """One Parquet file and what is known of it without opening it."""

    path: str  # file name below metrics/
    level: int
    place: TopicPartition
    first_offset: int
    last_offset: int
    row_count: int
    min_at: float
    max_at: float
    jobs: frozenset[str]

    def row(self, replaces: Sequence[str]) -> tuple[Any, ...]:
        """The row of metric_part, without its seq."""
        return (
            self.path, self.level, self.place.topic, self.place.partition,
            self.first_offset, self.last_offset, self.row_count, self.min_at, self.max_at,
            json.dumps(sorted(self.jobs)), json.dumps(list(replaces)),
        )  # fmt: skip


def removal_row(place: TopicPartition, removed: Sequence[str]) -> tuple[Any, ...]:
    """The row that takes parts away without a successor (retention)."""
    return ("", 0, place.topic, place.partition, -1, -1, 0, 0.0, 0.0, "[]", json.dumps(list(removed)))


class Held(NamedTuple):
    """What a reader sees at one instant: the parts, and the samples of the newest seconds."""

    parts: tuple[Part, ...]
    buffered: tuple[Buffered, ...]


class PartStore:
    """The folder of parts and its index in memory. One thread writes; any thread may ask for `held`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._parts: dict[str, Part] = {}
        self._buffered: list[Buffered] = []
        self._samples = 0

    def adopt(self, parts: Iterable[Part]) -> None:
        """Take `parts` as all there is, forget what is buffered."""
        with self._lock:
            self._parts = {part.path: part for part in parts}
            self._buffered = []
            self._samples = 0

    def load(self, parts: Iterable[Part]) -> None:
        """The same, and delete every file that is none of them: nothing was committed of it."""
        self.adopt(parts)
        for file in self.folder.iterdir():
            if file.name not in self._parts:
                file.unlink(missing_ok=True)

    def held(self) -> Held:
        """Parts and buffered samples of one instant: no sample is in both, none in neither."""
        with self._lock:
            return Held(tuple(self._parts.values()), tuple(self._buffered))

    @property
    def buffered_samples(self) -> int:
        return self._samples

    @property
    def part_count(self) -> int:
        return len(self._parts)

    def buffer(self, place: TopicPartition, offset: int, message: Metrics | DeviceMetrics) -> None:
        """Keep a message until the next part."""
        with self._lock:
            self._buffered.append(Buffered(place, offset, message))
            self._samples += samples_of(message)

    def write_buffered(self) -> list[Part]:
        """Durable files of everything buffered, one for each partition; they count only after `swap`."""
        by_place: dict[TopicPartition, list[Buffered]] = {}
        for entry in self._buffered:
            by_place.setdefault(entry.place, []).append(entry)
        written = []
        for place, entries in by_place.items():
            columns = SampleColumns()
            for entry in entries:
                columns.add(entry.message)
            part = self._write(columns.table(), place, entries[0].offset, entries[-1].offset)
            if part is not None:
                written.append(part)
        return written

    def swap(self, added: Iterable[Part], removed: Iterable[str], *, flushed: bool) -> None:
        """After the commit: readers see `added` instead of `removed` and (when `flushed`) of the buffer."""
        with self._lock:
            for path in removed:
                self._parts.pop(path, None)
            for part in added:
                self._parts[part.path] = part
            if flushed:
                self._buffered = []
                self._samples = 0

    def mergeable(self) -> list[Part]:
        """Enough small parts of one partition and level to become one, oldest first; else empty."""
        groups: dict[tuple[TopicPartition, int], list[Part]] = {}
        for part in self._parts.values():
            groups.setdefault((part.place, part.level), []).append(part)
        for group in groups.values():
            if len(group) < MERGE_PARTS:
                continue
            oldest = sorted(group, key=lambda part: part.first_offset)[:MERGE_PARTS]
            while sum(part.row_count for part in oldest) > MERGE_ROWS_MAX:
                oldest.pop()
            if len(oldest) >= MERGE_GAIN:
                return oldest
        return []

    def expired(self, before: float) -> list[Part]:
        """Parts whose newest sample is older than `before`."""
        return [part for part in self._parts.values() if part.max_at < before]

    def merged_name(self, parts: Sequence[Part]) -> Part:
        """What the merge of `parts` will be."""
        level = parts[0].level + 1
        place = parts[0].place
        first, last = parts[0].first_offset, parts[-1].last_offset
        return Part(
            path=_name(place, first, last, level),
            level=level,
            place=place,
            first_offset=first,
            last_offset=last,
            row_count=sum(part.row_count for part in parts),
            min_at=min(part.min_at for part in parts),
            max_at=max(part.max_at for part in parts),
            jobs=frozenset().union(*(part.jobs for part in parts)),
        )

    def publish(self, name: str) -> None:
        """Make `name`.tmp durable under its own name."""
        temporary = self.folder / (name + TEMPORARY_SUFFIX)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(self.folder / name)
        directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def delete(self, names: Iterable[str]) -> None:
        """Unlink files that no row names any more."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def _write(self, table: pa.Table, place: TopicPartition, first: int, last: int) -> Part | None:
        if table.num_rows == 0:
            return None
        name = _name(place, first, last, 0)
        pq.write_table(
            table,
            self.folder / (name + TEMPORARY_SUFFIX),
            compression="zstd",
            row_group_size=ROW_GROUP_ROWS,  # the rows of one metric are few of these, the others are not read
        )
        self.publish(name)
        times = table.column("event_at").to_numpy()
        return Part(
            path=name,
            level=0,
            place=place,
            first_offset=first,
            last_offset=last,
            row_count=table.num_rows,
            min_at=float(times.min()),
            max_at=float(times.max()),
            jobs=frozenset(table.column("job").unique().to_pylist()),
        )


def _name(place: TopicPartition, first: int, last: int, level: int) -> str:
    return f"{place.topic}-{place.partition}-{first}-{last}-{level}.parquet"
