"""The thread that brings complete steps from the disk to an object store, newest first, in the background.

Each engine uploads the shards that it wrote; what another engine has left undone for a while (its node is gone) is
uploaded by whoever is there. The manifest is written last, by whichever engine finds all shards in the store.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .clock import Clock
from .errors import CheckpointDamaged, CheckpointError
from .event import WHOLE_STEP, EngineEvent
from .manifest import Manifest, complete_steps, read_manifest
from .objecttier import STEPS_READ_MAX, ObjectTier
from .pace import TokenBucket
from .priority import give_way
from .verification import read_verifications

LOOK_SECONDS = 5.0  # how often the disk is looked at for steps that others have completed
TAKEOVER_SECONDS = 60.0  # before what another engine wrote is uploaded by us
UPLOADED_MAX = 1024  # steps that are remembered as done
OWN_MAX = 64 * UPLOADED_MAX

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class UploadConfig:
    """`retention_steps` complete steps are kept in the store, and those that `keep_every_steps` (0: none) divides."""

    directory: Path
    retention_steps: int = 3
    keep_every_steps: int = 0
    bytes_per_second_max: float = 0.0
    takeover_seconds: float = TAKEOVER_SECONDS
    retry_seconds_min: float = 1.0
    retry_seconds_max: float = 300.0


class Uploader:
    """Always the newest complete step: one that is overtaken before its turn is left out, unless kept for ever."""

    def __init__(
        self,
        config: UploadConfig,
        open_tier: Callable[[], ObjectTier],
        emit: Callable[[EngineEvent], None],
        clock: Clock,
    ) -> None:
        self._config = config
        self._open_tier = open_tier
        self._tier: ObjectTier | None = None
        self._emit = emit
        self._clock = clock
        self._changed = threading.Condition()
        self._stopping = False
        self._own: OrderedDict[tuple[int, int, int], None] = OrderedDict()  # (step, attempt, rank) that we wrote
        self._seen: OrderedDict[tuple[int, int], float] = OrderedDict()  # (step, attempt) -> first met at
        self._uploaded: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._busy: int | None = None
        self._backoff_seconds = 0.0
        self._told = ""
        self._woken = False
        self._bucket = TokenBucket(config.bytes_per_second_max, clock) if config.bytes_per_second_max else None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self.error = ""  # the last failure, "" after a success

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_seconds: float) -> bool:
        """Finish what is being uploaded and the newest complete step; False where the dead-line cut that short."""
        with self._changed:
            self._stopping = True
            self._leaving.set()
            self._changed.notify_all()
        self._thread.join(deadline_seconds)
        return not self._thread.is_alive()

    def wrote(self, step: int, attempt: int, rank: int) -> None:
        """A shard of ours is on disk: it is for us to upload."""
        with self._changed:
            _remember(self._own, (step, attempt, rank), OWN_MAX)

    def look(self, step: int) -> None:
        """A step is complete on disk."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def busy(self) -> frozenset[int]:
        """The step whose files must not go now."""
        step = self._busy
        return frozenset() if step is None else frozenset({step})

    def _run(self) -> None:
        give_way()
        while True:
            with self._changed:
                last = self._stopping  # one more try, for what has become complete meanwhile
            done = self._once()
            if last:
                return
            with self._changed:
                if self._backoff_seconds:
                    self._changed.wait_for(lambda: self._stopping, self._backoff_seconds)
                elif not done:
                    self._changed.wait_for(lambda: self._woken or self._stopping, LOOK_SECONDS)
                self._woken = False

    def _once(self) -> bool:
        """Upload what is to be uploaded next; False where there is nothing, or not yet."""
        manifest = self._next()
        if manifest is None:
            return False
        self._busy = manifest.step
        started = self._clock.monotonic()
        try:
            tier = self._tier = self._tier or self._open_tier()
            tier.put_marks(self._config.directory)
            if tier.is_complete(manifest):  # by another engine, or by one before us
                _remember(self._uploaded, (manifest.step, manifest.attempt), UPLOADED_MAX)
            elif self._upload(tier, manifest):
                self._complete(tier, manifest, self._clock.monotonic() - started)
            else:
                return False
        except FileNotFoundError:
            return False  # retention has removed the step under our hands: a newer one is complete
        except (CheckpointError, ModuleNotFoundError, OSError) as error:
            self._failed(manifest, error)
            return False
        finally:
            self._busy = None
        self._backoff_seconds, self.error, self._told = 0.0, "", ""
        return True

    def _next(self) -> Manifest | None:
        """The newest complete step; after it those that are kept for ever."""
        every = self._config.keep_every_steps
        try:
            steps = complete_steps(self._config.directory)[::-1]
            wanted = steps[:1] + [record for record in steps[1:] if every and record.step % every == 0]
            for record in wanted:
                if (record.step, record.attempt) not in self._uploaded:
                    return read_manifest(self._config.directory, record.step)
            return None
        except (CheckpointDamaged, OSError) as error:
            self.error = f"the checkpoint folder cannot be read: {error}"
            return None

    def _upload(self, tier: ObjectTier, manifest: Manifest) -> bool:
        """Bring what is ours to the store, and what nobody brings; whether all is there."""
        key = (manifest.step, manifest.attempt)
        since = self._seen.setdefault(key, self._clock.monotonic())
        while len(self._seen) > UPLOADED_MAX:
            self._seen.popitem(last=False)
        theirs_too = self._clock.monotonic() - since >= self._config.takeover_seconds
        for record in tier.missing(manifest):
            with self._changed:
                own = (*key, record.rank) in self._own
            if own or theirs_too:
                tier.put_shard(self._config.directory, record, self._wait_for_turn)
        return tier.finish(manifest)

    def _complete(self, tier: ObjectTier, manifest: Manifest, seconds: float) -> None:
        _remember(self._uploaded, (manifest.step, manifest.attempt), UPLOADED_MAX)
        now = self._clock.now()
        self._emit(
            EngineEvent(
                "complete", manifest.step, manifest.attempt, WHOLE_STEP, "object", now,
                size_bytes=manifest.size_bytes, seconds=seconds, reason=f"in {tier.url}",
            )
        )  # fmt: skip
        reason = f"the newest {self._config.retention_steps} are kept"
        for step in self._retain(tier):
            now = self._clock.now()
            self._emit(EngineEvent("evicted", step, manifest.attempt, WHOLE_STEP, "object", now, reason=reason))

    def _retain(self, tier: ObjectTier) -> list[int]:
        good = tier.complete_steps()
        if len(good) < self._config.retention_steps:
            return []
        verified = {(entry.step, entry.attempt) for entry in read_verifications(self._config.directory)}
        keep = {record.step for record in good[-self._config.retention_steps :]}
        every = self._config.keep_every_steps
        keep |= {record.step for record in good if every and record.step % every == 0}
        keep |= {record.step for record in [r for r in good if (r.step, r.attempt) in verified][-1:]}
        unread = tier.steps()[:-STEPS_READ_MAX]  # so old that their manifests are not asked for any more
        keep |= {step for step in unread if (every and step % every == 0) or step in {mark for mark, _ in verified}}
        return tier.retain(frozenset(keep), good[-1])

    def _failed(self, manifest: Manifest, error: Exception) -> None:
        doubled = max(self._backoff_seconds * 2, self._config.retry_seconds_min)
        self._backoff_seconds = min(doubled, self._config.retry_seconds_max)
        self.error = f"step {manifest.step} could not be brought to the object store: {error}"
        if self.error != self._told:  # once for each cause, not for each try
            self._told = self.error
            self._emit(
                EngineEvent(
                    "failed", manifest.step, manifest.attempt, WHOLE_STEP, "object", self._clock.now(),
                    reason=f"{self.error}; the disk keeps it, next try in {self._backoff_seconds:g} s",
                )
            )  # fmt: skip

    def _wait_for_turn(self, size_bytes: int) -> None:
        if self._bucket is not None:
            self._leaving.wait(self._bucket.take(size_bytes))


def _remember(book: OrderedDict[Key, None], key: Key, entries_max: int) -> None:
    book[key] = None
    while len(book) > entries_max:
        book.popitem(last=False)
