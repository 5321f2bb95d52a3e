"""torch.distributed.checkpoint over the engine's folder: `dcp.save`, `dcp.async_save` and `dcp.load` with this pair.

    dcp.save(state_dict, storage_writer=EngineWriter(checkpointer, step, directory))
    dcp.load(state_dict, storage_reader=EngineReader(directory, step))

The planner of DCP decides which rank writes what; each rank's part is one shard of ours, so it is kept in memory,
checksummed, committed and retained like any other. DCP's metadata is not stored: it is made from the headers of the
shards. What DCP makes bytes of (everything that is no tensor) are bytes here too, and DCP's to read again.
"""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from ..layout import Layout, TensorPlace, TensorView
from ..manifest import Manifest, complete_steps, read_manifest
from ..shardfile import ShardHeader
from ..stored import locate_stored, open_stored
from ..tensors import TensorDoor
from ..tree import TensorRef, load_tree

KEY = "dcp"  # under which a rank's part stands in its shard
LOOK_SECONDS = 0.05
_STEP = re.compile(r"(?:.*/)?(?:step-)?(\d{1,18})/?\Z")


class Mark(Protocol):
    """See `ticket.Mark`."""

    @property
    def reason(self) -> str: ...

    def wait(self, timeout_seconds: float | None = None) -> bool: ...


class Ticket(Protocol):
    """See `ticket.Ticket`."""

    sealed: Mark
    durable: Mark


class Saver(Protocol):
    """A `Checkpointer`, ours or that of `transom`."""

    def save(self, state: dict[str, Any], step: int) -> Any: ...


