"""The engines of a kill campaign: real ones in a ring of two, the rank's with a keeper; their story nobody hears.

python -m pipelines.ckpt_kill_engine SOCKET DIRECTORY NODE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ckpt_engine.engine import Engine, EngineConfig
from ckpt_engine.ring_config import RingConfig
from pipelines.ckpt_kill_rank import JOB

KEEPER_SECONDS = 60.0
HOME, HOLDER = "n0", "n1"  # where the rank is, and where copies of its shards are kept
TOKEN = b"a token for kill campaigns alone"
CHUNK_BYTES = 64 << 10  # so that a copy has many beginnings and ends


def main(arguments: Sequence[str]) -> None:
    """Run until SIGTERM; says `ready` once connections are taken."""
    socket, directory, node = arguments
    ring = RingConfig(
        token=TOKEN, nodes=(HOME, HOLDER), chunk_bytes=CHUNK_BYTES, beat_seconds=0.1, dead_seconds=2.0,
        retry_seconds_min=0.05, retry_seconds_max=0.2,
    )  # fmt: skip
    config = EngineConfig(
        JOB, node, Path(socket), Path(directory), retry_seconds_min=0.05, retry_seconds_max=0.1,
        keeper_seconds_max=KEEPER_SECONDS if node == HOME else 0.0, ring=ring,
    )  # fmt: skip
    Engine(config, lambda event: None).run(_say_ready)


def _say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
