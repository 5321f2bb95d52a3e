"""Engines killed while ranks with the same tensors share a file: what is named is whole, for every rank."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path

from ckpt_engine.errors import EngineRefused, EngineUnavailable
from ckpt_engine.inspection import verify_steps
from ckpt_engine.manifest import complete_steps, read_manifest
from tests.ckpt_lab import EngineProcess, RawRank, eventually
from tests.ckpt_power_cut import everything_named_is_whole

PAYLOAD_BYTES = 2 << 20
KILLS = 3


def save_until_it_dies(ranks: list[RawRank], first: int, last: list[int]) -> None:
    """Both ranks save the same, step by step; the last step that the engine took from both ends up in `last`."""
    step = first
    while True:
        try:
            for rank in ranks:
                rank.save(step, bytes([step % 251]) * PAYLOAD_BYTES)
            if step % 4:
                for rank in ranks:  # else ranks that skip different steps would complete few
                    rank.durable(step)
        except (EngineUnavailable, EngineRefused):
            last.append(step - 1)
            return
        step += 1


def test_an_engine_killed_at_any_instant_leaves_shared_files_whole(tmp_path: Path) -> None:
    dice = random.Random(11)
    first, shared = 1, 0
    for attempt in range(1, KILLS + 1):
        with EngineProcess(tmp_path) as engine:
            ranks = [RawRank(engine.socket, attempt=attempt, rank=rank, world_size=2) for rank in range(2)]
            last: list[int] = []
            saver = threading.Thread(target=save_until_it_dies, args=(ranks, first, last))
            saver.start()
            eventually(lambda e=engine, f=first: any(ev[0] == "complete" and ev[1] > f for ev in e.events()))  # type: ignore[misc]
            threading.Event().wait(dice.random() * 0.2)
            engine.end(signal.SIGKILL)
            saver.join(20)
            for rank in ranks:
                rank.close()
        everything_named_is_whole(engine.directory)
        assert all(verdict.whole for verdict in verify_steps(engine.directory))
        for record in complete_steps(engine.directory):
            manifest = read_manifest(engine.directory, record.step)
            assert manifest is not None
            shared += any(shard.stored_by is not None for shard in manifest.shards)
        first = last[0] + 1
    assert shared, "files were shared"
