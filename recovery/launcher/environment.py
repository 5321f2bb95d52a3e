"""What a rank is given: torch's variables as torchrun sets them, and ours."""

from __future__ import annotations

import os

from ingest.events import RankPlace

from .config import LauncherConfig
from .error_file import error_file
from .protocol import StartRanks


def environment_of(config: LauncherConfig, order: StartRanks, place: RankPlace) -> dict[str, str]:
    """The variables in which the ranks of an attempt differ from what their node gives them."""
    nodes = list(dict.fromkeys(other.node for other in order.places))
    world = len(order.places)
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(sum(other.node == place.node for other in order.places)),
        "GROUP_RANK": str(nodes.index(place.node)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": str(order.master_port),
        "TORCHELASTIC_RUN_ID": config.job,  # by this, frameworks know that a launcher started them
        "TORCHELASTIC_RESTART_COUNT": str(order.attempt - 1),
        "TORCHELASTIC_ERROR_FILE": str(error_file(config.node_file, order.attempt, place.rank)),
        "TRANSOM_JOB": config.job,
        "TRANSOM_ATTEMPT": str(order.attempt),
        "TRANSOM_NODE": config.node,
        "TRANSOM_SOCKET": str(config.telemetry_socket),
        "TRANSOM_TOKEN": order.token,
        "TRANSOM_RESUME_STEP": "" if order.resume_step is None else str(order.resume_step),
        "TRANSOM_ALLOW_INJECT": "1" if config.allow_inject else "0",
        **_wandb(config, place.rank),
    }


def _wandb(config: LauncherConfig, rank: int) -> dict[str, str]:
    """One W&B run of each rank over all restarts; who has chosen an id keeps it."""
    if config.base_env.get("WANDB_RUN_ID"):
        return {}
    run = config.job if rank == 0 else f"{config.job}-rank{rank}"
    return {"WANDB_RUN_ID": run, "WANDB_RESUME": config.base_env.get("WANDB_RESUME") or "allow"}


def cpus_of(rank: int, order: StartRanks, *, pin: bool) -> tuple[int, ...]:
    """The processor of a rank, those of a node side by side; empty where ranks are not pinned."""
    if not pin:
        return ()
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[rank * len(allowed) // len(order.places)],)
