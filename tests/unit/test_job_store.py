"""Ranks of a job of another launcher agree over torch's own store, also where an attempt before has left its words."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from ingest.bus import BusUnavailable
from ingest.bus_link import BusLink
from ingest.clock import ManualClock
from ingest.codec import Codec
from ingest.events import AttemptStarted, ErrorRecord, RankExited, RankPlace
from ingest.job_store import Agreement, Answer, Question, open_store
from ingest.memory_bus import MemoryBus
from ingest.rank_socket import Hello


@pytest.fixture(scope="module")
def port() -> int:
    return int(SERVER.port)


SERVER = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def ranks_of(world: int, life: str, at: float, port: int, clock: ManualClock) -> list[Agreement]:
    def proposal(rank: int) -> Callable[[], Answer]:
        # Only what rank 0 says may count.
        return lambda: Answer(job="theirs" if rank == 0 else f"wrong-{rank}", attempt=int(at) + 1_000 * rank)

    return [
        Agreement(
            Question(rank=rank, local_rank=rank, node="n", nonce=f"{life}/{rank}"), world, proposal(rank),
            lambda: open_store("127.0.0.1", port), clock,
        )
        for rank in range(world)
    ]  # fmt: skip


def agree(ranks: list[Agreement], clock: ManualClock) -> None:
    for _ in range(60):
        for one in ranks:
            one.look()
        clock.advance(0.3)
        if all(one.answer is not None for one in ranks) and ranks[0].complete:
            return
    raise AssertionError([one.answer for one in ranks])


def test_all_ranks_get_what_rank_0_says_and_a_restart_in_the_same_store_gets_a_newer_attempt(port: int) -> None:
    clock = ManualClock(1000.0)
    first = ranks_of(3, "one", 500.0, port, clock)
    agree(first, clock)
    assert {one.answer for one in first} == {Answer(job="theirs", attempt=500)}
    assert [member.rank for member in first[0].members] == [0, 1, 2]

    # The clock of rank 0 has not moved on, and the questions and answers of the first attempt still lie there.
    second = ranks_of(3, "two", 500.0, port, clock)
    second[1].look()  # a rank that is up before rank 0 asks the void, and is heard all the same
    agree(second, clock)
    assert {one.answer for one in second} == {Answer(job="theirs", attempt=501)}


def test_a_rank_whose_store_is_not_there_yet_waits_and_says_nothing_wrong() -> None:
    clock = ManualClock(1000.0)
    question = Question(rank=1, local_rank=1, node="n", nonce="x")
    tries: list[int] = []

    def nobody_listens() -> TCPStore:
        tries.append(1)
        raise RuntimeError("the server socket has failed to listen")

    one = Agreement(question, 2, lambda: Answer(job="j", attempt=1), nobody_listens, clock)
    for _ in range(20):
        one.look()
        clock.advance(1.0)
    assert one.answer is None
    assert not one.over
    assert len(tries) > 5


def test_a_job_of_one_rank_needs_no_store() -> None:
    def never() -> TCPStore:
        raise AssertionError

    question = Question(rank=0, local_rank=0, node="n", nonce="x")
    one = Agreement(question, 1, lambda: Answer(job="alone", attempt=7), never, ManualClock(1.0))
    one.look()
    assert (one.answer, one.complete) == (Answer(job="alone", attempt=7), True)


class BreakableStore:
    """A store whose connection can be broken."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        if self.broken:
            raise RuntimeError("Connection reset by peer")
        return getattr(self._store, name)


def test_rank_0_that_loses_the_store_for_a_moment_is_still_of_the_same_attempt(port: int) -> None:
    clock = ManualClock(1000.0)
    opened: list[BreakableStore] = []

    def open_breakable() -> Any:
        opened.append(BreakableStore(open_store("127.0.0.1", port)))
        return opened[-1]

    question = Question(rank=0, local_rank=0, node="n", nonce="moment")
    one = Agreement(question, 2, lambda: Answer(job="theirs", attempt=7_000), open_breakable, clock)
    one.look()
    assert one.answer == Answer(job="theirs", attempt=7_000)
    opened[0].broken = True
    for _ in range(4):
        clock.advance(3.0)
        one.look()
    assert len(opened) == 2
    assert one.answer == Answer(job="theirs", attempt=7_000)


class BusyProducer:
    """The producer of a bus that is too busy to answer once; what was not flushed is lost, as over HTTP."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._waiting: list[tuple[Any, ...]] = []
        self._busy = True

    def send(self, *encoded: Any) -> None:
        self._waiting.append(encoded)

    def flush(self, timeout_seconds: float) -> None:
        if self._busy:
            self._busy = False
            raise BusUnavailable("it does not answer (timed out)")
        for encoded in self._waiting:
            self._producer.send(*encoded)
        self._producer.flush(timeout_seconds)

    def close(self) -> None:
        self._producer.close()


def test_an_attempt_that_ends_before_all_have_asked_is_told_of_also_to_a_bus_that_is_busy_at_first(port: int) -> None:
    clock = ManualClock(1000.0)
    bus = MemoryBus(clock=clock)
    bus.create_topics(1)
    question = Question(rank=0, local_rank=0, node="n", nonce="early")
    agreement = Agreement(
        question, 2, lambda: Answer(job="theirs", attempt=9_000), lambda: open_store("127.0.0.1", port), clock
    )
    link = BusLink(
        Hello(job="", attempt=0, rank=0, token="", pid=1), agreement, lambda: BusyProducer(bus.producer()), clock,
        node="n", local_rank=0, world_size=2, leads=True, restarts_by="torchrun",
    )  # fmt: skip
    agreement.look()
    link.error = ErrorRecord(type="ValueError", text="made by the test", traceback="")
    link.drain(10.0)
    link.close()
    records = bus.consumer("test", ("events",)).poll(100, 0.0)
    told = {type(message): message for message in (Codec().decode(one.headers, one.value) for one in records)}
    assert told[AttemptStarted].attempt == 9_000
    assert told[AttemptStarted].places == (RankPlace(rank=0, local_rank=0, node="n"),)
    assert told[RankExited].error == link.error
