"""What a ticket says of a save: sealed, backed up, durable, each to be waited for, each with its reason."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt_engine.client import Checkpointer
from ckpt_engine.ticket import NO_PEER, Mark, Ticket
from tests.ckpt_lab import engine_in_thread


def test_a_mark_is_asked_until_it_knows() -> None:
    answers = iter([None, None, ""])
    asked: list[float | None] = []

    def ask(timeout: float | None) -> str | None:
        asked.append(timeout)
        return next(answers)

    mark = Mark(ask)
    assert not mark.settled
    assert not mark.wait(0.5)
    assert not mark.wait(1.5)
    assert (mark.settled, mark.reason) == (False, "")
    assert mark.wait(None)
    assert mark.wait(3.0)
    assert asked == [0.5, 1.5, None], "what is known is not asked again"


def test_a_mark_that_is_not_reached_says_why() -> None:
    mark = Mark(lambda timeout: "the disk is full")
    assert not mark.wait(1.0)
    assert (mark.settled, mark.reached, mark.reason) == (True, False, "the disk is full")


def test_without_a_peer_nothing_is_backed_up_and_nobody_waits(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path) as lab:
        ckpt = Checkpointer(str(lab.socket), None, job="job", attempt=1, rank=0, world_size=1, node="n0")
        ticket = ckpt.save({"x": torch.ones(1)}, 1)
        assert ticket.sealed.wait(5.0)
        assert not ticket.backed_up.wait(None)
        assert ticket.backed_up.reason
        assert ticket.durable.wait(20.0)
        ckpt.close()


def test_a_refused_save_reaches_nothing() -> None:
    ticket = Ticket.refused(3, "skipped")
    marks = (ticket.sealed, ticket.backed_up, ticket.durable)
    assert [(mark.wait(1.0), mark.reason) for mark in marks] == [(False, "skipped")] * 3
    assert ticket.failed == "skipped"


def test_the_reason_for_no_backup_is_that_of_no_seal() -> None:
    assert Ticket(1, Mark(outcome=""), Mark()).backed_up.reason == NO_PEER
    assert Ticket(1, Mark(outcome="there is no engine"), Mark(outcome="")).backed_up.reason == "there is no engine"
