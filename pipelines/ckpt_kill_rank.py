"""A rank for kill campaigns: it saves and loads through a real engine as fast as it can, without torch, until killed.

    python -m pipelines.ckpt_kill_rank SOCKET DIRECTORY ATTEMPT PAYLOAD_BYTES SEED

Every step's payload follows from attempt and step, so that whoever loads it can tell every byte. It tells what it did
on its output, a line each: `saved STEP`, `loading`, `loaded STEP TIER whole|torn`, `lost`. The words `load` and `save`
on its input say what to do next.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from ckpt_engine import wire
from ckpt_engine.clock import HostClock
from ckpt_engine.errors import CheckpointError, EngineUnavailable
from ckpt_engine.fetching import read_from_disk
from ckpt_engine.layout import layout_hash, plan_layout
from ckpt_engine.link import EngineLink
from ckpt_engine.segment import (
    PAGE_BYTES,
    SlotHeader,
    SlotState,
    begin_writing,
    payload_region,
    publish_state,
    read_sealed,
    segment_bytes,
    write_header,
)
from ckpt_engine.shardfile import Identity

JOB = "kills"
PIECE_BYTES = 64 << 10
BUSY_SECONDS_MAX = 20.0
RETRY_SECONDS = 0.02
VALUES = b'{"$dict":[["bytes",{"$tensor":0}]]}'


def payload_of(seed: int, attempt: int, step: int, size_bytes: int) -> bytes:
    """What attempt and step save: no two of them have a 64-byte line in common."""
    line = blake2b(f"{seed}/{attempt}/{step}".encode()).digest()
    return (line * (size_bytes // len(line) + 1))[:size_bytes]


class KillRank:
    """One rank of one."""

    def __init__(self, socket: str, directory: Path, attempt: int, payload_bytes: int, seed: int) -> None:
        self._directory = directory
        self._seed = seed
        self._payload_bytes = payload_bytes
        self._identity = Identity(JOB, attempt, 0, 1, -1)
        self._slots: dict[int, tuple[int, int, mmap.mmap]] = {}  # generation, descriptor, memory
        self._link = EngineLink(socket, self._identity, HostClock(), self._offers, self._kept)
        self._pause = threading.Event()
        self.step = 1
        self.loads = False

    def run(self) -> None:
        """Load what there is, then go on for ever."""
        self._load_surely()
        while True:
            try:
                if self.loads:
                    tell("loading")
                    self._load()
                else:
                    self._save(self.step)
                    tell(f"saved {self.step}")
                    self.step += 1
            except CheckpointError:
                self._come_back()

    def _come_back(self) -> None:
        """The engine is gone: wait for the next one, and look what it has."""
        tell("lost")
        self.step += 1  # what was begun may have been published
        self._load_surely()

    def _load_surely(self) -> None:
        while True:
            with contextlib.suppress(CheckpointError):  # no engine yet, or retention was quicker than we
                self._load()
                return
            self._pause.wait(RETRY_SECONDS)

    def _save(self, step: int) -> None:
        layout = plan_layout([("bytes", "uint8", (self._payload_bytes,))]).encoded()
        values_offset = PAGE_BYTES + len(layout)
        payload_offset = segment_bytes(values_offset, len(VALUES))
        request = {
            "op": "acquire", "step": step, "segment_bytes": segment_bytes(payload_offset, self._payload_bytes),
            "known": [generation for generation, _, _ in self._slots.values()], "wait_seconds": BUSY_SECONDS_MAX,
        }  # fmt: skip
        reply, descriptors = self._link.ask(request, BUSY_SECONDS_MAX)
        if "busy" in reply:
            raise EngineUnavailable(str(reply["busy"]))
        index, generation = wire.whole(reply, "slot"), wire.whole(reply, "generation")
        if descriptors:
            self._drop(index)
            size_bytes = os.fstat(descriptors[0]).st_size
            self._slots[index] = generation, descriptors[0], mmap.mmap(descriptors[0], size_bytes, mmap.MAP_SHARED)
        identity = self._identity
        header = SlotHeader(
            identity.job, identity.attempt, identity.rank, identity.world_size, step, layout_hash(layout),
            len(layout), values_offset, len(VALUES), payload_offset, self._payload_bytes,
        )  # fmt: skip
        view = memoryview(self._slots[index][2])
        begin_writing(view)
        view[PAGE_BYTES:values_offset] = layout
        payload = memoryview(payload_of(self._seed, identity.attempt, step, self._payload_bytes))
        for at in range(0, self._payload_bytes, PIECE_BYTES):
            piece = payload[at : at + PIECE_BYTES]
            view[payload_offset + at : payload_offset + at + len(piece)] = piece
        view[values_offset : values_offset + len(VALUES)] = VALUES
        write_header(view, header)
        publish_state(view, SlotState.SEALED)
        view.release()
        self._link.ask({"op": "seal", "slot": index, "generation": generation, "seconds": 0.0})

    def _load(self) -> None:
        """Load the newest step and say what it was."""
        reply, descriptors = self._link.ask({"op": "load", "step": None, "attempt": None, "without": []})
        tier = wire.text(reply, "tier")
        if not tier:
            tell("loaded 0 none whole")
            return
        step, attempt = wire.whole(reply, "step"), wire.whole(reply, "attempt")
        if descriptors:
            found = _in_memory(descriptors[0])
            self._link.ask({"op": "return"})
        else:
            wanted = Identity(JOB, attempt, 0, 1, step)
            shard = read_from_disk(self._directory, wanted)
            found = bytes(shard.memory[shard.payload_offset : shard.payload_offset + self._payload_bytes])
        good = found == payload_of(self._seed, attempt, step, self._payload_bytes)
        tell(f"loaded {step} {tier} {'whole' if good else 'torn'}")
        self.step = max(self.step, step + 1)

    def _offers(self) -> list[tuple[int, int]]:
        return [(index, descriptor) for index, (_, descriptor, _) in self._slots.items()]

    def _kept(self, indices: Sequence[int], generations: Sequence[int]) -> None:
        for index, generation in zip(indices, generations, strict=True):
            if generation:
                _, descriptor, memory = self._slots[index]
                self._slots[index] = generation, descriptor, memory
            else:
                self._drop(index)

    def _drop(self, index: int) -> None:
        _, descriptor, memory = self._slots.pop(index, (0, -1, None))
        if memory is not None:
            memory.close()
            os.close(descriptor)


def _in_memory(descriptor: int) -> bytes:
    try:
        size_bytes = os.fstat(descriptor).st_size
        with (
            mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory,
            memoryview(memory) as view,
            payload_region(view, read_sealed(view)) as region,
        ):
            return bytes(region)
    finally:
        os.close(descriptor)


def tell(line: str) -> None:
    """One line in one write, so that a kill leaves it whole or away."""
    os.write(1, f"{line}\n".encode())


def main(arguments: Sequence[str]) -> None:
    """Run until killed, or until nobody is left to say what to do."""
    socket, directory, attempt, payload_bytes, seed = arguments
    rank = KillRank(socket, Path(directory), int(attempt), int(payload_bytes), int(seed))
    threading.Thread(target=rank.run, daemon=True).start()
    for line in sys.stdin:
        rank.loads = line.strip() == "load"


if __name__ == "__main__":
    main(sys.argv[1:])
