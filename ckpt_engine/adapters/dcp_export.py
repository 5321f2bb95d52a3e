"""A step of ours as a checkpoint of torch.distributed.checkpoint, for tools that read nothing else."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .dcp import EngineReader


def export_dcp(directory: str | os.PathLike[str], step: int | None, target: str | os.PathLike[str]) -> int:
    """Write the tensors of `step` (None: the newest), whole, to the new folder `target`; how many.

    All of them are in memory at once. Raises CheckpointNotFound, CheckpointDamaged, and FileExistsError where
    `target` is there already.
    """
    if Path(target).exists():
        raise FileExistsError(f"{target} is there already; give a folder that is not")
    reader = EngineReader(directory, step)
    described = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is what we want
        load(state, storage_reader=reader, no_dist=True)
        save(state, checkpoint_id=target, no_dist=True)
    return len(state)
