"""Lightning's checkpoints through the engine: a CheckpointIO for its own strategies, and a Strategy for FSDP2.

    io = EngineCheckpointIO(transom.Checkpointer(rank=0, world_size=1))
    trainer = Trainer(plugins=[io], callbacks=[ModelCheckpoint(every_n_train_steps=100)])
    trainer.fit(model, data, ckpt_path=io.newest_path())

Lightning names checkpoints by paths. What stands at such a path here is a line of JSON that says which step of the
engine it is; the step itself is in memory and in the engine's folder. How many stay, the engine says.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..errors import CheckpointError, CheckpointNotFound

FORMAT = "transom-lightning/1"
NEWEST = "transom-newest"  # a path that stands for whatever step is the newest
POINTER_BYTES_MAX = 4096
KEY = "lightning"


class EngineCheckpointIO(CheckpointIO):  # type: ignore[misc]  # lightning tells mypy nothing
    """For strategies that write one checkpoint from global rank 0 (a single device, DDP). Give it a Checkpointer with
    `rank=0, world_size=1`: what rank 0 writes is the whole. On the other ranks, which only read, `checkpointer` has a
    directory and no socket."""

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def newest_path(self) -> str | None:
        """What to give to `Trainer.fit` as `ckpt_path` after a restart: the newest step that there is; None: none."""
        return NEWEST if self._checkpointer.load({}) is not None else None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Raises CheckpointError where the step can be kept neither in memory nor on disk."""
        if storage_options is not None:
            raise TypeError("EngineCheckpointIO takes no storage_options; where steps go is the engine's to say")
        step = int(checkpoint["global_step"])
        ticket = self._checkpointer.save({KEY: checkpoint}, step)
        if ticket.failed:
            raise CheckpointError(f"step {step} was not saved: {ticket.failed}")
        write_pointer(path, step)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint, in memory of its own. Nothing of it was ever pickled, whatever `weights_only` says."""
        into: dict[str, Any] = {KEY: None}
        if self._checkpointer.load(into, read_pointer(path)) is None:
            raise CheckpointNotFound(f"there is no step to load for {path}")
        found: dict[str, Any] = into[KEY]
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """The path is free again; the step stays for as long as the engine keeps it."""
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()


class EngineModelParallelStrategy(ModelParallelStrategy):  # type: ignore[misc]  # as above
    """FSDP2 and tensor parallelism: every rank keeps its own shards. (Lightning's strategy never asks a CheckpointIO.)

    `checkpointer`: that of this rank, `transom.Checkpointer()`. A step loads on another number of ranks, too.
    """

    def __init__(self, *args: Any, checkpointer: Any, **more: Any) -> None:
        super().__init__(*args, **{**more, "save_distributed_checkpoint": True})
        self._checkpointer = checkpointer

    def newest_path(self) -> str | None:
        """As that of `EngineCheckpointIO`; all ranks ask together."""
        return NEWEST if self._checkpointer.load({}) is not None else None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The shards of this rank where they are: the engine copies them, once."""
        assert self.model is not None
        return dict(get_model_state_dict(self.model, options=_in_place()))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As `lightning_module_state_dict`."""
        assert self.model is not None
        return dict(get_optimizer_state_dict(self.model, _plain(optimizer), options=_in_place()))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """On every rank. Raises CheckpointError where this rank's part can be kept nowhere."""
        if storage_options is not None:
            raise TypeError("EngineModelParallelStrategy takes no storage_options; the engine knows where steps go")
        rest = dict(checkpoint)
        step = int(rest["global_step"])
        state = {"model": rest.pop("state_dict"), "optimizers": rest.pop("optimizer_states", []), KEY: rest}
        ticket = self._checkpointer.save(state, step)
        if ticket.failed:
            raise CheckpointError(f"step {step} was not saved: {ticket.failed}")
        if self.is_global_zero:
            write_pointer(filepath, step)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill the living model and its optimizers; what is no tensor of theirs."""
        assert self.model is not None
        optimizers = [_plain(optimizer) for optimizer in self.optimizers]
        model = self.lightning_module_state_dict()
        into: dict[str, Any] = {"model": model, KEY: None}
        if optimizers:
            into["optimizers"] = [self.optimizer_state(optimizer) for optimizer in optimizers]
        if self._checkpointer.load(into, read_pointer(self.broadcast(checkpoint_path))) is None:
            raise CheckpointNotFound(f"there is no step that all ranks have for {checkpoint_path}")
        set_model_state_dict(self.model, into["model"], options=_in_place())
        for optimizer, state in zip(optimizers, into.get("optimizers", ()), strict=True):
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state, options=_in_place())
        found: dict[str, Any] = into[KEY]
        return found

    def remove_checkpoint(self, filepath: Any) -> None:
        """As that of `EngineCheckpointIO`."""
        if self.is_global_zero:
            with contextlib.suppress(FileNotFoundError):
                Path(filepath).unlink()


def write_pointer(path: Any, step: int) -> None:
    """Say at `path` which step stands for it; whole, or as it was before."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(json.dumps({"format": FORMAT, "step": step}), encoding="utf-8")
    os.replace(temporary, target)  # noqa: PTH105 - the same, and it says that it replaces


def read_pointer(path: Any) -> Any:
    """The step that a path stands for, or "newest". Raises CheckpointNotFound."""
    if os.fspath(path) == NEWEST:
        return "newest"
    try:
        with Path(path).open("rb") as file:
            document = json.loads(file.read(POINTER_BYTES_MAX))
        step = document["step"] if document["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointNotFound(f"{path} does not name a step of the checkpoint engine: {error}") from error
    if type(step) is not int:
        raise CheckpointNotFound(f"{path} does not name a step of the checkpoint engine")
    return step


def _plain(optimizer: Any) -> Any:
    """Lightning's wrapper looked through."""
    return getattr(optimizer, "_optimizer", optimizer)


def _in_place() -> StateDictOptions:
    """Sharded, and no copies: neither whole tensors nor the processor's memory."""
    return StateDictOptions(full_state_dict=False, cpu_offload=False)
