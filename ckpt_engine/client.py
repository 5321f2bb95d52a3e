"""`Checkpointer`, what a training script holds: save in one copy, load from memory or from disk.

ckpt = Checkpointer(socket, directory, job="gpt", attempt=2, rank=0, world_size=4, node="n0")
state = {"model": model, "optimizer": optimizer, "step": 0}
report = ckpt.load(into=state, policy="newest")
ticket = ckpt.save(state, step=120)

This file saves; `loading.py` loads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from .clock import Clock, HostClock
from .copying import CopyThreads, threads_for
from .fenced import FencedSaves
from .link import EngineLink
from .loading import AGREE_SECONDS_MAX, Loader, LoadReport, Policy, Verify, Views
from .saving import SavePlace, Saver
from .shardfile import Identity
from .tensors import TensorDoor
from .ticket import Ticket
from .verifying import VERIFY_SECONDS_MAX

_log = logging.getLogger(__name__)

Mode = Literal["copy", "fenced"]


class Checkpointer:
    """One rank's checkpoints. `socket`: the node's engine; without one, saves go straight to `directory` and
    wait for it.

    While the other slot is still being read, a save waits `busy_wait_seconds` for it and is then skipped.
    `mode`: "copy" copies all in `save`; "fenced" lets the engine copy while training computes, see `fenced.py`.
    """

    def __init__(
        self,
        socket: str | None,
        directory: str | None,
        *,
        job: str,
        attempt: int,
        rank: int,
        world_size: int,
        node: str,
        clock: Clock | None = None,
        busy_wait_seconds: float = 2.0,
        copy_threads: int | None = None,
        retention_steps: int = 3,
        agree_seconds_max: float = AGREE_SECONDS_MAX,
        mode: Mode = "copy",
    ) -> None:
        try:
            import torch  # here, because a rank that saves nothing should not pay for it
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "transom.Checkpointer needs PyTorch, which is not installed; run: pip install 'transom[ckpt]'",
                name=error.name,
            ) from None

        if not socket and not directory:
            raise ValueError("a Checkpointer needs the engine's socket or a directory; it has neither")
        self._identity = Identity(job, attempt, rank, world_size, -1)
        self._node = node
        self._clock: Clock = clock or HostClock()
        self._door = TensorDoor(torch)
        self._directory = Path(directory) if directory else None
        self._lock = threading.RLock()
        self._last: Ticket | None = None
        self._link = EngineLink(socket, self._identity, self._clock, self._offers, self._kept) if socket else None
        threads = CopyThreads(copy_threads or threads_for(len(os.sched_getaffinity(0))))
        place = SavePlace(self._link, self._directory, busy_wait_seconds, retention_steps)
        self._saver = Saver(self._door, threads, self._identity, self._clock, place)
        self._loader = Loader(self._door, self._identity, self._clock, self._link, self._directory, agree_seconds_max)
        self._saver.forbidden = self._loader.looks_at
        self._fenced: FencedSaves | None = None
        if mode == "fenced" and self._link is not None:
            self._fenced = self._fenced_saves(self._link, threads, busy_wait_seconds)
        elif mode not in ("copy", "fenced"):
            raise ValueError(f"mode is copy or fenced, not {mode!r}")
        if self._link is None:
            _log.warning("there is no checkpoint engine: every save waits for the disk at %s", directory)

    def save(self, state: dict[str, Any], step: int) -> Ticket:
        """Keep `state` as it is now. Raises TypeError where it holds something that cannot be saved; else
        never."""
        with self._lock:
            if self._last is not None and self._last.step == step and not self._last.failed:
                return self._last
            self._loader.settle_views()
            if self._fenced is None:
                ticket = self._saver.save(state, step)
            else:
                ticket = self._fenced.save(state, step, self._saver.stamped(step))
            if ticket.failed:
                _log.warning("step %d was not saved: %s", step, ticket.failed)
            self._last = ticket
            return ticket

    def load(
        self,
        into: dict[str, Any],
        policy: Policy | None = "newest",
        verify: Verify = "first",
        *,
        step: int | None = None,
    ) -> LoadReport | None:
        """Make `into` what it was at the newest step, the newest verified one, or the one with that number; None
        where there is none. Copies that are damaged are never handed over. See `loading.Loader.load`."""
        with self._lock:
            self.fence()
            report = self._loader.load(into, policy if step is None else step, verify)
            self.prepare(into)
            return report

    def load_views(
        self, policy: Policy | None = "newest", verify: Verify = "first", *, step: int | None = None
    ) -> Views | None:
        """The state itself, as views of the memory that the checkpoint is in. See `loading.Loader.load_views`."""
        with self._lock:
            return self._loader.load_views(policy if step is None else step, verify)

    def await_verified(self, timeout_seconds: float = VERIFY_SECONDS_MAX) -> None:
        """Return once what was loaded with `verify="deferred"` is known to be what was saved. Raises
        CheckpointDamaged where it is not."""
        self._loader.await_verified(timeout_seconds)

    def verify_before(self, optimizer: Any) -> None:
        """Let `optimizer` call `await_verified` before its next step. `load` does this for what it was given."""
        self._loader.verify_before(optimizer)

    def prepare(self, state: dict[str, Any]) -> None:
        """Have the engine make memory ready for states like this one while training goes on, so that the first save
        takes no longer than any other. `load` does this by itself, for what it was given."""
        with self._lock:
            if self._fenced is not None:
                return  # the engine makes it during the first save, which does not wait for it
            self._saver.prepare(state)

    def adopt(self, state: dict[str, Any]) -> int:
        """In fenced mode: move parameters and optimizer tensors to where the engine reads them, now instead of in the
        first save; the bytes that live there. Raises TypeError naming what cannot be moved. See `fenced.py`."""
        with self._lock:
            return 0 if self._fenced is None else self._fenced.adopt(state)

    def fence(self) -> float:
        """In fenced mode: call it before anything of the state is written; the seconds that it waited. The optimizers
        in a saved state do so by themselves before each step."""
        return 0.0 if self._fenced is None else self._fenced.fence()

    def fence_before(self, optimizer: Any) -> None:
        """In fenced mode: fence before each step of an optimizer that no saved state holds as an object."""
        if self._fenced is not None:
            self._fenced.fence_before(optimizer)

    def close(self) -> None:
        """Let go of the engine; what is saved stays."""
        with self._lock:
            if self._fenced is not None:
                self._fenced.close()
            self._loader.close()
            self._saver.close()
            if self._link is not None:
                self._link.close()

    def _offers(self) -> list[tuple[int, int]]:
        return self._saver.offers() if self._fenced is None else self._fenced.offers()

    def _kept(self, indices: Sequence[int], generations: Sequence[int]) -> None:
        (self._saver if self._fenced is None else self._fenced).kept(indices, generations)

    def _fenced_saves(self, link: EngineLink, threads: CopyThreads, busy_wait_seconds: float) -> FencedSaves:
        saver = self._saver
        return FencedSaves(
            self._door, link, self._clock, threads, saver.take,
            lambda step, timeout: saver.await_durable(link, step, timeout),
            lambda step, timeout: saver.await_backed_up(link, step, timeout),
            self._loader.looks_at, busy_wait_seconds,
        )  # fmt: skip
