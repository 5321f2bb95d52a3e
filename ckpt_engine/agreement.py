"""How the ranks of a job agree on the step that all of them load, through the folder they share and no collective.

One agreement is one call of `load` by every rank. Its files stand under `<directory>/agreements/a<attempt>/r<number>/`,
and their names say everything but the candidates:

    offer-<rank>-<nonce>.json       the steps that this rank could load; the nonce tells its process from earlier ones
    ready-<rank>-<digest>           this rank has seen the offers whose nonces have this digest, one of each rank
    vote-<digest>-<n>-<rank>-good   this rank has the n-th of the steps that all offer, whole and verified; or `bad`

When all ranks are ready with one digest, each of them knows the same offers, hence the same list of common steps,
newest first. They try one after the other: each fetches its shard and says whether it is whole, and the first step
that is good for all is the one. Nobody decides for others, so nobody has to be waited for who is not needed, and what
an earlier process of the same attempt left behind carries another nonce, hence another digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .clock import Clock
from .errors import CheckpointDamaged, NoAgreement
from .shardfile import Identity
from .storage import Storage

Answer = TypeVar("Answer")

FOLDER = "agreements"
CANDIDATES_MAX = 64
OFFER_BYTES_MAX = 64 << 10
LOOK_SECONDS_MIN = 0.005
LOOK_SECONDS_MAX = 0.25
RANKS_NAMED_MAX = 8
NONCE = re.compile(r"[0-9a-f]{1,32}\Z")
_OFFER = re.compile(r"offer-(\d{5,9})-([0-9a-f]{1,32})\.json\Z")
_READY = re.compile(r"ready-(\d{5,9})-([0-9a-f]{16})\Z")
_VOTE = re.compile(r"vote-([0-9a-f]{16})-(\d{4})-(\d{5,9})-(good|bad)\Z")
_ROUND = re.compile(r"r(\d{4,9})\Z")
_ATTEMPT = re.compile(r"a(\d{4,9})\Z")


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A step of one attempt. A later attempt is the newer, whatever its step."""

    attempt: int
    step: int


