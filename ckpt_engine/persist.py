"""The thread that brings memory to disk: newest first, one shard at a time, in the background of training."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .clock import Clock
from .commit import commit_shard, finish_step, is_passed_by, remove_temporaries, retain
from .errors import CheckpointDamaged, StepTaken
from .event import WHOLE_STEP, EngineEvent, EventState
from .manifest import attempts_on_disk, read_manifest, rejection_of
from .rejection import read_or_reject_all
from .segment import SlotHeader
from .slots import Shard, Slot, SlotTable
from .storage import Storage

NICENESS = 10
OUTCOMES_MAX = 1024  # of past shards, for those who wait for one
RECHECK_SECONDS = 1.0
RECHECKS_MAX = 60

Candidate = tuple[Shard, Slot, SlotHeader]
ShardKey = tuple[int, int, int]  # rank, attempt, step


@dataclass(frozen=True, slots=True)
class PersistConfig:
    """How hard to try. Retries double their distance between the two bounds."""

    directory: Path
    writer: str
    retention_steps: int
    retry_seconds_min: float
    retry_seconds_max: float


class Persister:
    """Writes every rank's newest sealed shard; what is overtaken by a newer one is skipped, never half
    written."""

    def __init__(
        self,
        config: PersistConfig,
        table: SlotTable,
        storage: Storage,
        emit: Callable[[EngineEvent], None],
        clock: Clock,
    ) -> None:
        self._config = config
        self._table = table
        self._storage = storage
        self._emit = emit
        self._clock = clock
        self._stopping = False
        self._hurry = False
        self._backoff_seconds = 0.0
        self._outcomes: OrderedDict[ShardKey, str] = OrderedDict()  # "" means durable, else why not
        self._writing: ShardKey | None = None
        self._unfinished: OrderedDict[tuple[int, int], int] = OrderedDict()  # (step, attempt) -> checks so far
        self._thread = threading.Thread(target=self._run, name="persist", daemon=True)
        self.error = ""  # the last failure, "" after a success

    def start(self) -> None:
        self._storage.make_folder(self._config.directory)
        remove_temporaries(self._storage, self._config.directory, writer=self._config.writer)
        self._thread.start()

    def stop(self, deadline_seconds: float) -> bool:
        """Write what memory holds, each shard tried once more; False where the dead-line cut that short."""
        with self._table.changed:
            self._stopping = self._hurry = True
            self._backoff_seconds = 0.0
            self._table.changed.notify_all()
        self._thread.join(deadline_seconds)
        return not self._thread.is_alive()

    def hurry(self) -> None:
        """Do not wait out a back-off."""
        with self._table.changed:
            self._hurry = True
            self._table.changed.notify_all()

    def idle(self) -> bool:
        """Nothing that memory holds still waits to be written."""
        return not self._pending()

    def outcome(self, key: ShardKey) -> str | None:
        """ "" once durable, the reason where it never will be, None while that is open."""
        with self._table.changed:
            if key in self._outcomes:
                return self._outcomes[key]
            rank, attempt, step = key
            if key == self._writing:
                return None
            held = [header for shard, _, header in self._table.sealed() if shard.rank == rank]
            if any((header.attempt, header.step) == (attempt, step) for header in held):
                return None
            newest = max((header.newness for header in held), default=None)
            if newest is not None and newest > (attempt, step):
                return f"overtaken by step {newest[1]} before it was written"
            return "no longer in memory, and not on disk"

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # on Linux the niceness is the thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            candidate = self._next()
            if candidate is None:
                return
            self._persist(*candidate)

    def _next(self) -> Candidate | None:
        """Wait for something to write; None when it is time to go. The disk is never touched under the
        table's lock."""
        while True:
            self._table.set_rejections(read_or_reject_all(self._config.directory))
            with self._table.changed:
                if self._backoff_seconds:
                    self._table.changed.wait_for(lambda: self._hurry, self._backoff_seconds)
                self._hurry = False
                pending = self._pending()
                gave_up = self._stopping and self._backoff_seconds > 0
                if self._stopping and (gave_up or not pending):
                    return None
                if not pending and not self._unfinished:
                    self._table.changed.wait()
                    continue
                if not pending:
                    self._table.changed.wait(RECHECK_SECONDS)
            if pending:
                return self._choose(pending)
            self._recheck_unfinished()

    def _pending(self) -> list[Candidate]:
        sealed = self._table.sealed()
        newest_durable: dict[int, tuple[int, int]] = {}
        for shard, slot, header in sealed:
            if slot.durable:
                newest_durable[shard.rank] = max(header.newness, newest_durable.get(shard.rank, (0, -1)))
        return [
            (shard, slot, header)
            for shard, slot, header in sealed
            if not slot.durable and not slot.given_up and header.newness > newest_durable.get(shard.rank, (0, -1))
        ]

    def _choose(self, pending: list[Candidate]) -> Candidate:
        """A step that other ranks have on disk already comes before a newer one nobody has begun.

        Else ranks that skip different steps would never have one in common.
        """

        def merit(candidate: Candidate) -> tuple[bool, tuple[int, int]]:
            header = candidate[2]
            begun = header.attempt in attempts_on_disk(self._config.directory, header.step)
            return (begun, header.newness)

        return max(pending, key=merit)

    def _persist(self, shard: Shard, slot: Slot, header: SlotHeader) -> None:
        segment = self._table.lease(slot, header)
        if segment is None:
            return
        started = self._clock.monotonic()
        leased = True
        self._writing = (header.rank, header.attempt, header.step)

        def read(crc: int) -> None:
            nonlocal leased
            self._table.confirm_checksum(slot, header, crc)
            self._table.release(slot)
            leased = False

        try:
            record = commit_shard(
                self._storage,
                self._config.directory,
                header,
                segment.view,
                writer=self._config.writer,
                on_read=read,
            )
        except StepTaken as error:
            self._settle(slot, header, str(error))
            self._tell("failed", header, reason=str(error))
        except CheckpointDamaged as error:
            self._table.void(slot, header)
            self._settle(slot, header, str(error))
            self._tell("failed", header, reason=str(error))
        except OSError as error:
            if self._is_passed_by(error, header.step):
                self._settle(slot, header, "newer checkpoints are complete; it is not kept any more")
            else:
                self._back_off(header, error)
        else:
            self._backoff_seconds, self.error = 0.0, ""
            self._tell("durable", header, size=record.checks.size_bytes, seconds=self._clock.monotonic() - started)
            self._finish(header.step, header.attempt)
            self._settle(slot, header, "")  # last: who waits for it may look for the step on disk at once
        finally:
            self._writing = None
            if leased:
                self._table.release(slot)

    def _back_off(self, header: SlotHeader, error: OSError) -> None:
        doubled = max(self._backoff_seconds * 2, self._config.retry_seconds_min)
        self._backoff_seconds = min(doubled, self._config.retry_seconds_max)
        self.error = f"step {header.step} of rank {header.rank} could not be written: {error}"
        self._tell("failed", header, reason=f"{self.error}; memory keeps it, next try in {self._backoff_seconds:g} s")

    def _settle(self, slot: Slot, header: SlotHeader, why: str) -> None:
        with self._table.changed:
            self._outcomes[(header.rank, header.attempt, header.step)] = why
            while len(self._outcomes) > OUTCOMES_MAX:
                self._outcomes.popitem(last=False)
            self._table.mark(slot, header, durable=not why, why=why)

    def _finish(self, step: int, attempt: int) -> None:
        """Complete the step if ours was the last shard, and remove what retention no longer keeps."""
        directory, writer = self._config.directory, self._config.writer
        try:
            if rejection_of(directory, step, attempt) is not None:
                return
            manifest = finish_step(self._storage, directory, step, attempt, writer=writer)
            standing = manifest or read_manifest(directory, step)
            if standing is None or standing.attempt < attempt:
                self._unfinished.setdefault((step, attempt), 0)
                return
            self._unfinished.pop((step, attempt), None)
            if manifest is None:
                return
            self._emit(
                EngineEvent(
                    "complete",
                    step,
                    attempt,
                    WHOLE_STEP,
                    "disk",
                    self._clock.now(),
                    size_bytes=manifest.size_bytes,
                )
            )
            for removed in retain(self._storage, directory, self._config.retention_steps):
                reason = f"the newest {self._config.retention_steps} are kept"
                self._emit(
                    EngineEvent("evicted", removed, attempt, WHOLE_STEP, "disk", self._clock.now(), reason=reason)
                )
        except (OSError, CheckpointDamaged) as error:
            if self._is_passed_by(error, step):
                self._unfinished.pop((step, attempt), None)
                return
            self._unfinished.setdefault((step, attempt), 0)
            self.error = f"step {step} could not be completed on disk: {error}"
            self._emit(EngineEvent("failed", step, attempt, WHOLE_STEP, "disk", self._clock.now(), reason=self.error))

    def _is_passed_by(self, error: Exception, step: int) -> bool:
        """Another engine has removed the step under our hands, because it is old by now: nothing has failed."""
        gone = isinstance(error, FileNotFoundError)
        return gone and is_passed_by(self._config.directory, step, self._config.retention_steps)

    def _recheck_unfinished(self) -> None:
        """A network file system may show another engine's record only later than ours."""
        for key, checks in list(self._unfinished.items()):
            self._unfinished[key] = checks + 1
            if checks >= RECHECKS_MAX:
                del self._unfinished[key]
            else:
                self._finish(*key)

    def _tell(
        self, state: EventState, header: SlotHeader, *, size: int = 0, seconds: float = 0.0, reason: str = ""
    ) -> None:
        self._emit(
            EngineEvent(
                state,
                header.step,
                header.attempt,
                header.rank,
                "disk",
                self._clock.now(),
                size,
                seconds,
                reason,
            )
        )
