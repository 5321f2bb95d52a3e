"""From shards on disk to a step: the manifest when the last record is there; then what retention does not keep goes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .clock import Clock
from .commit import finish_step, is_passed_by, retain
from .errors import CheckpointDamaged
from .event import WHOLE_STEP, EngineEvent
from .manifest import attempts_on_disk, read_manifest, rejection_of, step_numbers
from .priority import IoClass
from .storage import Storage

RECHECKS_MAX = 60
UNFINISHED_MAX = 256
STEPS_AT_START_MAX = 16  # the newest; an older one without a manifest is no loss


@dataclass(frozen=True, slots=True)
class PersistConfig:
    """How hard to try, and how gently. Retries double their distance between the two bounds.

    `keep_every_steps` (0: none): steps whose number it divides are kept for ever. `bytes_per_second_max` (0: none)
    bounds what is written. `deduplicate`: ranks with the same tensors share one file.
    """

    directory: Path
    writer: str
    retention_steps: int
    retry_seconds_min: float
    retry_seconds_max: float
    keep_every_steps: int = 0
    bytes_per_second_max: float = 0.0
    io_class: IoClass = "best-effort"
    deduplicate: bool = True


class DiskWatcher(Protocol):
    """Who follows what comes to the disk, and may need a step to stay there for now."""

    def wrote(self, step: int, attempt: int, rank: int) -> None:
        """A shard is on disk, by us."""
        ...

    def look(self, step: int) -> None:
        """A step is complete on disk."""
        ...

    def busy(self) -> frozenset[int]:
        """Steps that must not be removed now."""
        ...


class NobodyWatches:
    """`DiskWatcher` where there is no further tier."""

    def wrote(self, step: int, attempt: int, rank: int) -> None:
        pass

    def look(self, step: int) -> None:
        pass

    def busy(self) -> frozenset[int]:
        return frozenset()


class StepCompletion:
    """For the thread that writes; `report` gets the last failure."""

    def __init__(
        self,
        config: PersistConfig,
        storage: Storage,
        emit: Callable[[EngineEvent], None],
        clock: Clock,
        report: Callable[[str], None],
        watcher: DiskWatcher,
    ) -> None:
        self._config = config
        self._storage = storage
        self._emit = emit
        self._clock = clock
        self._report = report
        self._watcher = watcher
        self._unfinished: OrderedDict[tuple[int, int], int] = OrderedDict()  # (step, attempt) -> checks so far
        self._told: set[tuple[int, int]] = set()

    @property
    def pending(self) -> bool:
        """Shards of ours are on disk whose step is not complete: `recheck` should be called from time to time."""
        return bool(self._unfinished)

    def look_for_unfinished(self) -> None:
        """Steps that an engine before us may have left with all records and no manifest. Raises OSError."""
        directory = self._config.directory
        for step in step_numbers(directory)[-STEPS_AT_START_MAX:]:
            with contextlib.suppress(CheckpointDamaged):  # a damaged manifest completes nothing
                manifest = read_manifest(directory, step)
                if manifest is not None:
                    continue
            for attempt in attempts_on_disk(directory, step):
                self._look_again(step, attempt)

    def finish(self, step: int, attempt: int) -> None:
        """Complete the step if its last shard is there now, and remove what retention no longer keeps."""
        directory, writer = self._config.directory, self._config.writer
        try:
            if rejection_of(directory, step, attempt) is not None:
                self._forget(step, attempt)
                return
            manifest = finish_step(self._storage, directory, step, attempt, writer=writer)
            standing = manifest or read_manifest(directory, step)
            if standing is None or standing.attempt < attempt:
                self._look_again(step, attempt)
                return
            self._forget(step, attempt)
            self._watcher.look(step)
            if manifest is None:
                return
            now = self._clock.now()
            self._emit(EngineEvent("complete", step, attempt, WHOLE_STEP, "disk", now, size_bytes=manifest.size_bytes))
            self._retain(attempt)
        except (OSError, CheckpointDamaged) as error:
            self._failed(step, attempt, error)

    def recheck(self) -> None:
        """A network file system may show another engine's record only later than ours."""
        for key, checks in list(self._unfinished.items()):
            self._unfinished[key] = checks + 1
            if checks >= RECHECKS_MAX:
                self._forget(*key)
            else:
                self.finish(*key)

    def is_passed_by(self, error: Exception, step: int) -> bool:
        """Another engine has removed the step under our hands, because it is old by now: nothing has failed."""
        if not isinstance(error, FileNotFoundError):
            return False
        try:
            return is_passed_by(self._config.directory, step, self._config.retention_steps)
        except OSError:
            return False

    def _failed(self, step: int, attempt: int, error: OSError | CheckpointDamaged) -> None:
        if self.is_passed_by(error, step):
            self._forget(step, attempt)
            return
        reason = f"step {step} could not be completed on disk: {error}"
        self._report(reason)
        if (step, attempt) not in self._told:
            self._told.add((step, attempt))
            self._emit(EngineEvent("failed", step, attempt, WHOLE_STEP, "disk", self._clock.now(), reason=reason))
        self._look_again(step, attempt)
        if isinstance(error, OSError):
            self._unfinished[(step, attempt)] = 0  # again and again, however long the disk takes to obey

    def _look_again(self, step: int, attempt: int) -> None:
        self._unfinished.setdefault((step, attempt), 0)
        while len(self._unfinished) > UNFINISHED_MAX:
            self._forget(*next(iter(self._unfinished)))

    def _forget(self, step: int, attempt: int) -> None:
        self._unfinished.pop((step, attempt), None)
        self._told.discard((step, attempt))

    def _retain(self, attempt: int) -> None:
        config = self._config
        removed = retain(
            self._storage, config.directory, config.retention_steps,
            keep_every_steps=config.keep_every_steps, busy=self._watcher.busy(),
        )  # fmt: skip
        reason = f"the newest {config.retention_steps} are kept"
        for step in removed:
            now = self._clock.now()
            self._emit(EngineEvent("evicted", step, attempt, WHOLE_STEP, "disk", now, reason=reason))
