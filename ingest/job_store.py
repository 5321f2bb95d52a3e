"""How the ranks of a job that somebody else launched agree who they are: over the job's own torch store.

Ranks of a restarted job meet the same store with what the attempt before left in it (torchrun's agent keeps it), and
no variable of one rank's environment counts attempts for all of them. So each rank asks with a number that nobody had
before, and rank 0 answers every question it finds: only ranks that live at the same time can agree. The store is
reached as torch itself reaches it, by MASTER_ADDR and MASTER_PORT, with torch's public TCPStore; where rank 0 has not
opened it yet, it is waited for. Nothing is written under a name that torch uses.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from .clock import Clock

PREFIX = "transom/"
ASKED = PREFIX + "asked"
PROBE_SECONDS_MAX = 1.0
CONNECT_SECONDS_MAX = 10.0
CALL_SECONDS_MAX = 10.0
LOOK_SECONDS = 0.2
AGREE_SECONDS_MAX = 1_800.0  # a rank may load for long before its store is there
ROLL_SECONDS = 20.0  # so long after its own start rank 0 waits for the others before it says who is there
LATE_SECONDS_MAX = 600.0  # and so long it answers those that come later
STALE_MAX = 2  # times the world: questions of the attempt before that may still lie there

logger = logging.getLogger("transom")


class Store(Protocol):
    """What is needed of torch's store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A rank asks who it is. `nonce`: nobody else has it."""

    rank: int
    local_rank: int
    node: str
    nonce: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says the job is called, and which attempt this is."""

    job: str
    attempt: int


def open_store(host: str, port: int) -> Store:
    """A client of the job's store. Raises what torch raises where nobody listens yet: RuntimeError and its kind."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch tells its public names too late

    with socket.create_connection((host, port), timeout=PROBE_SECONDS_MAX):
        pass  # else torch itself waits, for seconds between its tries, for one that is about to listen
    store: Any = TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_SECONDS_MAX)
    )
    store.set_timeout(timedelta(seconds=CALL_SECONDS_MAX))
    return store  # type: ignore[no-any-return]


class Agreement:
    """One rank's side. Everything is called from the thread of its reporter, and returns soon."""

    def __init__(
        self, question: Question, world_size: int, proposal: Callable[[], Answer], open_it: Callable[[], Store],
        clock: Clock,
    ) -> None:  # fmt: skip
        """`proposal` is what rank 0 says; that of others is not asked."""
        self._question = question
        self._world = world_size
        self._proposal = proposal
        self._open = open_it
        self._clock = clock
        self._store: Store | None = None
        self._began = clock.monotonic()
        self._look_at = float("-inf")
        self._wait_seconds = LOOK_SECONDS
        self._answered = 0
        self._pending: set[int] = set()
        self._heard: dict[int, Question] = {question.rank: question}
        self.answer: Answer | None = None
        self.over = False  # nothing more is to be done

    @property
    def members(self) -> tuple[Question, ...]:
        """Rank 0: who has asked so far, itself included, by rank."""
        return tuple(self._heard[rank] for rank in sorted(self._heard))

    @property
    def complete(self) -> bool:
        """Rank 0: everybody has asked, or has had time to."""
        return len(self._heard) >= self._world or self._clock.monotonic() - self._began >= ROLL_SECONDS

    def look(self) -> None:
        """One step towards agreement. Never raises: a store that is gone ends a job anyhow."""
        now = self._clock.monotonic()
        if self.over or now < self._look_at:
            return
        self._look_at = now + self._wait_seconds
        if self._world == 1:
            self.answer, self.over = self._proposal(), True
            return
        try:
            if self._store is None:
                self._store = self._open()
                self._enter(self._store)
            elif self._question.rank == 0:
                self._answer_all(self._store)
            else:
                self._await_answer(self._store)
        except Exception as error:  # noqa: BLE001  (torch raises RuntimeErrors of many kinds; training must go on)
            self._store = None
            self._wait_seconds = min(2.0, self._wait_seconds * 1.2)
            if now - self._began > AGREE_SECONDS_MAX:
                self.over = True
                logger.warning("transom: nothing is reported: the job's store was not to be had (%s)", error)

    def close(self) -> None:
        """Let go of the store while the interpreter lives: torch's threads must not outlast it."""
        self._store, self.over = None, True

    def _enter(self, store: Store) -> None:
        self._wait_seconds = LOOK_SECONDS
        if self._question.rank == 0:
            asked = store.add(ASKED, 0)
            self._answered = max(0, asked - STALE_MAX * self._world)
            if self.answer is None:  # else the store was away for a moment: the attempt is still the same
                self.answer = self._newer(store, self._proposal())
            return
        number = store.add(ASKED, 1)
        store.set(f"{PREFIX}ask/{number}", msgspec.json.encode(self._question).decode())

    @staticmethod
    def _newer(store: Store, proposal: Answer) -> Answer:
        """Above the attempt before, whatever the clock says: what a store keeps is older than its ranks."""
        key = f"{PREFIX}attempt"
        last = int(store.get(key)) if store.check([key]) else 0
        answer = Answer(job=proposal.job, attempt=max(proposal.attempt, last + 1))
        store.set(key, str(answer.attempt))
        return answer

    def _answer_all(self, store: Store) -> None:
        assert self.answer is not None
        asked = store.add(ASKED, 0)
        self._pending.update(range(self._answered + 1, asked + 1))
        self._answered = max(self._answered, asked)
        said = msgspec.json.encode(self.answer).decode()
        for number in sorted(self._pending):
            key = f"{PREFIX}ask/{number}"
            if not store.check([key]):
                continue  # it is about to be written, or its rank died just before
            self._pending.discard(number)
            question = msgspec.json.decode(store.get(key), type=Question)
            store.set(f"{PREFIX}answer/{question.nonce}", said)
            if 0 < question.rank < self._world:
                self._heard[question.rank] = question
        if len(self._heard) >= self._world:
            self._wait_seconds = 2.0  # one that asked may be of the attempt before; its successor asks again
        self.over = self._clock.monotonic() - self._began > LATE_SECONDS_MAX

    def _await_answer(self, store: Store) -> None:
        key = f"{PREFIX}answer/{self._question.nonce}"
        if store.check([key]):
            self.answer, self.over = msgspec.json.decode(store.get(key), type=Answer), True
            self._store = None
