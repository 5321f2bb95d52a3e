"""Shards that only the object store has are fetched in the background while the ranks that want them wait."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .clock import Clock
from .commit import finish_step
from .errors import CheckpointDamaged, CheckpointError
from .manifest import Manifest, StepRecord
from .objecttier import ObjectTier
from .storage import Storage

LISTING_SECONDS_MAX = 10.0  # for so long a listing of the store is believed
FETCHES_MAX = 256  # that are remembered


@dataclass(slots=True)
class Fetch:
    """One rank's files of one step. `error` is empty while it runs and where it went well."""

    step: int
    attempt: int
    rank: int
    done: bool = False
    error: str = ""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, seconds: float) -> bool:
        """Whether it is over by then."""
        with self.changed:
            return self.changed.wait_for(lambda: self.done, seconds)


class Downloader:
    """What the object store has for the ranks of this node. May be used from several threads."""

    def __init__(
        self, directory: Path, writer: str, storage: Storage, open_tier: Callable[[], ObjectTier], clock: Clock
    ) -> None:
        self._directory = directory
        self._writer = writer
        self._storage = storage
        self._open_tier = open_tier
        self._clock = clock
        self._lock = threading.Lock()
        self._tier: ObjectTier | None = None
        self._listing: list[StepRecord] = []
        self._listed_at: float | None = None
        self._fetches: OrderedDict[tuple[int, int, int], Fetch] = OrderedDict()

    def complete_steps(self) -> list[StepRecord]:
        """The steps in the store that a job may resume from, ascending; what the store knows of good and bad steps
        is then known to the disk. Raises ObjectStoreError, CheckpointDamaged, OSError."""
        with self._lock:
            now = self._clock.monotonic()
            if self._listed_at is None or now - self._listed_at > LISTING_SECONDS_MAX:
                tier = self._opened()
                tier.fetch_marks(self._storage, self._directory, writer=self._writer)
                self._listing = tier.complete_steps()
                self._listed_at = now
            return list(self._listing)

    def newest(
        self, world_size: int, step: int | None = None, without: frozenset[int] = frozenset()
    ) -> StepRecord | None:
        """The newest step of so many ranks, or `step`; None where the store has none."""
        records = [
            record
            for record in self.complete_steps()
            if record.world_size == world_size and record.step not in without and step in (None, record.step)
        ]
        return records[-1] if records else None

    def fetch(self, step: int, attempt: int, rank: int) -> Fetch:
        """Begin to bring a rank's files to the disk, or look at how that goes. One that has failed is begun again."""
        key = (step, attempt, rank)
        with self._lock:
            running = self._fetches.get(key)
            if running is not None and not running.error:
                return running
            fetch = self._fetches[key] = Fetch(step, attempt, rank)
            while len(self._fetches) > FETCHES_MAX:
                self._fetches.popitem(last=False)
        threading.Thread(target=self._run, args=(fetch,), name=f"fetch-{step}-{rank}", daemon=True).start()
        return fetch

    def _run(self, fetch: Fetch) -> None:
        error = ""
        try:
            with self._lock:
                tier = self._opened()
            manifest = tier.manifest(fetch.step)
            if manifest is None or manifest.attempt != fetch.attempt or fetch.rank >= manifest.world_size:
                raise CheckpointDamaged(
                    f"step {fetch.step} in {tier.url} is no longer the one of attempt {fetch.attempt}"
                )
            # several ranks may want the same file at once: each has temporary names of its own
            writer = f"{fetch.rank}.{self._writer}"
            tier.fetch(self._storage, self._directory, manifest, fetch.rank, writer=writer)
            self._complete(manifest)
        except (CheckpointError, ModuleNotFoundError, OSError) as caught:
            error = f"step {fetch.step} could not be fetched from the object store: {caught}"
        with fetch.changed:
            fetch.error, fetch.done = error, True
            fetch.changed.notify_all()

    def _complete(self, manifest: Manifest) -> None:
        """Where all ranks' shards have come to a folder that nodes share, the step is complete on disk again."""
        finish_step(self._storage, self._directory, manifest.step, manifest.attempt, writer=self._writer)

    def _opened(self) -> ObjectTier:
        self._tier = self._tier or self._open_tier()
        return self._tier
