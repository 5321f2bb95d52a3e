"""Evidence from ranks that stand still: their stacks, asked for by signal and published; on demand, or unasked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from ingest.clock import Clock
from ingest.events import Message, RankStacks

from .procfs import wchan_of
from .rank import STOPPED_STATES, LocalRank
from .share import Share

QUIET_LOOKS = 2  # stacks that have not grown for so many looks are whole
STACK_CHARACTERS_MAX = 48 * 1024  # of one rank, published
FLIGHT_SECONDS_MAX = 0.5  # a rank that has a flight recorder is waited for so long beyond its stacks
STALL_SECONDS = 10.0  # without a step of any of our ranks
STALL_STEPS = 10.0  # times the median step, where that is more
STALL_SECONDS_BEFORE_FIRST = 60.0  # a start takes its time
STALL_DEADLINE_SECONDS = 2.0  # for the answers
ROUND_SECONDS_MIN = 60.0  # between two rounds that nobody asked for

Publish = Callable[[Message], None]
AskFlight = Callable[[int], bool]


class StackRound:
    """One question to all living ranks of a share. Call `look` until it answers."""

    def __init__(
        self, share: Share, clock: Clock, deadline_seconds: float, publish: Publish, ask_flight: AskFlight
    ) -> None:
        self._share = share
        self._clock = clock
        self._publish = publish
        self._asked = {rank.rank: rank for rank in share.alive if rank.ask_stacks()}
        for rank in self._asked.values():
            if rank.flight_known:
                rank.flight = None
                ask_flight(rank.rank)
        self._quiet: dict[int, tuple[str, int]] = {}
        self._began = clock.monotonic()
        self._deadline = self._began + deadline_seconds

    def look(self) -> dict[int, str] | None:
        """The stacks by rank when all are whole or the time is up; they are published then."""
        for number, rank in self._asked.items():
            text = rank.stacks()
            before, looks = self._quiet.get(number, ("", 0))
            self._quiet[number] = (text, looks + 1 if text and text == before else 0)
        now = self._clock.monotonic()
        whole = all(
            self._quiet[number][1] >= QUIET_LOOKS or not _may_answer(rank) for number, rank in self._asked.items()
        )
        flown = now >= self._began + FLIGHT_SECONDS_MAX or all(
            rank.flight is not None or not rank.flight_known or not _may_answer(rank) for rank in self._asked.values()
        )
        if not (whole and flown) and now < self._deadline:
            return None
        for number, rank in self._asked.items():
            if rank.alive:
                self._publish(self._stacks_of(rank, self._quiet[number][0]))
        return {number: text for number, (text, _) in self._quiet.items() if text}

    def _stacks_of(self, rank: LocalRank, text: str) -> RankStacks:
        stat, flight = rank.stat(), rank.flight
        return RankStacks(
            stacks=text[-STACK_CHARACTERS_MAX:],  # the main thread stands last
            state=stat.state if stat else "",
            wchan=wchan_of(rank.pid),
            collective=flight.collective if flight else "",
            enqueued=flight.enqueued if flight else None,
            completed=flight.completed if flight else None,
            **self._share.stamp(rank.rank, "events"),
        )


def _may_answer(rank: LocalRank) -> bool:
    """A stopped process does not, however long it is awaited; its peers' restart must not wait for that."""
    stat = rank.stat() if rank.alive else None
    return stat is not None and stat.state not in STOPPED_STATES


class StallWatch:
    """Sees by its ranks' steps that the job stands still, and says so once for each standstill."""

    def __init__(self) -> None:
        self._share: Share | None = None
        self._step = -1
        self._moved_at = 0.0  # monotonic
        self._told = False
        self._asked_at = float("-inf")
        self._seconds: deque[float] = deque(maxlen=64)

    def is_due(self, share: Share, now: float) -> bool:
        """Whether evidence should be gathered now: nothing has moved for long, and this is not told yet."""
        if share is not self._share:
            self._share, self._step, self._moved_at, self._told = share, -1, now, False
            self._seconds.clear()
        step = max((rank.step for rank in share.alive), default=-1)
        if step != self._step:
            if 0 <= self._step < step:
                self._seconds.append((now - self._moved_at) / (step - self._step))
            self._step, self._moved_at, self._told = step, now, False
        finished = all(rank.phase == "finished" for rank in share.alive)
        if self._told or share.stop_requested or finished or not share.alive:
            return False
        usual = median(self._seconds) if self._seconds else 0.0
        patience = max(STALL_SECONDS, STALL_STEPS * usual) if self._step >= 0 else STALL_SECONDS_BEFORE_FIRST
        if now - self._moved_at < patience or now - self._asked_at < ROUND_SECONDS_MIN:
            return False
        self._told, self._asked_at = True, now
        return True
