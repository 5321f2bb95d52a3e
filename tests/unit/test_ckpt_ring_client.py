"""A training script and the ring: tickets wait for copies, and a rank that moved goes on from a peer's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckpt_engine.client import Checkpointer
from tests.ckpt_lab import Lab, engine_in_thread, eventually
from tests.ring_lab import ring_engine, ring_of


def checkpointer(lab: Lab, attempt: int, node: str) -> Checkpointer:
    return Checkpointer(str(lab.socket), None, job="job", attempt=attempt, rank=0, world_size=1, node=node)


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((300, 1000), value), "step": int(value)}


def test_a_rank_goes_on_from_what_the_next_node_kept_when_its_own_is_lost(tmp_path: Path) -> None:
    nodes = ("n0", "n1", "n2")
    with ring_engine(tmp_path, "n1", *nodes), ring_engine(tmp_path, "n2", *nodes) as third:
        with ring_engine(tmp_path, "n0", *nodes) as first:
            ours = checkpointer(first, 1, "n0")
            ticket = ours.save(state(7.0), 7)
            assert ticket.backed_up.wait(10.0), ticket.backed_up.reason
            ours.close()
        theirs, into = checkpointer(third, 2, "n2"), state(0.0)
        report = theirs.load(into)
        assert report is not None
        assert (report.tier, report.step, report.verified) == ("peer", 7, True)
        assert into["step"] == 7
        assert torch.equal(into["weight"], state(7.0)["weight"])
        eventually(lambda: third.told("loaded", 7, "peer"), "the engine's word that the rank loaded")
        assert theirs.save(state(8.0), 8).sealed.reached
        assert ring_of(third).store.whole() == []
        theirs.close()


def test_where_no_node_keeps_copies_a_ticket_says_why_at_once(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path, ring_off="the ring is off: because") as lab:
        ours = checkpointer(lab, 1, "n0")
        ticket = ours.save(state(1.0), 1)
        assert not ticket.backed_up.wait(10.0)
        assert ticket.backed_up.reason == "the ring is off: because"
        ours.close()


def test_a_fenced_save_is_copied_too(tmp_path: Path) -> None:
    with ring_engine(tmp_path, "n0", "n0", "n1") as first, ring_engine(tmp_path, "n1", "n0", "n1") as second:
        model = torch.nn.Linear(100, 100)
        ours = Checkpointer(
            str(first.socket), None, job="job", attempt=1, rank=0, world_size=1, node="n0", mode="fenced"
        )
        ticket = ours.save({"model": model}, 7)
        ours.fence()
        assert ticket.backed_up.wait(10.0), ticket.backed_up.reason
        assert [header.step for _, header in ring_of(second).store.whole()] == [7]
        ours.close()
