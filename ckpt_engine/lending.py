"""What one rank is lent by its engine: a copy of a shard, compared with its checksum before or after it is handed over.

A copy in memory is leased while the rank reads it, and while views of it are in use: nobody writes there meanwhile.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import wire
from .checksum import crc32_of, threads_here
from .errors import CheckpointDamaged, CheckpointError, EngineRefused
from .event import TIERS, EngineEvent, Tier
from .gathering import Gathering
from .memfd import MemfdIdentity, Segment
from .quarantine import set_aside
from .rejection import REASON_CHARACTERS_MAX, read_or_reject_all
from .ring_gather import Borrowed
from .segment import SlotHeader, payload_region, read_sealed
from .selection import Offer, Wanted, candidates_of, offers_for
from .shardfile import Identity, identity_of
from .slots import Loan, Slot
from .wire import Fields

if TYPE_CHECKING:
    from .session import EngineParts, Reply

CHOICES_MAX = 16  # copies that are found damaged before one load gives up
CANDIDATES_MAX = 64
LOANS_MAX = 64  # of one connection
FETCH_WAIT_SECONDS = 20.0  # for the object store, before the rank is told to ask again


@dataclass(slots=True, eq=False)
class Reading:
    """The copy in memory that the rank has now."""

    slot: Slot
    header: SlotHeader
    segment: Segment


class Proof:
    """The comparison of a copy with its checksum, in a thread of its own; `wait` has what came of it.

    It holds a lease of its own, because the rank may let go before it is done.
    """

    def __init__(self, lending: Lending, reading: Reading) -> None:
        self._lending = lending
        self._reading: Reading | None = reading  # until it has begun
        self._reason: str | None = None
        self._done = threading.Event()

    def begin(self) -> None:
        """Compare from now on, if that has not begun."""
        reading, self._reading = self._reading, None
        if reading is not None:
            # Thread.start would wait until it runs, and on busy cores the rank with it.
            _thread.start_new_thread(self._run, (self._lending, reading))

    def drop(self) -> None:
        """What has not begun is not needed any more: the rank does not use the copy."""
        reading, self._reading = self._reading, None
        if reading is not None:
            self._lending.release(reading)
            self._done.set()

    def wait(self, timeout_seconds: float) -> str | None:
        """Empty where the copy is what was saved, else why not; None while that is not known."""
        self._done.wait(timeout_seconds)
        return self._reason

    def _run(self, lending: Lending, reading: Reading) -> None:
        try:
            self._reason = lending.compare(reading)
        finally:
            lending.release(reading)
            self._done.set()


class Lending:
    """One connection's loans. Its requests come one after another."""

    def __init__(self, parts: EngineParts, session: int) -> None:
        self._parts = parts
        self._session = session
        self.gathering = Gathering(parts, self._borrow)
        self._reading: Reading | None = None
        self._threads = 1  # of one comparison
        self._proof: Proof | None = None  # of what was loaded last, if that was to be verified later
        self._loans: dict[MemfdIdentity, Loan] = {}
        self._passed: frozenset[tuple[str, int, int]] = frozenset()  # copies that the last load could not use

    def load(self, identity: Identity, fields: Fields) -> Reply:
        """The copy that the rank gets: `tier` is empty where there is none, memory comes with a descriptor."""
        self.stop_reading()
        self._proof = None
        wanted = self._wanted(identity, fields)
        verify = fields.get("verify")
        later = verify in ("deferred", "beside")
        # Who waits for it gets all threads; who does not, needs the cores himself meanwhile.
        self._threads = 1 if verify == "deferred" else threads_here()
        for _ in range(CHOICES_MAX):
            common = wanted.step is None and identity.world_size > 1  # who asks so has not agreed with the others
            offers = offers_for(
                self._parts.table, self._parts.directory, wanted, self._elsewhere(wanted), common_only=common
            )
            if not offers:
                return {"tier": ""}, []
            reply = self._serve(identity, offers[0], later)
            if reply is not None:
                self._passed = wanted.without
                return reply
            best = offers[0]
            wanted = replace(wanted, without=wanted.without | {(best.tier, best.attempt, best.step)})
        raise CheckpointDamaged(f"{CHOICES_MAX} copies could not be used; look at the host's memory")

    def candidates(self, identity: Identity, fields: Fields) -> Reply:
        """All (attempt, step) that the rank could load, for an agreement with the others."""
        wanted = self._wanted(identity, fields)
        offers = offers_for(self._parts.table, self._parts.directory, wanted, self._elsewhere(wanted))
        found = candidates_of(offers)
        return {"candidates": [[item.attempt, item.step] for item in found[:CANDIDATES_MAX]]}, []

    def hold(self, identity: Identity, fields: Fields) -> Reply:
        """The rank says in which segments views of it are in use, all of them: nobody writes there from now on.

        Those that it no longer names are let go.
        """
        named = _memfds(fields)
        for memfd in self._loans.keys() - named:
            self._parts.table.give_back(self._loans.pop(memfd))
        for memfd in named - self._loans.keys():
            loan = self._parts.table.lend(identity.rank, memfd)
            if loan is not None:
                self._loans[memfd] = loan
        return {"held": sorted(map(list, self._loans))}, []

    def await_proof(self, identity: Identity, fields: Fields) -> Reply:
        """Whether what was loaded with deferred verification is what was saved; waits until that is known."""
        if self._proof is None:
            raise EngineRefused("nothing was loaded over this connection that is still to be verified")
        self._proof.begin()
        reason = self._proof.wait(max(wire.number(fields, "timeout_seconds"), 0.0))
        return {"settled": reason is not None, "reason": reason or ""}, []

    def loaded(self, identity: Identity, fields: Fields) -> Reply:
        if self._proof is not None:
            self._proof.begin()
        self.stop_reading()
        step, attempt = wire.whole(fields, "step"), wire.whole(fields, "attempt")
        self._parts.table.resumed(self._session, identity, step)
        tier, now = _tier(fields), self._parts.clock.now()
        if self._passed:
            named = ", ".join(f"step {passed[2]} in {passed[0]}" for passed in sorted(self._passed))
            reason = f"could not be used: {named}"[:REASON_CHARACTERS_MAX]
            self._parts.emit(EngineEvent("fallback", step, attempt, identity.rank, tier, now, reason=reason))
        self._parts.emit(
            EngineEvent(
                "loaded", step, identity.attempt, identity.rank, tier, now,
                size_bytes=wire.whole(fields, "size_bytes"), seconds=wire.number(fields, "seconds"),
                reason=f"saved by attempt {attempt}",
            )
        )  # fmt: skip
        return {}, []

    def damaged(self, identity: Identity, fields: Fields) -> Reply:
        """The rank found that what it was given is not what was saved: it is set aside."""
        tier, step, attempt = _tier(fields), wire.whole(fields, "step"), wire.whole(fields, "attempt")
        reason = wire.text(fields, "reason")[:REASON_CHARACTERS_MAX]
        reading = self._reading if tier in ("memory", "peer") else None
        found_here = reading is not None and reading.slot.header != reading.header  # by the comparison beside it
        if reading is not None:
            self._parts.table.void(reading.slot, reading.header)
        self.stop_reading()
        if found_here:
            return {}, []
        if tier in ("disk", "object") and set_aside(self._parts.storage, self._parts.directory, step, identity.rank):
            reason = f"{reason}; the file is set aside"[:REASON_CHARACTERS_MAX]
        now = self._parts.clock.now()
        self._parts.emit(EngineEvent("damaged", step, attempt, identity.rank, tier, now, reason=reason))
        return {}, []

    def return_unused(self, identity: Identity, fields: Fields) -> Reply:
        """The rank did not use what it was lent."""
        self.stop_reading()
        return {}, []

    def compare(self, reading: Reading) -> str:
        """Compare a copy with its checksum, which is computed here where nobody has done so; why it is not what was
        saved, or empty. What is damaged is never lent again."""
        header, table = reading.header, self._parts.table
        try:
            if read_sealed(reading.segment.view) != header:
                raise CheckpointDamaged(f"the slot of step {header.step} is another one's by its header")
            crc = crc32_of(payload_region(reading.segment.view, header), self._threads)
            table.confirm_checksum(reading.slot, header, crc)
        except CheckpointDamaged as error:
            table.void(reading.slot, header)
            reason = str(error)[:REASON_CHARACTERS_MAX]
            now = self._parts.clock.now()
            self._parts.emit(
                EngineEvent("damaged", header.step, header.attempt, header.rank, "memory", now, reason=reason)
            )
            return reason
        return ""

    def release(self, reading: Reading) -> None:
        """End one lease."""
        self._parts.table.release(reading.slot)

    def stop_reading(self) -> None:
        self.gathering.release()
        if self._proof is not None:
            self._proof.drop()
        if self._reading is not None:
            reading, self._reading = self._reading, None
            self.release(reading)

    def hang_up(self) -> None:
        """The rank is gone, and its views with it."""
        self.stop_reading()
        loans, self._loans = list(self._loans.values()), {}
        for loan in loans:
            self._parts.table.give_back(loan)

    def _serve(self, identity: Identity, offer: Offer, later: bool) -> Reply | None:
        """Hand over one copy; None where it cannot be had after all, and another must be looked for."""
        place: Fields = {"tier": offer.tier, "step": offer.step, "attempt": offer.attempt}
        if offer.tier == "disk":
            return place, []
        if offer.world_size:
            return {**place, "world_size": offer.world_size}, []
        if offer.tier == "object":
            return self._fetch(identity, offer, place)
        if offer.tier == "peer":
            assert self._parts.ring is not None
            if self._parts.ring.pull(self._session, identity, offer.attempt, offer.step):
                return None  # the ring has told why
        found = offer.memory or self._pulled(identity, offer)
        segment = None if found is None else self._parts.table.lease(*found)
        if found is None or segment is None:
            return None  # overwritten meanwhile
        reading = Reading(*found, segment)
        known = reading.slot.checksum
        later = later and offer.tier != "peer"  # of which the ring has just compared every piece
        if later:
            self._proof = Proof(self, self._again(reading))
            if self._threads > 1:
                self._proof.begin()  # else the rank is to have its views first: they are what it waits for
        elif offer.tier != "peer" and self.compare(reading):
            self.release(reading)
            return None
        self._reading = reading
        crc32 = known if later else reading.slot.checksum
        reply = {**place, "slot": reading.slot.index, "crc32": crc32, "verified": not later}
        return reply, [segment.duplicate()]

    def _pulled(self, identity: Identity, offer: Offer) -> tuple[Slot, SlotHeader] | None:
        """Where in our memory a shard of a peer is now."""
        wanted = Wanted(identity, offer.step, offer.attempt)
        offers = offers_for(self._parts.table, self._parts.directory, wanted)
        return offers[0].memory if offers else None

    def _borrow(self, wanted: Identity) -> Borrowed | None:
        """A shard of any rank that is in a slot of this engine, compared with its checksum; None where none is."""
        for _, slot, header in self._parts.table.sealed():
            segment = self._parts.table.lease(slot, header) if identity_of(header) == wanted else None
            if segment is None:
                continue
            reading = Reading(slot, header, segment)
            if not self.compare(reading):
                return Borrowed(header, segment, lambda reading=reading: self.release(reading))  # type: ignore[misc]
            self.release(reading)
        return None

    def _again(self, reading: Reading) -> Reading:
        """With a lease of its own: the rank may let go before the comparison is done."""
        segment = self._parts.table.lease(reading.slot, reading.header)
        assert segment is not None, "it is leased already"
        return Reading(reading.slot, reading.header, segment)

    def _fetch(self, identity: Identity, offer: Offer, place: Fields) -> Reply | None:
        """Bring a shard from the object store to the disk, for a while; then the rank must ask again."""
        assert self._parts.downloader is not None
        fetch = self._parts.downloader.fetch(offer.step, offer.attempt, identity.rank)
        if not fetch.wait(FETCH_WAIT_SECONDS):
            return {**place, "pending": True}, []
        return None if fetch.error else (place, [])

    def _elsewhere(self, wanted: Wanted) -> list[Offer]:
        """What peers and the object store have; nobody is asked where exactly what is wanted is in our memory."""
        parts, identity = self._parts, wanted.identity
        here = offers_for(parts.table, parts.directory, wanted) if wanted.attempt is not None else []
        if here and here[0].tier == "memory":
            return []
        found = self.gathering.offers(wanted)
        if parts.ring is not None:
            holdings = parts.ring.copies_of(identity.rank, identity.world_size)
            found += [Offer("peer", *holding.newness) for holding in holdings]
        if parts.downloader is not None:
            with contextlib.suppress(CheckpointError, OSError, ModuleNotFoundError):  # a store that is away has nothing
                records = parts.downloader.complete_steps()
                same = [record for record in records if record.world_size == identity.world_size]
                found += [Offer("object", record.attempt, record.step) for record in same]
        return found

    def _wanted(self, identity: Identity, fields: Fields) -> Wanted:
        self._parts.table.set_rejections(read_or_reject_all(self._parts.directory))
        return Wanted(
            identity,
            wire.optional_whole(fields, "step"),
            wire.optional_whole(fields, "attempt"),
            _without(fields),
            fields.get("policy") == "verified",
            fields.get("reshard") is True,
        )


def _tier(fields: Fields) -> Tier:
    tier = TIERS.get(wire.text(fields, "tier"))
    if tier is None:
        raise EngineRefused(f"there is no tier {fields['tier']!r:.40}")
    return tier


def _memfds(fields: Fields) -> set[MemfdIdentity]:
    rows = fields.get("memfds", [])
    if not isinstance(rows, list) or len(rows) > LOANS_MAX:
        raise EngineRefused(f"the segments in use must be a list of at most {LOANS_MAX}; let go of some views")
    found = set()
    for row in rows:
        match row:
            case [int(device), int(inode)]:
                found.add((device, inode))
            case _:
                raise EngineRefused("a segment in use must be named by device and inode")
    return found


def _without(fields: Fields) -> frozenset[tuple[str, int, int]]:
    rows = fields.get("without", [])
    if not isinstance(rows, list):
        raise EngineRefused("what a load is to do without must be a list of (tier, attempt, step)")
    found = set()
    for row in rows:
        match row:
            case [str(tier), int(attempt), int(step)]:
                found.add((tier, attempt, step))
            case _:
                raise EngineRefused("what a load is to do without must be a list of (tier, attempt, step)")
    return frozenset(found)
