"""A replay's ledger: everything the run told and what this replay says of it, for the console to open."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from detectors.verdict import VERDICT_TYPES, Verdict
from ingest.bus import Record
from ingest.clock import Clock
from ingest.codec import Codec
from ingest.events import Topic
from pipelines.errors import StatedError
from pipelines.ledger.ledger import Ledger, LedgerConfig
from pipelines.ledger.opening import FILE_NAME
from pipelines.replay_source import placed

BATCH = 2_000
FOR_EVER_SECONDS = 1e12  # a historic run is old: nothing of it is too old


class LedgerThere(StatedError):
    """Something lies where the ledger would be written."""


def write_ledger(folder: Path, records: Iterable[Record], verdicts: Iterable[Verdict], clock: Clock) -> None:
    """Make a ledger in a new folder. Raises LedgerThere, LedgerWriteFailed."""
    if (folder / FILE_NAME).exists():
        raise LedgerThere(f"{folder} holds a ledger already; give another folder with --ledger")
    config = LedgerConfig(
        metrics_keep_seconds=FOR_EVER_SECONDS, logs_keep_seconds=FOR_EVER_SECONDS, flush_seconds=FOR_EVER_SECONDS
    )
    with Ledger(folder, clock, config) as ledger:
        held: list[Record] = []
        for record in records:
            held.append(record)
            if len(held) == BATCH:
                ledger.append(held)
                ledger.commit()
                held = []
        ledger.append([*held, *_said(verdicts)])
        ledger.commit(force=True)


def _said(verdicts: Iterable[Verdict]) -> Iterable[Record]:
    codec = Codec(VERDICT_TYPES)
    offsets: dict[Topic, int] = {}
    return [placed(codec.encode(verdict), offsets, verdict.at) for verdict in verdicts]
