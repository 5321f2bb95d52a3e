"""`transom ledger rebuild`: the ledger anew from the bus; it replaces the old one only where nothing is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ingest.bus import Bus, Consumer, TopicPartition
from ingest.clock import Clock
from ingest.events import Topic
from pipelines.errors import StatedError
from pipelines.ledger.finished import open_finished
from pipelines.ledger.held_rows import HeldRows, held_rows
from pipelines.ledger.ledger import Ledger, LedgerConfig
from pipelines.ledger.opening import FILE_NAME

TOPICS: tuple[Topic, ...] = ("metrics", "logs", "events", "verdicts", "actions", "commands")
GROUP = "rebuild"  # its offsets are never stored: each rebuild reads from the beginning
RECORDS_MAX = 2_000
POLL_SECONDS = 0.5
QUIET_POLLS = 4  # in a row without a record and without lag: that was all
FOR_EVER_SECONDS = 1e12


class CannotRebuild(StatedError):
    """The bus has not all that the ledger has, or nothing at all; the ledger stays as it is."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What was read, what could not be, and where the old ledger is now (None: there was none)."""

    records: int
    rejected: int
    before: Path | None


def rebuild(folder: Path, bus: Bus, clock: Clock, tell: Callable[[int], None]) -> Rebuilt:
    """Make the ledger in `folder` anew. Raises CannotRebuild, LedgerLocked while `record` runs, BusError.

    `tell` is given how many records were read so far.
    """
    old = folder if (folder / FILE_NAME).exists() else None
    held: tuple[HeldRows, ...] = ()
    if old is not None:
        with open_finished(old, clock) as finished, finished.cursor() as cursor:
            held = held_rows(cursor)
    aside = folder.with_name(f"{folder.name}.rebuilding")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        records, rejected, first = _read_all(aside, bus, clock, tell)
        _refuse_loss(held, first)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    before = None
    if old is not None:
        before = folder.with_name(f"{folder.name}.before-{int(clock.now())}")
        folder.rename(before)
    aside.rename(folder)
    return Rebuilt(records, rejected, before)


def _read_all(
    aside: Path, bus: Bus, clock: Clock, tell: Callable[[int], None]
) -> tuple[int, int, dict[TopicPartition, int]]:
    """Everything on the bus into a ledger in `aside`; the first offset that each partition still has."""
    config = LedgerConfig(metrics_keep_seconds=FOR_EVER_SECONDS, logs_keep_seconds=FOR_EVER_SECONDS)
    first: dict[TopicPartition, int] = {}
    records = rejected = quiet = 0
    with Ledger(aside, clock, config) as ledger:
        joined: list[Consumer] = []

        def from_the_beginning(places: frozenset[TopicPartition]) -> None:
            for member in joined:  # an assignment while it joins is sought below
                member.seek(dict.fromkeys(places, 0))

        consumer = bus.consumer(GROUP, TOPICS, start="earliest", on_assign=from_the_beginning)
        joined.append(consumer)
        try:
            from_the_beginning(consumer.assignment())
            while quiet < QUIET_POLLS:
                batch = consumer.poll(RECORDS_MAX, POLL_SECONDS)
                for record in batch:
                    first.setdefault(record.place, record.offset)
                rejected += len(ledger.append(batch))
                ledger.commit()
                records += len(batch)
                tell(records)
                quiet = 0 if batch or not consumer.assignment() or any(consumer.lag().values()) else quiet + 1
            ledger.commit(force=True)
        finally:
            consumer.close()
    return records, rejected, first


def _refuse_loss(held: tuple[HeldRows, ...], first: dict[TopicPartition, int]) -> None:
    lost = [rows for rows in held if rows.first_offset < first.get(rows.place, rows.last_offset + 1)]
    if not lost:
        return
    shown = "; ".join(
        f"{rows.table} of {rows.place.topic}[{rows.place.partition}] from offset {rows.first_offset} "
        f"(the bus begins at {first.get(rows.place, 'its end')})"
        for rows in lost
    )
    raise CannotRebuild(f"the bus has not all that this ledger has, so it stays as it is; gone from the bus: {shown}")
