"""How a rank loads: the step that all ranks agree on, from the first tier that has it whole, in place or as views."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .agreement import Agreement
from .checksum import threads_here
from .clock import Clock
from .copies import Copies, Copy, Plan
from .errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    EngineRefused,
    EngineUnavailable,
    NoAgreement,
    StateMismatch,
)
from .event import Tier
from .fetching import LoadedShard
from .link import EngineLink, Posted
from .memfd import MemfdIdentity, memfd_identity
from .resharding import targets_of
from .restore import Restorer, as_views
from .selection import Wanted
from .shardfile import Identity
from .tensors import TensorDoor
from .verifying import VERIFY_SECONDS_MAX, Unverified, Verifying

_log = logging.getLogger(__name__)

AGREE_SECONDS_MAX = 600.0

Policy = Literal["newest", "verified"] | int
Verify = Literal["first", "deferred"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded. `verified`: its checksum was compared before a byte was handed over."""

    step: int
    tier: Tier
    seconds: float
    verified: bool
    attempt: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Views:
    """A state whose tensors are views of the checkpoint itself, and what was loaded. See `Loader.load_views`."""

    state: dict[str, Any]
    report: LoadReport


class Loader:
    """The loading half of a `Checkpointer`, which holds its lock around every call.

    Ranks that ask for the newest step wait `agree_seconds_max` for each other.
    """

    def __init__(
        self,
        door: TensorDoor,
        identity: Identity,
        clock: Clock,
        link: EngineLink | None,
        directory: Path | None,
        agree_seconds_max: float = AGREE_SECONDS_MAX,
    ) -> None:
        self._door = door
        self._identity = identity
        self._clock = clock
        self._link = link
        self._threads = threads_here()
        self._copies = Copies(identity, link, directory, self._threads)
        self._verifying = Verifying()
        self._agree_seconds_max = agree_seconds_max
        self._nonce = f"{os.getpid():x}{int(clock.now() * 1e6):x}"[-32:]
        self._agreements = 0
        self._in_use: dict[MemfdIdentity, int] = {}  # segments that views of ours look at, and by how many mappings
        self._ended: deque[MemfdIdentity] = deque()  # mappings that have gone since that was last looked at
        self._named: set[MemfdIdentity] = set()  # what the engine was last told
        if link is not None:
            link.in_use = self._name

    def load(self, into: dict[str, Any], policy: Policy | None, verify: Verify) -> LoadReport | None:
        """Make `into` what it was at the step that `policy` names; None where not all ranks have one to load.

        "newest" and "verified" (of the steps that training has proved good) are the same step on all ranks: all
        of them call this together, and agree through the folder that they share. A number is that step, whatever
        the other ranks do. A copy that is damaged is set aside, and the next tier asked: memory, then disk; asked
        for the newest, all ranks then go back to one step that is whole for each of them.

        Verified "first", no byte is written before all of them have been compared with their checksums. With
        "deferred" a copy in memory is written at once, the engine compares it meanwhile, and optimizers in `into`
        take no step before that is done (see `verify_before`).

        Raises StateMismatch, and then nothing is written; CheckpointDamaged where no tier has good bytes,
        CheckpointNotFound, NoAgreement.
        """
        started = self._clock.monotonic()

        def plan(copy: Copy) -> Restorer:
            restorer = Restorer(self._door, copy.shard, self._threads)
            restorer.plan(copy.tree, into)
            return restorer

        self._copies.targets = lambda: targets_of(self._door, into)
        try:
            copy = self._find(_policy(policy), _deferred(verify), plan)
        finally:
            self._copies.targets = None
        if copy is None:
            return None
        with self._copies.given_back_on_error(copy):
            (copy.plan or plan(copy)).write()
        if not copy.source.verified:
            for target in into.values():
                if callable(getattr(target, "register_step_pre_hook", None)):
                    self._verifying.guard(target)
        return self._done(copy, started)

    def load_views(self, policy: Policy | None, verify: Verify) -> Views | None:
        """The state at the step that `policy` names (as in `load`), its tensors lying where the checkpoint does.

        From memory, nothing is copied: the tensors are views of the engine's slot, private to this process. To
        write to them is allowed and changes no checkpoint: what is written becomes a page of this process. The slot
        stays as it is for as long as one of them lives, also through saves, which get other memory meanwhile; where
        the engine's `memory_bytes_max` has no room for that, a save is skipped and says so. Drop the last of the
        views to give the memory back, with the next save or load. From disk, they lie in this process's own memory.
        """
        started = self._clock.monotonic()
        held: list[tuple[MemfdIdentity, Posted]] = []

        def look(copy: Copy) -> dict[str, Any]:
            if copy.shard.descriptor >= 0:
                held.append(self._hold(copy.shard))  # the engine does that while we make the views
            return as_views(self._door, copy.shard, copy.tree)

        copy = self._find(_policy(policy), _deferred(verify), look)
        if copy is None:
            return None
        with self._copies.given_back_on_error(copy):
            state: dict[str, Any] = look(copy) if copy.plan is None else copy.plan
            if copy.shard.descriptor >= 0:
                self._await_held(*held[-1])
        return Views(state, self._done(copy, started))

    def await_verified(self, timeout_seconds: float = VERIFY_SECONDS_MAX) -> None:
        """Return once what was loaded with deferred verification has been compared with its checksum.

        Raises CheckpointDamaged where it is not what was saved (it is set aside; start again, and the next load takes
        another copy), EngineUnavailable where that is not known within the time.
        """
        self._verifying.settle(timeout_seconds)

    def verify_before(self, optimizer: Any) -> None:
        """Let `optimizer` call `await_verified` before each step: bad bytes are found before they are trained on."""
        self._verifying.guard(optimizer)

    def settle_views(self) -> None:
        """Tell the engine which views are let go, before it is asked for a slot. A new one is told when we meet it."""
        while self._ended:
            memfd = self._ended.popleft()
            self._in_use[memfd] -= 1
            if not self._in_use[memfd]:
                del self._in_use[memfd]
        if self._named != self._in_use.keys():
            self._copies.tell({"op": "hold", "memfds": self._name()})

    def looks_at(self, descriptor: int) -> bool:
        """Whether views of ours look at this segment: nothing may be written there, whoever grants it."""
        return descriptor >= 0 and bool(self._in_use) and memfd_identity(descriptor) in self._in_use

    def close(self) -> None:
        """Before the engine is let go: what it was to verify is settled, and whoever asks later gets the answer."""
        with contextlib.suppress(CheckpointDamaged, EngineUnavailable):
            self._verifying.settle()

    def _find(self, policy: Policy, later: bool, plan: Plan) -> Copy | None:
        """The copy to load; None where there is nothing to load. Raises as `load`.

        `plan` is what can be done of the load while the engine compares the copy with its checksum.
        """
        self.settle_views()
        self._verifying.before_next_load()
        wanted = Wanted(
            self._identity, verified_only=policy == "verified", any_world_size=self._copies.targets is not None
        )
        if isinstance(policy, int):
            copy = self._copies.fetch(replace(wanted, step=policy), later, plan)
            if copy is None:
                raise CheckpointNotFound(self._copies.why_not(policy))
            return copy
        if self._identity.world_size == 1:
            copy = self._copies.fetch(wanted, later, plan)
        else:
            copy = self._agreed(wanted, later)
        if copy is None and wanted.verified_only:
            unverified = self._copies.candidates(replace(wanted, verified_only=False))
            if unverified:
                there = ", ".join(str(candidate.step) for candidate in unverified)
                raise CheckpointNotFound(f"no step is verified yet; there are unverified ones: {there}")
        return copy

    def _agreed(self, wanted: Wanted, later: bool) -> Copy | None:
        """The newest step that all ranks have whole."""
        found = self._copies.candidates(wanted)
        if self._copies.folder is None:
            raise NoAgreement("the ranks share no checkpoint folder to agree in; give one, or load a step by number")
        self._agreements += 1
        agreement = Agreement(
            self._copies.folder, self._identity, self._nonce, self._agreements,
            clock=self._clock, seconds_max=self._agree_seconds_max,
        )  # fmt: skip
        damaged: CheckpointError | None = None
        try:
            common = agreement.common(found)
            for number, candidate in enumerate(common):
                copy = None
                try:
                    copy = self._copies.fetch(replace(wanted, step=candidate.step, attempt=candidate.attempt), later)
                except (CheckpointDamaged, EngineRefused, EngineUnavailable, StateMismatch) as error:
                    damaged = error  # and the others must hear it
                if self._is_good_for_all(agreement, number, copy):
                    return copy
                _log.warning("step %d is not whole for every rank; the one before it is tried", candidate.step)
        except OSError as error:
            raise NoAgreement(f"the folder in which the ranks agree cannot be used: {error}") from error
        if isinstance(damaged, StateMismatch):
            raise damaged
        if common:
            sentence = f"none of the {len(common)} steps that all ranks have is whole for each of them"
            raise CheckpointDamaged(sentence) from damaged
        if found:
            _log.warning("this rank has steps to load, but not all ranks have the same; nothing is loaded")
        return None

    def _is_good_for_all(self, agreement: Agreement, number: int, copy: Copy | None) -> bool:
        with contextlib.ExitStack() as stack:
            if copy is not None:
                stack.callback(self._copies.give_back, copy)
            good = agreement.vote(number, copy is not None)
            if good:
                stack.pop_all()
            return good

    def _hold(self, shard: LoadedShard) -> tuple[MemfdIdentity, Posted]:
        """Ask that the slot is not written while one tensor over it lives. Raises EngineRefused, EngineUnavailable."""
        assert self._link is not None
        memfd = memfd_identity(shard.descriptor)
        self._in_use[memfd] = self._in_use.get(memfd, 0) + 1
        # Called wherever the last tensor goes, in the middle of anything: it may only make a note.
        weakref.finalize(shard.memory, self._ended.append, memfd).atexit = False
        return memfd, self._link.post({"op": "hold", "memfds": self._name()})

    def _await_held(self, memfd: MemfdIdentity, posted: Posted) -> None:
        """That the engine does so. Raises EngineRefused, EngineUnavailable."""
        assert self._link is not None
        reply, _ = self._link.collect(posted)
        if list(memfd) not in reply.get("held", []):
            raise EngineRefused("the engine does not keep the slot for views of it; load into tensors instead")

    def _name(self) -> list[list[int]]:
        """The segments in use, as the engine is told."""
        self._named = set(self._in_use)
        return [list(memfd) for memfd in self._named]

    def _done(self, copy: Copy, started: float) -> LoadReport:
        source, shard = copy.source, copy.shard
        if not source.verified:
            wanted = self._copies.stamped(source)
            self._verifying.begin(Unverified(wanted, shard.descriptor, source.crc32, self._link, self._threads))
            shard.descriptor = -1  # it is needed until then
        shard.close()
        seconds, size_bytes = self._clock.monotonic() - started, shard.layout.payload_bytes
        self._copies.tell_aside(
            {
                "op": "loaded", "tier": source.tier, "step": source.step, "attempt": source.attempt,
                "seconds": seconds, "size_bytes": size_bytes,
            }
        )  # fmt: skip
        return LoadReport(source.step, source.tier, seconds, source.verified, source.attempt, size_bytes)


def _policy(policy: Policy | None) -> Policy:
    if policy is None:
        return "newest"
    if isinstance(policy, int) or policy in ("newest", "verified"):
        return policy
    raise ValueError(f"policy must be 'newest', 'verified' or a step, not {policy!r:.50}")


def _deferred(verify: Verify) -> bool:
    if verify not in ("first", "deferred"):
        raise ValueError(f"verify must be 'first' or 'deferred', not {verify!r:.50}")
    return verify == "deferred"
