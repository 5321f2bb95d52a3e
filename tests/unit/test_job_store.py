"""Ranks of a job of another launcher agree over torch's own store, also where an attempt before has left its words."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ingest.clock import ManualClock
from ingest.job_store import Agreement, Answer, Question, open_store


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
