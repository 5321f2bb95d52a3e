"""The recordings of all jobs that `record` keeps: one folder for each, opened at its first record."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from ingest.bus import Record
from ingest.clock import Clock
from pipelines.recording import MESSAGES_FILE, RecordingWriter, recording_folder_of

OPEN_MAX = 16  # files at once; the job that was quiet longest is closed first
LOOK_SECONDS = 600.0  # between two looks for recordings that are over their time
JOBS_MAX = 1_000  # jobs recorded in the life of this process; more are not


class Recordings:
    """Takes records of any job; without a folder it takes nothing. Raises OSError and NotARecording."""

    def __init__(self, folder: Path | None, clock: Clock, *, keep_seconds: float | None = None) -> None:
        self._folder = folder
        self._clock = clock
        self._keep_seconds = keep_seconds
        self._looked_at: float | None = None
        self._open: dict[str, RecordingWriter] = {}  # the least recently used first
        self._jobs: set[str] = set()

    def write(self, records: Iterable[Record]) -> None:
        """Append each record to the recording of its job (its key)."""
        if self._folder is None:
            return
        for record in records:
            writer = self._writer_of(record.key, self._folder)
            if writer is not None:
                writer.write(record)

    def flush(self) -> None:
        """Everything written so far survives a kill of this process."""
        for writer in self._open.values():
            writer.flush()

    def close(self) -> None:
        """End all files. May be called twice."""
        while self._open:
            _, writer = self._open.popitem()
            writer.close()

    def abandon(self) -> None:
        """Let go of all files after a failed write: they are repaired when they are opened again."""
        while self._open:
            self._open.popitem()[1].abandon()

    def forget_old(self) -> None:
        """Now and then: delete recordings to which nothing was added for `keep_seconds`."""
        moment = self._clock.monotonic()
        if self._folder is None or self._keep_seconds is None:
            return
        if self._looked_at is not None and moment - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = moment
        open_now = {recording_folder_of(self._folder, job) for job in self._open}
        before = self._clock.now() - self._keep_seconds
        for messages in self._folder.glob(f"*/{MESSAGES_FILE}"):
            if messages.parent not in open_now and messages.stat().st_mtime < before:
                shutil.rmtree(messages.parent, ignore_errors=True)

    def _writer_of(self, job: str, folder: Path) -> RecordingWriter | None:
        writer = self._open.pop(job, None)
        if writer is None:
            if not job or (job not in self._jobs and len(self._jobs) >= JOBS_MAX):
                return None
            self._jobs.add(job)
            while len(self._open) >= OPEN_MAX:
                self._open.pop(next(iter(self._open))).close()
            writer = RecordingWriter(recording_folder_of(folder, job), job, now=self._clock.now())
        self._open[job] = writer
        return writer
