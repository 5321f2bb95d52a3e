"""Checkpoint engines and ranks to try them with: in a thread, as a process, and a rank that needs no torch."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_engine import wire
from ckpt_engine.admin import EngineAdmin
from ckpt_engine.clock import HostClock
from ckpt_engine.commit import commit_shard, finish_step
from ckpt_engine.engine import Engine, EngineConfig
from ckpt_engine.event import EngineEvent
from ckpt_engine.layout import layout_hash, plan_layout
from ckpt_engine.link import EngineLink
from ckpt_engine.segment import (
    PAGE_BYTES,
    SlotHeader,
    SlotState,
    begin_writing,
    publish_state,
    segment_bytes,
    write_header,
)
from ckpt_engine.shardfile import Identity
from ckpt_engine.storage import Storage

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_SECONDS = 20.0


def eventually(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Poll until `condition` is true; its value."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {DEADLINE_SECONDS} s"
        time.sleep(0.005)
    return value


@dataclass
class Lab:
    """An engine that runs in a thread of the test."""

    engine: Engine
    socket: Path
    directory: Path
    events: list[EngineEvent] = field(default_factory=list)

    @property
    def admin(self) -> EngineAdmin:
        return EngineAdmin(self.socket)

    def told(self, state: str, step: int | None = None, tier: str | None = None) -> list[EngineEvent]:
        return [
            event
            for event in list(self.events)
            if event.state == state and step in (None, event.step) and tier in (None, event.tier)
        ]


@contextmanager
def engine_in_thread(folder: Path, *, node: str = "n0", storage: Storage | None = None, **config: Any) -> Iterator[Lab]:
    """An engine with quick retries under `folder`, stopped at the end (which persists what memory holds)."""
    settings: dict[str, Any] = {"retry_seconds_min": 0.02, "retry_seconds_max": 0.05, "stop_seconds_max": 10.0}
    settings |= {"job": "job", "node": node, "socket_path": folder / f"{node}.sock", "directory": folder / "ck"}
    settings |= config
    events: list[EngineEvent] = []
    engine = Engine(EngineConfig(**settings), events.append, storage=storage)
    up = threading.Event()
    thread = threading.Thread(target=engine.run, args=(up.set,))
    thread.start()
    try:
        assert up.wait(DEADLINE_SECONDS)
        yield Lab(engine, settings["socket_path"], settings["directory"], events)
    finally:
        engine.stop()
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


def raw_header(step: int, payload_bytes: int, identity: Identity) -> tuple[SlotHeader, bytes]:
    """Header and layout of a shard that is one uint8 tensor named `bytes`."""
    layout = plan_layout([("bytes", "uint8", (payload_bytes,))]).encoded()
    values_offset = PAGE_BYTES + len(layout)
    payload_offset = segment_bytes(values_offset, 64)
    header = SlotHeader(
        identity.job, identity.attempt, identity.rank, identity.world_size, step, layout_hash(layout),
        len(layout), values_offset, len(RAW_VALUES), payload_offset, payload_bytes,
    )  # fmt: skip
    return header, layout


RAW_VALUES = b'{"$dict":[["bytes",{"$tensor":0}]]}'


def fill_segment(view: memoryview, header: SlotHeader, layout: bytes, payload: bytes) -> None:
    """All that a rank writes into a slot, in its order."""
    begin_writing(view)
    view[PAGE_BYTES : PAGE_BYTES + len(layout)] = layout
    view[header.values_offset : header.values_offset + header.values_bytes] = RAW_VALUES
    view[header.payload_offset : header.payload_offset + len(payload)] = payload
    write_header(view, header)
    publish_state(view, SlotState.SEALED)


class RawRank:
    """A rank without torch: it speaks the engine's protocol and writes one uint8 tensor."""

    def __init__(self, socket: Path, *, job: str = "job", attempt: int = 1, rank: int = 0, world_size: int = 1) -> None:
        self.identity = Identity(job, attempt, rank, world_size, -1)
        self.link = EngineLink(str(socket), self.identity, HostClock(), lambda: [], lambda *_: None)
        self.segments: dict[int, tuple[int, mmap.mmap]] = {}

    def acquire(self, step: int, payload_bytes: int, wait_seconds: float = 5.0) -> tuple[int, int, memoryview]:
        """(slot, generation, its memory)."""
        header, _ = raw_header(step, payload_bytes, self.identity)
        request = {
            "op": "acquire",
            "step": step,
            "segment_bytes": segment_bytes(header.payload_offset, payload_bytes),
            "known": [generation for generation, _ in self.segments.values()],
            "wait_seconds": wait_seconds,
        }
        reply, descriptors = self.link.ask(request)
        if "busy" in reply:
            raise TimeoutError(reply["busy"])
        index, generation = reply["slot"], reply["generation"]
        if descriptors:
            memory = mmap.mmap(descriptors[0], os.fstat(descriptors[0]).st_size, mmap.MAP_SHARED)
            wire.close_all(descriptors)
            self.segments[index] = (generation, memory)
        assert self.segments[index][0] == generation
        return index, generation, memoryview(self.segments[index][1])

    def seal(self, index: int, generation: int) -> None:
        self.link.ask({"op": "seal", "slot": index, "generation": generation, "seconds": 0.001})

    def save(self, step: int, payload: bytes) -> None:
        index, generation, view = self.acquire(step, len(payload))
        header, layout = raw_header(step, len(payload), self.identity)
        fill_segment(view, header, layout, payload)
        self.seal(index, generation)

    def durable(self, step: int, timeout_seconds: float = 10.0) -> str | None:
        """ "" once on disk, else why not; None: not yet."""
        identity = self.identity
        request = {
            "op": "wait", "rank": identity.rank, "attempt": identity.attempt, "step": step,
            "timeout_seconds": timeout_seconds,
        }  # fmt: skip
        reply = self.link.ask_aside(request, timeout_seconds)
        return reply["reason"] if reply["settled"] else None

    def load(self, step: int | None = None) -> dict[str, Any]:
        """What the engine would give this rank; a memory loan is read and given back."""
        reply, descriptors = self.link.ask({"op": "load", "step": step, "not_from_disk": []})
        if descriptors:
            size = os.fstat(descriptors[0]).st_size
            with mmap.mmap(descriptors[0], size, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory:
                from ckpt_engine.segment import payload_region, read_sealed

                with memoryview(memory) as view:
                    header = read_sealed(view)
                    with payload_region(view, header) as region:
                        reply["payload"] = bytes(region)
            wire.close_all(descriptors)
        return reply

    def close(self) -> None:
        self.link.close()

    def __enter__(self) -> RawRank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def step_on_disk(lab_directory: Path, step: int) -> Path:
    return lab_directory / f"step-{step:08d}"


PROGRAM = """
import json, sys
from pathlib import Path
from ckpt_engine.engine import Engine, EngineConfig
socket, directory, log, keeper_seconds, *more = sys.argv[1:]
file = open(log, "a", buffering=1)
def tell(event):
    file.write(json.dumps([event.state, event.step, event.rank, event.tier, event.reason]) + "\\n")
config = EngineConfig(
    "job", "n0", Path(socket), Path(directory), retry_seconds_min=0.05, retry_seconds_max=0.1,
    keeper_seconds_max=float(keeper_seconds), **json.loads(*more or ["{}"]),
)
Engine(config, tell).run(lambda: print("ready", flush=True))
"""


class EngineProcess:
    """An engine as a process of its own, to be killed."""

    def __init__(self, folder: Path, *prefix: str, keeper_seconds: float = 0.0, **config: Any) -> None:
        self.socket, self.directory, self.log = folder / "engine.sock", folder / "ck", folder / "events.jsonl"
        words = (self.socket, self.directory, self.log, keeper_seconds, json.dumps(config))
        command = [*prefix, sys.executable, "-c", PROGRAM, *map(str, words)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.end(9)

    def events(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def end(self, number: int) -> int:
        """Signal it and wait; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def raw_segment(step: int, payload: bytes, identity: Identity) -> tuple[SlotHeader, memoryview]:
    """A sealed segment in private memory."""
    header, layout = raw_header(step, len(payload), identity)
    view = memoryview(bytearray(segment_bytes(header.payload_offset, len(payload))))
    fill_segment(view, header, layout, payload)
    return header, view


def put_step(
    directory: Path,
    step: int,
    attempt: int = 1,
    *,
    ranks: Iterable[int] = (0,),
    world_size: int = 1,
    payload: bytes = b"weights",
    storage: Storage | None = None,
) -> bool:
    """Commit shards of a step, and the step if they are all there; whether it was completed by this."""
    storage = storage or Storage()
    for rank in ranks:
        header, view = raw_segment(step, payload, Identity("job", attempt, rank, world_size, -1))
        commit_shard(storage, directory, header, view, writer="n0")
    return finish_step(storage, directory, step, attempt, writer="n0") is not None
