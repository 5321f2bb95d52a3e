"""kill -9 at random instants: of a rank, its engine, both, the keeper, engine and keeper, or the engine of the node
that keeps copies, while they save, persist, back up and load. Counts what it cost. Real processes; the same seed
chooses the same victims and waits."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.errors import EngineUnavailable
from ckpt_engine.inspection import verify_steps
from ckpt_engine.keeping import keeper_status
from ingest.clock import Clock
from pipelines.ckpt_kill_engine import HOLDER, HOME
from pipelines.ckpt_kill_peer import copies_at_peer
from pipelines.errors import StatedError

VICTIMS = ("rank", "engine", "rank+engine", "keeper", "engine+keeper", "peer")
PHASES = ("save", "save", "load")  # the engine persists, and copies to the other node, behind all of them
DEADLINE_SECONDS = 60.0
WAIT_SECONDS_MAX = 0.03  # from the last thing that was seen to the kill
LOOK_SECONDS = 0.005
DISK_LOOK_KILLS = 20  # between two looks at every byte on disk
ROOT = Path(__file__).resolve().parents[1]
START = "import sys; sys.path.append({root!r}); from {module} import main; main(sys.argv[1:])"


@dataclass(slots=True)
class KillCounts:
    """What a campaign has seen. `torn`: loads, copies that the other node hands out, and shards on disk, that were not
    one whole save, bit for bit; `copies`: how many of those copies were looked at.
    `saves_lost_max`: saves that the engine had acknowledged and one kill cost. `engine_kill_lost`: saves that memory
    lost, over all kills of only the engine."""

    kills: int = 0
    torn: int = 0
    saves_lost_max: int = 0
    engine_kill_lost: int = 0
    loads: int = 0
    copies: int = 0
    by_victim: dict[str, int] = field(default_factory=dict)
    by_tier: dict[str, int] = field(default_factory=dict)


def kill_at_random(
    folder: Path,
    *,
    kills: int,
    seed: int,
    clock: Clock,
    payload_bytes: int = 1 << 20,
    progress: Callable[[int], None] = lambda done: None,
) -> KillCounts:
    """Run a campaign in `folder`, which should be new. Raises StatedError where something does not come back."""
    with _Campaign(folder, seed, payload_bytes, clock) as campaign:
        for done in range(kills):
            campaign.kill_once()
            progress(done + 1)
            campaign.look_at_peer()
            if done % DISK_LOOK_KILLS == DISK_LOOK_KILLS - 1:
                campaign.look_at_disk()
        campaign.finish()
        return campaign.counts


class _Rank:
    """A rank's process and what it says."""

    def __init__(self, campaign: _Campaign, attempt: int) -> None:
        self.saved = 0
        self.said: queue.Queue[tuple[str, ...]] = queue.Queue()
        words = (campaign.socket, campaign.directory, attempt, campaign.payload_bytes, campaign.seed)
        self.process = _start("pipelines.ckpt_kill_rank", *words, talks=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def order(self, word: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """kill -9; then all it had said is heard."""
        self.process.kill()
        self.process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = tuple(line.split())
            if words[0] == "saved":
                self.saved = int(words[1])
            self.said.put(words)


class _Campaign:
    """One engine and one rank that live on through all kills."""

    def __init__(self, folder: Path, seed: int, payload_bytes: int, clock: Clock) -> None:
        self.socket, self.directory = folder / "e.sock", folder / "ck"
        self._peer_socket = folder / "p.sock"
        self.seed, self.payload_bytes = seed, payload_bytes
        self.counts = KillCounts()
        self._victims: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._clock = clock
        self._attempt = 0
        self._acknowledged = 0  # the newest step that an engine has taken
        self._engine: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Campaign:
        self._peer = self._start_engine(self._peer_socket, HOLDER)
        try:
            self._engine = self._start_engine(self.socket, HOME)
            self._rank = self._start_rank()
        except BaseException:
            self._clear_away()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._rank.end()
        self._clear_away()

    def _clear_away(self) -> None:
        for engine in (self._engine, self._peer):
            if engine is not None:
                _end(engine)
        with suppress(EngineUnavailable, KeyError, ProcessLookupError):
            os.kill(int(keeper_status(self.socket)["pid"]), signal.SIGKILL)

    def kill_once(self) -> None:
        """One kill, and what came back."""
        victim, phase = self._dice.choice(VICTIMS), self._dice.choice(PHASES)
        self._rank.order("save")
        keeper = self._await_keeper()
        if victim == "engine+keeper":  # the rank holds memory that it has saved into, not what it only loads
            for _ in range(2):
                self._await("saved")
        self._rank.order(phase)
        self._await("saved" if phase == "save" else "loading")
        self._clock.sleep(self._dice.random() * WAIT_SECONDS_MAX)
        if "keeper" in victim:
            os.kill(keeper, signal.SIGKILL)
        if "engine" in victim:
            assert self._engine is not None
            _end(self._engine)
        if "rank" in victim:
            self._rank.end()
        if victim == "peer":
            _end(self._peer)
        self._hear_out()
        acknowledged = self._acknowledged
        if "engine" in victim:
            self._engine = self._start_engine(self.socket, HOME)
        if victim == "peer":
            self._peer = self._start_engine(self._peer_socket, HOLDER)
        if "rank" in victim:
            self._rank = self._start_rank()
        elif "engine" in victim:
            self._await("lost")
        if victim not in ("keeper", "peer"):
            self._count(victim, acknowledged)
        self.counts.kills += 1
        self._victims[victim] += 1

    def look_at_peer(self) -> None:
        """What the other node hands out must be whole, whatever was killed in the middle of a copy."""
        found = copies_at_peer(self.directory, self.seed, self.payload_bytes)
        self.counts.copies += len(found)
        self.counts.torn += found.count(False)

    def look_at_disk(self) -> None:
        """Every shard that a manifest names must be whole, unless retention has taken its step meanwhile."""
        for verdict in verify_steps(self.directory):
            folder = self.directory / f"step-{verdict.step:08d}"
            if not verdict.whole and (folder / "manifest.json").exists() and (folder / verdict.file).exists():
                self.counts.torn += 1

    def finish(self) -> None:
        """End all as it should end, and look at the disk once more."""
        self._rank.end()
        assert self._engine is not None
        for engine in (self._engine, self._peer):
            engine.terminate()
            engine.wait(DEADLINE_SECONDS)
        self.look_at_disk()
        self.counts.by_victim = dict(self._victims)
        self.counts.by_tier = dict(self._tiers)

    def _count(self, victim: str, acknowledged: int) -> None:
        _, step, tier, _ = self._await("loaded")
        lost = max(acknowledged - int(step), 0)
        self._tiers[tier] += 1
        self.counts.saves_lost_max = max(self.counts.saves_lost_max, lost)
        if victim == "engine":
            self.counts.engine_kill_lost += max(lost, int(tier != "memory"))
        self._acknowledged = max(self._acknowledged, int(step)) if not lost else int(step)

    def _await(self, word: str) -> tuple[str, ...]:
        """The next line of the rank that begins with `word`."""
        try:
            while True:
                words = self._rank.said.get(timeout=DEADLINE_SECONDS)
                self._hear(words)
                if words[0] == word:
                    return words
        except queue.Empty:
            raise StatedError(f"the rank did not say {word!r} within {DEADLINE_SECONDS:.0f} s after a kill") from None

    def _hear_out(self) -> None:
        """What is said already: after the death of a rank, all it ever said."""
        with suppress(queue.Empty):
            while True:
                words = self._rank.said.get_nowait()
                self._hear(words)
                if words[0] == "lost":
                    self._rank.said.put(words)
                    return

    def _hear(self, words: tuple[str, ...]) -> None:
        if words[0] == "saved":
            self._acknowledged = max(self._acknowledged, int(words[1]))
        elif words[0] == "loaded":
            self.counts.loads += 1
            self.counts.torn += words[3] != "whole"

    def _await_keeper(self) -> int:
        deadline = self._clock.monotonic() + DEADLINE_SECONDS
        while True:
            with suppress(EngineUnavailable):
                status = keeper_status(self.socket)
                if status.get("engine") and status.get("kept") and status.get("settled"):
                    return int(status["pid"])
            if self._clock.monotonic() > deadline:
                raise StatedError(f"no keeper holds the engine's memory after {DEADLINE_SECONDS:.0f} s")
            self._clock.sleep(LOOK_SECONDS)

    def _start_engine(self, socket: Path, node: str) -> subprocess.Popen[str]:
        process = _start("pipelines.ckpt_kill_engine", socket, self.directory, node)
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise StatedError(f"the engine did not start (exit code {process.wait(DEADLINE_SECONDS)})")
        except BaseException:  # whoever loses patience leaves no process behind
            _end(process)
            raise
        return process

    def _start_rank(self) -> _Rank:
        self._attempt += 1
        return _Rank(self, self._attempt)


def _start(module: str, *words: object, talks: bool = False) -> subprocess.Popen[str]:
    """A process of one of our modules without site-packages, which it does not need: it starts twice as fast."""
    program = START.format(root=str(ROOT), module=module)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, *map(str, words)],
        stdin=subprocess.PIPE if talks else subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd="/",
    )  # fmt: skip


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(DEADLINE_SECONDS)
    if process.stdout is not None:
        process.stdout.close()
