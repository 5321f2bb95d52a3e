"""Object stores to try checkpoints with, and a step brought to one by hand."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from ckpt_engine.manifest import read_manifest
from ckpt_engine.objectstore import FsspecStore
from ckpt_engine.objecttier import ObjectTier

KINDS = ("memory", "file")
_numbers = count()


def make_store(kind: str, folder: Path) -> FsspecStore:
    """An empty one: all in this process, or on the disk below `folder`."""
    return FsspecStore(f"memory://{folder.name}-{next(_numbers)}" if kind == "memory" else f"file://{folder}/objects")


def upload(store: FsspecStore, disk: Path, step: int) -> bool:
    """Bring a complete step to the store; whether it is complete there."""
    tier, manifest = ObjectTier(store), read_manifest(disk, step)
    assert manifest is not None
    for record in tier.missing(manifest):
        tier.put_shard(disk, record)
    return tier.finish(manifest)
