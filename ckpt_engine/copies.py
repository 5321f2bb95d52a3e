"""One rank's way to the copies of its shard: its engine says where the best one is; without one, the folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import wire
from .agreement import Candidate
from .errors import CheckpointDamaged, EngineRefused, EngineUnavailable
from .event import TIERS, Tier
from .fetching import LoadedShard, read_from_disk, read_from_memory
from .link import EngineLink
from .manifest import complete_manifests, complete_steps, read_manifest, rejection_of
from .memory_shards import CannotBeHad, EngineShards
from .quarantine import set_aside
from .resharding import DiskShards, Targets, read_resharded
from .selection import Wanted, candidates_of, offers_for
from .shardfile import Identity
from .storage import Storage
from .tree import load_tree
from .verifying import VERIFY_SECONDS_MAX, verdict_on

_log = logging.getLogger(__name__)

TRIES_MAX = 16  # copies of one step, damaged each
PENDING_MAX = 1000  # answers that a copy is still on its way; each takes some seconds


@dataclass(frozen=True, slots=True)
class Source:
    """A copy that may be loaded; `descriptor` is ours to close, -1 on disk.

    `verified`: it has been compared with its checksum, or will be before it is handed over.
    """

    tier: Tier
    step: int
    attempt: int
    descriptor: int = -1
    verified: bool = True
    crc32: int | None = None
    world_size: int = 0  # of how many ranks the shards are, where this rank's is cut from them in memory; 0: its own


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that has been opened, is the right one, and is whole, unless that is found out later."""

    source: Source
    shard: LoadedShard
    tree: Any
    plan: Any = None  # what the caller made of it while it was compared


Plan = Callable[[Copy], Any]


