"""Whether a bit that flips in another node's memory is found, and the next copy used: another peer's, or the disk's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path

from ckpt_engine.admin import EngineAdmin
from ckpt_engine.client import Checkpointer
from pipelines.bench_ckpt.flipping import (
    DURABLE_SECONDS_MAX,
    comes_back,
    flip_bit,
    made_up,
    memfds_of,
    regions,
    slot_of,
)
from pipelines.bench_ckpt.ring_process import HOLDER, HOME, JOB, NEW, RingProcess

ORDER = (HOME, NEW, HOLDER)  # NEW asks the node behind it first, and that is the one with the flipped copy


class PeerFlips:
    """Three nodes: the home of a shard, the holder of its copy, and one that has nothing of it."""

    def __init__(self, folder: Path) -> None:
        self._nodes: dict[str, RingProcess] = {}
        try:
            for node in (HOLDER, HOME, NEW):
                self._nodes[node] = RingProcess(folder, node, order=ORDER, together=(HOME, NEW))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PeerFlips:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self._nodes.values():
            node.end()

    def flip(self, number: int, dice: random.Random, told: Callable[[str], object]) -> bool:
        """Save at home, flip one bit of the copy, and every second time one at home too; restart the rank where the
        copy is, or elsewhere: it has to get the same bytes from what is left, and the copy is offered no more."""
        told(f"flip {number} in a peer's memory")
        also_at_home = dice.random() < 0.5
        saver = self._rank(HOME, 2 * number + 1)
        try:
            ticket = saver.save(made_up(number), number)
            if ticket.failed or not ticket.durable.wait(DURABLE_SECONDS_MAX):
                raise RuntimeError(f"our save failed: {ticket.failed or ticket.durable.reason}")
            if not ticket.backed_up.wait(DURABLE_SECONDS_MAX):
                raise RuntimeError(f"no other node has a copy: {ticket.backed_up.reason}")
            with slot_of(number, self._copies()) as (view, header):
                flip_bit(dice.choice(regions(view, header)), dice)
            if also_at_home:
                with slot_of(number) as (view, header):
                    flip_bit(dice.choice(regions(view, header)), dice)
        finally:
            saver.close()
        loader = self._rank(HOLDER if number % 2 else NEW, 2 * number + 2)
        back = comes_back(loader, number, tier="disk" if also_at_home else "peer")
        return back and not self._offered(number)

    def _rank(self, node: str, attempt: int) -> Checkpointer:
        engine = self._nodes[node]
        return Checkpointer(str(engine.socket), None, job=JOB, attempt=attempt, rank=0, world_size=1, node=node)

    def _copies(self) -> Iterator[mmap]:
        return memfds_of(self._nodes[HOLDER].pid)

    def _offered(self, step: int) -> bool:
        """Whether the holder still hands out what came from home; what the new node has sent it since is good."""
        kept = EngineAdmin(self._nodes[HOLDER].socket).status().peer_shards
        return any((shard.step, shard.state) == (step, f"kept for {HOME}") for shard in kept)
