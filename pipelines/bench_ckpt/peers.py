"""Other ways to save the same state, to be timed in the same rounds: torch's own, and libraries where they are.

Each is used as its own documents say, on a machine without a GPU, with the options that are best for it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from ingest.clock import SystemClock
from pipelines.bench_ckpt.rounds import Settle
from pipelines.bench_ckpt.states import Training

SAVE, SAVE_FSYNC = "torch.save", "torch.save+fsync"
DCP_DEFAULT, DCP_REUSED = "dcp.async_save", "dcp.async_save, reused stager"
WAIT_SECONDS_MAX = 300

Call = Callable[[int], Settle | None]


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to save. `call` is the stall; what it returns waits for the rest."""

    name: str
    call: Call
    first_seconds: float = 0.0


@dataclass(slots=True)
class Peers:
    """Those that work here, and why the others do not."""

    there: list[Peer] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def open_peers(folder: Path, training: Training, stack: contextlib.ExitStack) -> Peers:
    """Every peer that is installed and saves once without an error; closed with `stack`."""
    folder.mkdir(parents=True, exist_ok=True)
    openings: list[tuple[str, str, Callable[[Path, Training], Any]]] = [
        (SAVE, "torch", _torch_save),
        (SAVE_FSYNC, "torch", _torch_save_fsync),
        (DCP_DEFAULT, "torch", _dcp_default),
        (DCP_REUSED, "torch", _dcp_reused),
        ("torch-checkpointing", "torch-checkpointing", _torch_checkpointing),
        ("lm-resiliency", "lm-resiliency", _lm_resiliency),
        ("dlrover", "dlrover", _dlrover),
    ]
    peers, clock = Peers(), SystemClock().monotonic
    for name, distribution, opening in openings:
        try:
            metadata.version(distribution)
        except metadata.PackageNotFoundError:
            peers.missing[name] = "not installed"
            continue
        place = folder / name.replace(" ", "-")
        place.mkdir()
        try:
            call = stack.enter_context(opening(place, training))
            began = clock()
            settle = call(0)
            first_seconds = clock() - began
            if settle is not None:
                settle()
        except Exception as error:  # noqa: BLE001 - somebody else's code: whatever it raises, the others are measured
            peers.missing[name] = f"does not work here: {type(error).__name__}: {error}"[:300]
            continue
        peers.there.append(Peer(name, call, first_seconds))
    return peers


@contextmanager
def _torch_save(folder: Path, training: Training) -> Iterator[Call]:
    path = folder / "state.pt"
    yield lambda number: torch.save(training.state_dicts, path)


@contextmanager
def _torch_save_fsync(folder: Path, training: Training) -> Iterator[Call]:
    def call(number: int) -> None:
        with (folder / "state.pt").open("wb") as file:
            torch.save(training.state_dicts, file)
            file.flush()
            os.fsync(file.fileno())

    yield call


@contextmanager
def _dcp_default(folder: Path, training: Training) -> Iterator[Call]:
    yield _dcp_call(folder, training, None)


@contextmanager
def _dcp_reused(folder: Path, training: Training) -> Iterator[Call]:
    stager = DefaultStager(StagingOptions(False, False, False, False))  # what async_save makes anew for each call
    try:
        yield _dcp_call(folder, training, stager)
    finally:
        stager.close()


def _dcp_call(folder: Path, training: Training, stager: DefaultStager | None) -> Call:
    def call(number: int) -> Settle:
        target = folder / str(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved: Any = async_save(training.state_dicts, checkpoint_id=target, async_stager=stager, no_dist=True)
        staged = getattr(saved, "staging_completion", None)
        if staged is not None:
            staged.result(WAIT_SECONDS_MAX)  # before that nothing may be changed: it belongs to the stall

        def settle() -> None:
            getattr(saved, "upload_completion", saved).result(WAIT_SECONDS_MAX)
            shutil.rmtree(target)

        return settle

    return call


@contextmanager
def _torch_checkpointing(folder: Path, training: Training) -> Iterator[Call]:
    package = importlib.import_module("torch_checkpointing")
    staging = package.CheckpointStagerConfig(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    process = importlib.import_module("torch_checkpointing.checkpoint_process").CheckpointProcessConfig(
        subprocess_init_timeout_secs=WAIT_SECONDS_MAX
    )
    storage = importlib.import_module("torch_checkpointing.storage.filesystem")
    config = package.CheckpointManager.Config(
        save=package.AsyncCheckpointSaverConfig(staging_config=staging, process_config=process),
        storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),  # it fails on ext4
    )
    saver = config.build()

    def call(number: int) -> Settle:
        target = folder / str(number)
        written = saver.save(str(target), training.state_dicts)
        with saver.lock():  # what its documents wrap the optimizer's step in: it waits for the copy
            pass

        def settle() -> None:
            written.result(WAIT_SECONDS_MAX)
            shutil.rmtree(target)

        return settle

    try:
        yield call
    finally:
        saver.close()


@contextmanager
def _lm_resiliency(folder: Path, training: Training) -> Iterator[Call]:
    package = importlib.import_module("lm_resiliency")
    experimental = importlib.import_module("lm_resiliency.experimental")
    config = package.InMemoryCkptConfig(interval=1, disk_flush_interval=0, disk_folder=str(folder), pin_memory=False)
    saver, steps = experimental.InMemoryCheckpointManager(config), count(1)

    def call(number: int) -> None:
        saver.save(training.state_dicts, next(steps))
        saver.maybe_wait()

    try:
        yield call
    finally:
        saver.close()


@contextmanager
def _dlrover(folder: Path, training: Training) -> Iterator[Call]:
    """Its handler of shared memory alone: what its save does while training waits, without its agent's locks."""
    os.environ.setdefault("TORCHELASTIC_RUN_ID", f"bench{os.getpid()}-{Path(tempfile.mkdtemp(dir=folder)).name}")
    saver = importlib.import_module("dlrover.python.elastic_agent.torch.ckpt_saver")
    handler = saver.SharedMemoryHandler(0, host=True)

    def call(number: int) -> None:
        state = training.state_dicts
        state[saver.DLROVER_CKPT_CONFIG_KEY] = saver.CheckpointConfig(step=number)
        handler.save_state_dict(state)

    try:
        yield call
    finally:
        handler.close()
        handler.unlink()