class EngineWriter(StorageWriter):
    """Saves one step. `wait="durable"`: dcp.save returns when the step is complete on disk; "sealed": when it is in
    the engine's memory. Raises CheckpointError (DCP makes a CheckpointException of it) where that is not reached."""

    def __init__(
        self,
        checkpointer: Saver,
        step: int,
        directory: str | os.PathLike[str] | None = None,
        *,
        wait: Literal["durable", "sealed"] = "durable",
        wait_seconds_max: float = 3600.0,
    ) -> None:
        self._checkpointer = checkpointer
        self._step = step
        self._directory = None if directory is None else Path(directory)
        self._wait = wait
        self._wait_seconds_max = wait_seconds_max

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_in(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's part of the plan."""
        tensors, items, blobs = [], [], {}
        results = []
        for item in plan.items:
            resolved = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                raw = cast(io.BytesIO, resolved).getvalue()
                blobs[item.index.fqn] = raw
                size_bytes = len(raw)
            else:
                tensor = cast(torch.Tensor, resolved).detach()
                assert item.tensor_data is not None
                tensors.append(tensor)
                items.append([item.index.fqn, list(item.tensor_data.chunk.offsets), list(item.tensor_data.size)])
                size_bytes = tensor.numel() * tensor.element_size()
            results.append(WriteResult(index=item.index, size_in_bytes=size_bytes, storage_data=None))
        paths = [[name, list(path)] for name, path in (plan.planner_data or {}).items()]
        part = {"tensors": tensors, "items": items, "bytes": blobs, "paths": paths}
        ticket: Ticket = self._checkpointer.save({KEY: part}, self._step)
        self._require(ticket)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All ranks have written; wait for the manifest where the folder is known."""
        if self._wait != "durable" or self._directory is None:
            return
        pause = threading.Event()  # never set: a wait that is no sleep
        for _ in range(max(int(self._wait_seconds_max / LOOK_SECONDS), 1)):
            manifest = read_manifest(self._directory, self._step)
            if manifest is not None:
                return
            pause.wait(LOOK_SECONDS)
        raise CheckpointNotFound(f"step {self._step} is not complete after {self._wait_seconds_max:g} s")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _STEP.match(os.fspath(checkpoint_id)) is not None

    def _require(self, ticket: Ticket) -> None:
        mark = ticket.durable if self._wait == "durable" else ticket.sealed
        if mark.wait(self._wait_seconds_max):
            return
        if self._wait == "sealed" and ticket.durable.wait(0.0):
            return  # without an engine a save goes straight to the disk
        reason = mark.reason or f"not reached within {self._wait_seconds_max:g} s"
        raise CheckpointError(f"step {self._step} is not {self._wait}: {reason}")


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where something is: `index` counts the tensors of a rank's layout; -1: bytes."""

    rank: int
    index: int = -1


class EngineReader(StorageReader):
    """Reads one step of a job's checkpoint folder (None: the newest complete one): what `EngineWriter` saved, and
    the tensors of what `Checkpointer.save` saved, by their names. Every shard that is read is compared with its
    checksums first. Raises CheckpointNotFound, CheckpointDamaged."""

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        self._directory = Path(directory)
        self._step = step
        self._door = TensorDoor(torch)
        self._where: dict[MetadataIndex, _Stored] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_in(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Made from the headers of all ranks' shards."""
        manifest = self._manifest()
        described: dict[str, STORAGE_TYPES] = {}
        where: dict[MetadataIndex, _Stored] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for rank in range(manifest.world_size):
            header = locate_stored(self._directory, manifest, rank).header
            part = _part_of(header)
            if part is not None:
                paths.update({name: tuple(path) for name, path in part["paths"]})
                for name in part["bytes"]:
                    described[name] = BytesStorageMetadata()
                    where.setdefault(MetadataIndex(name), _Stored(rank))
            for name, offset, size, index in _tensors_of(header, part):
                tensor = header.layout.tensors[index]
                at = MetadataIndex(name, torch.Size(offset))
                if at in where:
                    continue  # a replica
                where[at] = _Stored(rank, index)
                known = described.setdefault(
                    name,
                    TensorStorageMetadata(
                        TensorProperties(dtype=self._door.dtypes[tensor.dtype]), torch.Size(size), []
                    ),
                )
                if isinstance(known, TensorStorageMetadata):
                    known.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(tensor.shape)))
        meta = StorageMeta(checkpoint_id=str(manifest.step))
        return Metadata(described, planner_data=paths or None, storage_data=where, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """What the coordinator found: all ranks read the same step."""
        self._where = metadata.storage_data
        assert metadata.storage_meta is not None
        self._step = int(str(metadata.storage_meta.checkpoint_id))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """One saved shard after the other, so that no more than one is in memory beside the state."""
        manifest = self._manifest()
        by_rank: dict[int, list[tuple[ReadItem, _Stored]]] = {}
        for item in plan.items:
            stored = self._where[item.storage_index]
            by_rank.setdefault(stored.rank, []).append((item, stored))
        for rank, wanted in sorted(by_rank.items()):
            self._read_rank(manifest, rank, wanted, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _STEP.match(os.fspath(checkpoint_id)) is not None

    def _read_rank(
        self, manifest: Manifest, rank: int, wanted: list[tuple[ReadItem, _Stored]], planner: LoadPlanner
    ) -> None:
        header, memory = open_stored(self._directory, manifest, rank)
        part = _part_of(header)
        tensors = self._door.views(memory, 0, header.layout)
        for item, stored in wanted:
            if item.type == LoadItemType.BYTE_IO:
                assert part is not None
                planner.load_bytes(item, io.BytesIO(part["bytes"][item.storage_index.fqn]))
                continue
            source = tensors[stored.index]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            if target.size() != source.size():  # copy_ would broadcast
                raise CheckpointDamaged(
                    f"{item.storage_index.fqn} is {list(source.size())} in the checkpoint, {list(target.size())} here"
                )
            target.copy_(source)
            planner.commit_tensor(item, target)

    def _manifest(self) -> Manifest:
        step = self._step
        if step is None:
            there = complete_steps(self._directory)
            if not there:
                raise CheckpointNotFound(f"there is no complete checkpoint under {self._directory}")
            step = there[-1].step
        manifest = read_manifest(self._directory, step)
        if manifest is None:
            raise CheckpointNotFound(f"step {step} is not complete under {self._directory}")
        return manifest


def step_in(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step that a checkpoint id of DCP names: `120`, `step-00000120`, or a path that ends so."""
    match = _STEP.match(os.fspath(checkpoint_id))
    if match is None:
        raise ValueError(f"the checkpoint id {os.fspath(checkpoint_id)!r:.100} does not end in a step's number")
    return int(match[1])


def _part_of(header: ShardHeader) -> dict[str, Any] | None:
    """What `EngineWriter` has said of its tensors; None where the shard is not one of its."""
    tree = load_tree(header.values, len(header.layout.tensors))
    part = tree.get(KEY) if isinstance(tree, dict) else None
    if not isinstance(part, dict) or part.keys() != {"tensors", "items", "bytes", "paths"}:
        return None
    return part


def _tensors_of(
    header: ShardHeader, part: dict[str, Any] | None
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """(name, offset, global shape, index) of each tensor in a shard."""
    if part is not None:
        for reference, (name, offset, size) in zip(part["tensors"], part["items"], strict=True):
            assert isinstance(reference, TensorRef)
            yield name, tuple(offset), tuple(size), reference.index
        return
    layout: Layout = header.layout
    for index, place in enumerate(layout.places):
        block = _block_of(place)
        if block is not None:
            yield place.name, *block, index


def _block_of(place: TensorPlace | TensorView) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if place.sharding is None:
        return (0,) * len(place.shape), place.shape
    if place.sharding.offset is None or any(kind[0] == "partial" for kind in place.sharding.placements):
        return None
    return place.sharding.offset, place.sharding.global_shape