class Agreement:
    """One rank's part in one agreement. `number` counts the loads of this process that need one, from 1."""

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        nonce: str,
        number: int,
        *,
        clock: Clock,
        seconds_max: float,
        storage: Storage | None = None,
    ) -> None:
        if not NONCE.match(nonce):
            raise ValueError(f"a nonce has 1 to 32 hexadecimal digits, not {nonce!r:.50}")
        self._identity = identity
        self._nonce = nonce
        self._clock = clock
        self._seconds_max = seconds_max
        self._storage = storage or Storage()
        self._attempt_folder = directory / FOLDER / f"a{identity.attempt:04d}"
        self._number = number
        self._folder = self._attempt_folder / f"r{number:04d}"
        self._digest = ""
        self._pause = threading.Event()  # never set: a wait that is no sleep

    def common(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """What all ranks could load, newest first. Raises NoAgreement where a rank does not come, and OSError."""
        self._tidy()
        self._storage.make_folder(self._folder)
        self._offer(candidates)
        nonces = self._wait(self._settled, lambda: self._missing("has not asked for a checkpoint"))
        offered = [self._read_offer(rank, nonce) for rank, nonce in sorted(nonces.items())]
        return sorted(set.intersection(*offered), reverse=True)

    def vote(self, number: int, good: bool) -> bool:
        """Say whether the `number`-th common step is good here; whether it is for all. Raises NoAgreement, OSError."""
        own = f"vote-{self._digest}-{number:04d}-{self._identity.rank:05d}-{'good' if good else 'bad'}"
        self._touch(own)

        def counted() -> list[bool] | None:
            votes = {}
            for match in map(_VOTE.match, self._names()):
                if match and (match[1], int(match[2])) == (self._digest, number):
                    votes[int(match[3])] = match[4] == "good"
            # One that is bad settles it: who comes later finds the same.
            return list(votes.values()) if len(votes) == self._identity.world_size or False in votes.values() else None

        return all(self._wait(counted, lambda: "a rank has not said whether its checkpoint is whole"))

    def _offer(self, candidates: Sequence[Candidate]) -> None:
        rank = self._identity.rank
        for name in self._names():  # of an earlier process of this rank
            stale = _OFFER.match(name) or _READY.match(name)
            if stale and int(stale[1]) == rank:
                self._storage.remove(self._folder / name)
        newest = sorted(set(candidates), reverse=True)[:CANDIDATES_MAX]
        rows = [[candidate.attempt, candidate.step] for candidate in newest]
        content = json.dumps({"world_size": self._identity.world_size, "candidates": rows}).encode()
        name = f"offer-{rank:05d}-{self._nonce}.json"
        self._storage.write_whole(self._folder / name, content, writer=f"rank-{rank}")

    def _settled(self) -> dict[int, str] | None:
        """The nonce of each rank, once all ranks have said that they see the same."""
        names = self._names()
        nonces = {int(match[1]): match[2] for match in map(_OFFER.match, names) if match}
        if set(nonces) != set(range(self._identity.world_size)):
            return None
        digest = hashlib.sha256(repr(sorted(nonces.items())).encode()).hexdigest()[:16]
        if digest != self._digest:
            self._digest = digest
            self._touch(f"ready-{self._identity.rank:05d}-{digest}")
        ready = {int(match[1]) for match in map(_READY.match, names) if match and match[2] == digest}
        return nonces if ready | {self._identity.rank} == set(nonces) else None

    def _read_offer(self, rank: int, nonce: str) -> set[Candidate]:
        path = self._folder / f"offer-{rank:05d}-{nonce}.json"
        try:
            with path.open("rb") as file:
                document = json.loads(file.read(OFFER_BYTES_MAX))
            world_size, rows = document["world_size"], document["candidates"]
            candidates = {Candidate(attempt, step) for attempt, step in rows}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointDamaged(f"what rank {rank} offers to load is not readable: {error!r:.100}") from error
        if not all(type(item.attempt) is int and type(item.step) is int for item in candidates):
            raise CheckpointDamaged(f"what rank {rank} offers to load is not a list of steps")
        if world_size != self._identity.world_size:
            raise NoAgreement(
                f"rank {rank} speaks of {world_size} ranks, this one of {self._identity.world_size}; start all alike"
            )
        return candidates

    def _wait(self, look: Callable[[], Answer | None], why: Callable[[], str]) -> Answer:
        deadline = self._clock.monotonic() + self._seconds_max
        seconds = LOOK_SECONDS_MIN
        while (answer := look()) is None:
            if self._clock.monotonic() >= deadline:
                raise NoAgreement(f"after {self._seconds_max:g} s {why()}; all ranks of a job call load together")
            self._pause.wait(seconds)
            seconds = min(seconds * 1.5, LOOK_SECONDS_MAX)
        return answer

    def _missing(self, what: str) -> str:
        offers = {int(match[1]) for match in map(_OFFER.match, self._names()) if match}
        missing = [rank for rank in range(self._identity.world_size) if rank not in offers]
        if not missing:
            return "the ranks have not seen each other's offers"
        named = ", ".join(map(str, missing[:RANKS_NAMED_MAX])) + (" and more" if len(missing) > RANKS_NAMED_MAX else "")
        return f"rank {named} {what}"

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []

    def _touch(self, name: str) -> None:
        """An empty file, whose name is what it says; it need not outlive a power cut."""
        self._storage.claim(self._folder / name, b"")

    def _tidy(self) -> None:
        """Remove what older attempts and the rounds before the last of this one left; rank 0 does it for all."""
        if self._identity.rank != 0:
            return
        attempts = self._attempt_folder.parent
        for folder in _folders(attempts, _ATTEMPT, self._identity.attempt):
            for old in _folders(folder, _ROUND, 10**9):
                self._remove(old)
            self._storage.remove_folder(folder)
        for old in _folders(self._attempt_folder, _ROUND, self._number - 1):
            self._remove(old)

    def _remove(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            for path in list(folder.iterdir()):
                self._storage.remove(path)
        self._storage.remove_folder(folder)


def _folders(parent: Path, names: re.Pattern[str], below: int) -> list[Path]:
    """The folders in `parent` whose number is lower than `below`."""
    try:
        found = [(names.match(path.name), path) for path in parent.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for match, path in found if match and int(match[1]) < below]
