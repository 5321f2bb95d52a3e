"""The thread that brings memory to disk: newest first, one shard at a time, in the background of training."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from .clock import Clock
from .commit import commit_replica, commit_shard, make_step_folder, remove_temporaries
from .completion import DiskWatcher, NobodyWatches, StepCompletion
from .completion import PersistConfig as PersistConfig
from .errors import CheckpointDamaged, StepTaken
from .event import EngineEvent, EventState
from .manifest import ShardRecord, attempts_on_disk
from .memfd import Segment
from .pace import TokenBucket
from .priority import give_way
from .rejection import ALL_ATTEMPTS, read_or_reject_all
from .replicas import Replicas, same_as_stored, same_in_memory
from .segment import SlotHeader, payload_region
from .slots import Shard, Slot, SlotTable
from .storage import Storage

OUTCOMES_MAX = 1024  # of past shards, for those who wait for one
RECHECK_SECONDS = 1.0
REPLICA_LOOK_SECONDS = 0.1  # how often we look whether another engine has written what we have too
ADVICE = {
    errno.ENOSPC: "; free space, or lower checkpoint.keep_complete",
    errno.EDQUOT: "; free space or raise the quota, or lower checkpoint.keep_complete",
    errno.EROFS: "; the file system is read-only: mount it for writing again",
}

Candidate = tuple[Shard, Slot, SlotHeader]
ShardKey = tuple[int, int, int]  # rank, attempt, step


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
        watcher: DiskWatcher | None = None,
    ) -> None:
        self._config = config
        self._table = table
        self._storage = storage
        self._emit = emit
        self._clock = clock
        self._bucket = TokenBucket(config.bytes_per_second_max, clock) if config.bytes_per_second_max else None
        self._replicas = Replicas(storage, config.directory, config.writer, clock)
        self._awaited: set[ShardKey] = set()  # another engine writes the same tensors
        self._leaving = threading.Event()
        self._stopping = False
        self._hurry = False
        self._backoff_seconds = 0.0
        self._outcomes: OrderedDict[ShardKey, str] = OrderedDict()  # "" means durable, else why not
        self._writing: ShardKey | None = None
        self._thread = threading.Thread(target=self._run, name="persist", daemon=True)
        self.error = ""  # the last failure, "" after a success
        self._watcher = watcher or NobodyWatches()
        self._completion = StepCompletion(config, storage, emit, clock, self._report, self._watcher)

    def start(self) -> None:
        """Begin. A disk that does not obey yet is no reason not to serve memory: the first save will say so."""
        try:
            self._storage.make_folder(self._config.directory)
            remove_temporaries(self._storage, self._config.directory, writer=self._config.writer)
            self._completion.look_for_unfinished()
        except OSError as error:
            self.error = f"the checkpoint folder cannot be written yet: {error}"
        self._thread.start()

    def stop(self, deadline_seconds: float) -> bool:
        """Write what memory holds, each shard tried once more; False where the dead-line cut that short."""
        with self._table.changed:
            self._stopping = self._hurry = True
            self._leaving.set()
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

    def _report(self, error: str) -> None:
        self.error = error

    def _run(self) -> None:
        give_way(self._config.io_class)
        while True:
            candidate = self._next()
            if candidate is None:
                return
            self._persist(*candidate)

    def _next(self) -> Candidate | None:
        """Wait for something to write; None when it is time to go. The disk is never touched under the
        table's lock."""
        while True:
            rejections = read_or_reject_all(self._config.directory)
            blind = any(entry.up_to_attempt == ALL_ATTEMPTS for entry in rejections)  # the disk did not tell
            self._table.set_rejections(rejections)
            with self._table.changed:
                if self._backoff_seconds:
                    self._table.changed.wait_for(lambda: self._hurry, self._backoff_seconds)
                self._hurry = False
                pending = self._pending()
                self._awaited.intersection_update(_key(header) for _, _, header in pending)
                gave_up = self._stopping and self._backoff_seconds > 0
                if self._stopping and (gave_up or not pending):
                    return None
                if not pending and not self._completion.pending:
                    self._table.changed.wait(RECHECK_SECONDS if blind else None)
                    continue
                if not pending:
                    self._table.changed.wait(RECHECK_SECONDS)
                elif all(_key(header) in self._awaited for _, _, header in pending) and not self._stopping:
                    self._table.changed.wait(REPLICA_LOOK_SECONDS)
                    self._awaited.clear()
                    continue
            if pending:
                return self._choose(pending)
            self._completion.recheck()

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
        """A step that other ranks have on disk already comes before a newer one nobody has begun, and what only we
        have before what another engine is writing.

        Else ranks that skip different steps would never have one in common.
        """

        def merit(candidate: Candidate) -> tuple[bool, bool, tuple[int, int]]:
            header = candidate[2]
            begun = False
            with contextlib.suppress(OSError):  # the write that follows will say what is wrong
                begun = header.attempt in attempts_on_disk(self._config.directory, header.step)
            return (_key(header) not in self._awaited, begun, header.newness)

        return max(pending, key=merit)

    def _persist(self, shard: Shard, slot: Slot, header: SlotHeader) -> None:
        segment = self._table.lease(slot, header)
        if segment is None:
            return
        started = self._clock.monotonic()
        leased = True
        self._writing = _key(header)

        def read(crc: int) -> None:
            nonlocal leased
            self._table.confirm_checksum(slot, header, crc)
            self._table.release(slot)
            leased = False

        try:
            record = self._commit(header, segment, read)
        except StepTaken as error:
            self._settle(slot, header, str(error))
            self._tell("failed", header, reason=str(error))
        except CheckpointDamaged as error:
            self._table.void(slot, header)
            self._settle(slot, header, str(error))
            self._tell("failed", header, reason=str(error))
        except OSError as error:
            if self._completion.is_passed_by(error, header.step):
                self._settle(slot, header, "newer checkpoints are complete; it is not kept any more")
            else:
                self._back_off(header, error)
        else:
            if record is None:
                self._awaited.add(_key(header))
                return
            self._backoff_seconds, self.error = 0.0, ""
            self._watcher.wrote(header.step, header.attempt, header.rank)
            reason = "" if record.stored_by is None else f"the tensors are those of rank {record.stored_by}"
            seconds = self._clock.monotonic() - started
            self._tell("durable", header, size=record.checks.size_bytes, seconds=seconds, reason=reason)
            self._completion.finish(header.step, header.attempt)
            self._settle(slot, header, "")  # last: who waits for it may look for the step on disk at once
        finally:
            self._writing = None
            if leased:
                self._table.release(slot)

    def _commit(self, header: SlotHeader, segment: Segment, read: Callable[[int], None]) -> ShardRecord | None:
        """Write the shard, or only its header where its tensors are on disk already; None where another engine is
        writing them."""
        config = self._config
        if config.deduplicate and header.world_size > 1:
            folder = make_step_folder(self._storage, config.directory, header.step)
            payload = payload_region(segment.view, header)
            source = self._replicas.source(header, payload, patient=not self._stopping)
            if source == "wait":
                return None
            if isinstance(source, ShardRecord):
                record = commit_replica(
                    self._storage, config.directory, header, segment.view, source,
                    lambda payload: self._compare(payload, folder, source), writer=config.writer, on_read=read,
                )  # fmt: skip
                if record is not None:
                    return record
        return commit_shard(
            self._storage, config.directory, header, segment.view,
            writer=config.writer, on_read=read, pace=self._wait_for_turn,
        )  # fmt: skip

    def _compare(self, payload: memoryview, folder: Path, source: ShardRecord) -> int | None:
        """With the memory that `source` was written from, where we still have it: that is quicker than its file."""
        wanted = (source.rank, source.attempt, source.step)
        for _, slot, header in self._table.sealed():
            same = header.layout_hash.hex() == source.layout_hash and slot.checksum == source.checks.payload_crc32
            if _key(header) != wanted or not same:
                continue
            segment = self._table.lease(slot, header)
            if segment is None:
                break
            try:
                return same_in_memory(payload, payload_region(segment.view, header), source)
            finally:
                self._table.release(slot)
        return same_as_stored(payload, folder, source)

    def _wait_for_turn(self, size_bytes: int) -> None:
        if self._bucket is not None:
            self._leaving.wait(self._bucket.take(size_bytes))  # who is told to go writes as fast as it can

    def _back_off(self, header: SlotHeader, error: OSError) -> None:
        doubled = max(self._backoff_seconds * 2, self._config.retry_seconds_min)
        self._backoff_seconds = min(doubled, self._config.retry_seconds_max)
        advice = ADVICE.get(error.errno or 0, "")
        self.error = f"step {header.step} of rank {header.rank} could not be written: {error}{advice}"
        self._tell("failed", header, reason=f"{self.error}; memory keeps it, next try in {self._backoff_seconds:g} s")

    def _settle(self, slot: Slot, header: SlotHeader, why: str) -> None:
        with self._table.changed:
            self._outcomes[_key(header)] = why
            while len(self._outcomes) > OUTCOMES_MAX:
                self._outcomes.popitem(last=False)
            self._table.mark(slot, header, durable=not why, why=why)

    def _tell(
        self, state: EventState, header: SlotHeader, *, size: int = 0, seconds: float = 0.0, reason: str = ""
    ) -> None:
        event = EngineEvent(
            state, header.step, header.attempt, header.rank, "disk", self._clock.now(), size, seconds, reason
        )
        self._emit(event)


def _key(header: SlotHeader) -> ShardKey:
    return (header.rank, header.attempt, header.step)