class Copies:
    """What `identity` can load. `link` is None where there is no engine."""

    def __init__(self, identity: Identity, link: EngineLink | None, directory: Path | None, threads: int) -> None:
        self._identity = identity
        self._threads = threads
        self._link = link
        self._directory = directory
        self.targets: Callable[[], Targets] | None = None  # what is loaded into, where other ranks' shards may be cut

    @property
    def folder(self) -> Path | None:
        """The job's checkpoint folder, where it is known: the engine tells it with its first answer."""
        if self._directory is None and self._link is not None and self._link.directory is not None:
            self._directory = Path(self._link.directory)
        return self._directory

    def fetch(self, wanted: Wanted, later: bool, plan: Plan | None = None) -> Copy | None:
        """The first copy that is whole, tier after tier; None where no tier has any.

        `later`: one in memory is verified after it has been handed over. `plan` is called before it is known to be
        whole. Raises CheckpointDamaged where all that they have is damaged, and what `plan` raises.
        """
        damaged: CheckpointDamaged | None = None
        for _ in range(TRIES_MAX):
            source = self._ask(wanted, later)
            if source is None:
                break
            try:
                return self._compared(self._open(source), later, plan)
            except CheckpointDamaged as error:
                damaged = error
                self._set_aside(source, error)
                wanted = replace(wanted, without=wanted.without | {(source.tier, source.attempt, source.step)})
        if damaged is not None:
            raise damaged
        return None

    def candidates(self, wanted: Wanted) -> list[Candidate]:
        """All steps that this rank could load, newest first, as far as is known without reading them."""
        if self._link is not None:
            with contextlib.suppress(EngineUnavailable):
                reply, descriptors = self._link.ask({"op": "candidates", **_fields(wanted)})
                wire.close_all(descriptors)
                rows = reply.get("candidates")
                if isinstance(rows, list):
                    return [Candidate(attempt, step) for attempt, step in rows]
        return [] if self.folder is None else candidates_of(offers_for(None, self.folder, wanted))

    def stamped(self, source: Source) -> Identity:
        """Whose shard a copy must be."""
        return replace(self._identity, step=source.step, attempt=source.attempt)

    def give_back(self, copy: Copy) -> None:
        """It was not used after all."""
        copy.shard.close()
        if copy.source.descriptor >= 0:
            self.tell({"op": "return"})

    @contextlib.contextmanager
    def given_back_on_error(self, copy: Copy) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.give_back(copy)  # or no save would ever get the slot that we were lent
            raise

    def tell(self, fields: dict[str, Any]) -> bool:
        """False where the engine does not hear it: what was done is done, the story lacks a line."""
        if self._link is None:
            return False
        try:
            self._link.ask(fields)
        except (EngineUnavailable, EngineRefused) as error:
            _log.debug("the engine was not told %s: %s", fields["op"], error)
            return False
        return True

    def tell_aside(self, fields: dict[str, Any]) -> None:
        """As `tell`, without awaiting the answer."""
        if self._link is not None:
            with contextlib.suppress(EngineUnavailable, EngineRefused):
                self._link.post(fields)

    def why_not(self, step: int) -> str:
        """Why there is nothing to load of `step`."""
        directory = self.folder
        if directory is None:
            return f"step {step} is not in memory, and no checkpoint folder is known; give one"
        for manifest in complete_manifests(directory):
            if manifest.step != step:
                continue
            rejection = rejection_of(directory, step, manifest.attempt)
            if rejection is not None:
                return f"step {step} was rejected: {rejection.reason}"
            if manifest.world_size != self._identity.world_size:
                saved, now = manifest.world_size, self._identity.world_size
                return f"step {step} was saved by {saved} ranks, now there are {now}"
        there = ", ".join(str(record.step) for record in complete_steps(directory)) or "none"
        return f"step {step} is neither in memory nor complete under {directory}; complete there: {there}"

    def _ask(self, wanted: Wanted, later: bool) -> Source | None:
        if self._link is not None:
            request = {"op": "load", "verify": "deferred" if later else "beside", **_fields(wanted)}
            with contextlib.suppress(EngineUnavailable):
                for _ in range(PENDING_MAX):
                    reply, descriptors = self._link.ask(request)
                    if reply.get("pending") is not True:  # else the engine is still bringing it here
                        return _source_of(reply, descriptors)
                return None
        if self.folder is None:
            return None
        offers = offers_for(None, self.folder, wanted)
        return Source("disk", offers[0].step, offers[0].attempt) if offers else None

    def _open(self, source: Source) -> Copy:
        if source.world_size:
            shard = self._cut(source)
        elif source.descriptor >= 0:
            shard = read_from_memory(source.descriptor, self.stamped(source))
        else:
            assert self.folder is not None
            shard = self._read(self.folder, self.stamped(source))
        try:
            return Copy(source, shard, load_tree(shard.values, len(shard.layout.tensors)))
        except BaseException:
            shard.close()
            raise

    def _cut(self, source: Source) -> LoadedShard:
        """This rank's shard out of those of another number of ranks, which the engine has or fetches."""
        assert self._link is not None
        assert self.targets is not None, "nobody else is offered such a step"
        identity = self._identity
        shards = EngineShards(self._link, identity.job, source.attempt, source.step, source.world_size)
        return read_resharded(shards, identity.rank, identity.world_size, self.targets())

    def _read(self, directory: Path, wanted: Identity) -> LoadedShard:
        """The shard on disk; what another number of ranks saved is cut for this one."""
        if self.targets is not None:
            manifest = read_manifest(directory, wanted.step)
            same_attempt = manifest is not None and manifest.attempt == wanted.attempt
            if manifest is not None and same_attempt and manifest.world_size != wanted.world_size:
                shards = DiskShards(directory, manifest)
                return read_resharded(shards, wanted.rank, wanted.world_size, self.targets())
        return read_from_disk(directory, wanted)

    def _compared(self, copy: Copy, later: bool, plan: Plan | None) -> Copy:
        """With its plan, and compared with its checksum unless that is to be done later."""
        with self.given_back_on_error(copy):
            planned = None if plan is None else plan(copy)
            source = copy.source
            if not source.verified and not later:
                slot, wanted = copy.shard.descriptor, self.stamped(source)
                reason = verdict_on(wanted, slot, source.crc32, self._link, self._threads, VERIFY_SECONDS_MAX)
                if reason:
                    raise _FoundByEngine(reason)
                source = replace(source, verified=True)
            return replace(copy, source=source, plan=planned)

    def _set_aside(self, source: Source, error: CheckpointDamaged) -> None:
        """Never offer it again: the engine does it, or, without one, we."""
        _log.warning("step %d in %s cannot be used: %s", source.step, source.tier, error)
        if isinstance(error, _FoundByEngine | CannotBeHad):
            return
        told = self.tell(
            {
                "op": "damaged", "tier": source.tier, "step": source.step, "attempt": source.attempt,
                "reason": str(error),
            }
        )  # fmt: skip
        if not told and source.descriptor < 0 and self.folder is not None:
            with contextlib.suppress(OSError):  # a folder that we may only read
                set_aside(Storage(), self.folder, source.step, self._identity.rank)


class _FoundByEngine(CheckpointDamaged):
    """It has emptied the slot already, and told."""


def _source_of(reply: wire.Fields, descriptors: list[int]) -> Source | None:
    """What the engine offers. Raises WireError where it does not speak as we do."""
    try:
        tier = TIERS.get(wire.text(reply, "tier"))
        if tier is None:
            return None
        step, attempt = wire.whole(reply, "step"), wire.whole(reply, "attempt")
        if not descriptors:
            return Source(tier, step, attempt, world_size=wire.optional_whole(reply, "world_size") or 0)
        crc32 = wire.optional_whole(reply, "crc32")
        source = Source(tier, step, attempt, descriptors[0], reply.get("verified") is True, crc32)
        del descriptors[0]
        return source
    finally:
        wire.close_all(descriptors)


def _fields(wanted: Wanted) -> dict[str, Any]:
    """As they go over the wire."""
    return {
        "step": wanted.step,
        "attempt": wanted.attempt,
        "policy": "verified" if wanted.verified_only else "newest",
        "without": sorted(map(list, wanted.without)),
        "reshard": wanted.any_world_size,
    }
