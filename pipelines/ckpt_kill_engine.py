"""The engine of a kill campaign: a real one with a keeper, whose story nobody hears.

python -m pipelines.ckpt_kill_engine SOCKET DIRECTORY
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ckpt_engine.engine import Engine, EngineConfig
from pipelines.ckpt_kill_rank import JOB

KEEPER_SECONDS = 60.0


def main(arguments: Sequence[str]) -> None:
    """Run until SIGTERM; says `ready` once connections are taken."""
    socket, directory = map(Path, arguments)
    config = EngineConfig(
        JOB, "n0", socket, directory, retry_seconds_min=0.05, retry_seconds_max=0.1, keeper_seconds_max=KEEPER_SECONDS
    )
    Engine(config, lambda event: None).run(_say_ready)


def _say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
