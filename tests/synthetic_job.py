"""A training job made of numbers: the messages a small DDP job sends, with the noise measured on two shared cores.

Per-rank noise of 2.5 % with a heavy tail, bursts of +10 to 20 % for up to 15 steps that hit both ranks of a core,
and a common load that hits everyone. Times are seconds; the job starts at `START`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from detectors.clues import TOPIC_OF, Place
from detectors.config import DetectorConfig
from detectors.job_detector import JobDetector
from detectors.merge import Merge
from detectors.verdict import Verdict
from ingest.events import (
    AttemptEnded,
    AttemptStarted,
    ErrorRecord,
    LogLine,
    Logs,
    Message,
    Metrics,
    NodeHeartbeat,
    RankExited,
    RankPlace,
    RankStalled,
    RankStarted,
    split_non_finite,
)

START = 1000.0
FLUSH_SECONDS = 0.2
GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:2999."
    " This is typically caused by a remote worker crashing"
)


@dataclass
class SyntheticJob:
    """Steps of one attempt after another, as messages sorted by time. Faults are methods; each ends or bends it."""

    seed: int = 0
    world: int = 4
    per_node: int = 2
    job: str = "job"
    attempt: int = 1
    at: float = START
    step: int = 0
    messages: list[Message] = field(default_factory=list)
    own_seconds: float = 0.064
    burst_share: float = 0.02  # of steps in which a core's burst begins
    roles: Sequence[str] = ()  # as the job gives them

    def __post_init__(self) -> None:
        self.dice = np.random.default_rng(self.seed)
        self.counts: Counter[tuple[object, ...]] = Counter()
        self.role = 1.0 + self.dice.normal(0.0, 0.03, self.world)
        self.gone: set[int] = set()
        self.silent_nodes: set[str] = set()
        self.norms: dict[tuple[int, int], float] = {}
        self.losses: dict[tuple[int, int], float] = {}

    def node(self, rank: int) -> str:
        return f"node{rank // self.per_node}"

    @property
    def nodes(self) -> list[str]:
        return [f"node{index}" for index in range((self.world + self.per_node - 1) // self.per_node)]

    def stamp(self, rank: int, topic: str, at: float, node: str | None = None) -> dict[str, object]:
        name = node or self.node(rank)
        key = (self.attempt, rank, name, topic)
        self.counts[key] += 1
        return {
            "job": self.job, "attempt": self.attempt, "rank": rank, "node": name,
            "sequence": self.counts[key] - 1, "at": round(float(at), 6),
        }  # fmt: skip

    def say(self, message: Message) -> None:
        if message.node not in self.silent_nodes:
            self.messages.append(message)

    def start(self, resume_step: int | None = None) -> SyntheticJob:
        """Attempt starts: places, processes, and half a second until the first step."""
        places = tuple(
            RankPlace(rank=rank, local_rank=rank % self.per_node, node=self.node(rank)) for rank in range(self.world)
        )
        self.say(
            AttemptStarted(
                **self.stamp(-1, "events", self.at, "node0"),
                world_size=self.world,
                places=places,
                resume_step=resume_step,
            )
        )
        for rank in range(self.world):
            self.say(
                RankStarted(
                    **self.stamp(rank, "events", self.at + 0.01), pid=4000 + rank, local_rank=rank % self.per_node,
                    pci_address=f"0000:{rank:02x}:00.0", role=self.roles[rank] if self.roles else "",
                )
            )  # fmt: skip
        if resume_step is not None:
            self.step = resume_step + 1
        self.idle(0.6, "init", -1)
        return self

    def restart(self, resume_step: int) -> SyntheticJob:
        """The next attempt, everything alive again."""
        self.attempt += 1
        self.at += 1.0
        self.gone.clear()
        self.silent_nodes.clear()
        return self.start(resume_step)

    def beats(self, begin: float, end: float) -> None:
        """Launcher heartbeats in [begin, end)."""
        for index, node in enumerate(self.nodes):
            at = np.ceil(begin / FLUSH_SECONDS) * FLUSH_SECONDS + 0.01 * index
            while at < end:
                alive = tuple(r for r in range(self.world) if self.node(r) == node and r not in self.gone)
                self.say(NodeHeartbeat(**self.stamp(-1, "events", at, node), ranks_alive=alive))
                at += FLUSH_SECONDS

    def idle(
        self, seconds: float, phase: str, step: int, *, silent: Sequence[int] = (), phases: dict[int, str] | None = None
    ) -> SyntheticJob:
        """Nothing moves for a while: heartbeats only; `silent` ranks do not even send those."""
        begin, end = self.at, self.at + seconds
        for rank in range(self.world):
            if rank in self.gone or rank in silent:
                continue
            at = begin + 0.013 * rank
            while at < end:
                self.say(Metrics(**self.stamp(rank, "metrics", at), phase=(phases or {}).get(rank, phase), step=step))
                at += FLUSH_SECONDS
        self.beats(begin, end)
        self.at = end
        return self

    def train(
        self,
        steps: int,
        *,
        slow: dict[int, float] | None = None,
        late_data: dict[int, float] | None = None,
        contended: Sequence[str] = (),
        checkpoint_at: Sequence[int] = (),
        wall_only: bool = False,
    ) -> SyntheticJob:
        """`steps` steps; `slow` multiplies a rank's compute, `late_data` adds seconds to its data wait."""
        own = self._own(steps)
        for rank, factor in (slow or {}).items():
            own[rank] *= factor
        queue = np.abs(self.dice.normal(1.0, 0.08, (self.world, steps))) * self.own_seconds
        for rank in range(self.world):
            if self.node(rank) in contended:
                queue[rank] += self.own_seconds * self.dice.normal(1.0, 0.1, steps)
        data = np.abs(self.dice.normal(0.0005, 0.0004, (self.world, steps)))
        for rank, seconds in (late_data or {}).items():
            data[rank] += seconds
        wall = own + queue
        rest = 0.03 + np.abs(self.dice.normal(0.0, 0.003, steps))
        lengths = (wall + data).max(axis=0) + rest
        ends = self.at + np.cumsum(lengths)
        numbers = np.arange(self.step, self.step + steps)
        for rank in range(self.world):
            if rank in self.gone:
                continue
            columns = {
                "train.step.duration": lengths,
                "train.data.duration": data[rank],
                "train.compute.duration": wall[rank],
                "train.collective.wait": lengths - wall[rank] - data[rank],
                "train.run_queue.delay": queue[rank],
                "train.forward.duration": wall[rank] * 0.35,
                "train.backward.duration": wall[rank] * 0.65,
                "train.optimizer.duration": rest * 0.3,
                "train.compute.cpu": own[rank] * 0.98,
                "train.compute.own": own[rank],
                "train.loss": 4.0 - 0.001 * numbers,
                "train.gradient.local_norm": np.abs(self.dice.normal(1.0, 0.1, steps)),
            }
            if wall_only:
                del columns["train.compute.own"], columns["train.run_queue.delay"]
            self._flush(rank, numbers, ends, columns, set(checkpoint_at))
        self.beats(self.at, float(ends[-1]))
        self.at, self.step = float(ends[-1]), self.step + steps
        return self

    def _own(self, steps: int) -> np.ndarray:
        """Own compute seconds, rank x step, with the measured noise."""
        shape = (self.world, steps)
        noise = self.dice.normal(1.0, 0.025, shape)
        spikes = self.dice.random(shape) < 0.015
        noise += spikes * self.dice.uniform(0.05, 0.30, shape)
        for core in range(0, self.world, self.per_node):
            step = 0
            while step < steps:
                if self.dice.random() < self.burst_share:
                    length = int(self.dice.integers(3, 16))
                    height = self.dice.uniform(0.10, 0.20)
                    mates = slice(core, core + self.per_node)
                    noise[mates, step : step + length] *= 1.0 + height * self.dice.uniform(0.85, 1.0, (1, 1))
                    step += length
                step += 1
        common = 1.0 + 0.02 * np.sin(np.arange(steps) / 17.0)
        return np.asarray(self.own_seconds * self.role[:, None] * noise * common)

    def _flush(
        self, rank: int, numbers: np.ndarray, ends: np.ndarray, columns: dict[str, np.ndarray], checkpoints: set[int]
    ) -> None:
        at, end, done = self.at + 0.013 * rank + 0.05, float(ends[-1]), 0
        while done < len(numbers):
            at = min(at, end)
            upto = int(np.searchsorted(ends, at, side="right"))
            picked = {name: [float(f"{value:.6g}") for value in values[done:upto]] for name, values in columns.items()}
            for index, step in enumerate(numbers[done:upto]):
                key = (rank, int(step))
                picked["train.loss"][index] = self.losses.get(key, picked["train.loss"][index])
                norm = self.norms.get(key, picked["train.gradient.local_norm"][index])
                picked["train.gradient.local_norm"][index] = norm
            finite, rest = split_non_finite(picked)
            now = int(numbers[upto]) if upto < len(numbers) else int(numbers[-1]) + 1
            self.say(
                Metrics(
                    **self.stamp(rank, "metrics", at), phase="checkpoint" if now in checkpoints else "train", step=now,
                    steps=tuple(int(step) for step in numbers[done:upto]),
                    ended_at=tuple(float(end) for end in ends[done:upto]),
                    columns=finite if upto > done else {}, non_finite=rest if upto > done else (),
                )
            )  # fmt: skip
            done = upto
            at += FLUSH_SECONDS

    def log(
        self, rank: int, text: str, *, node: str | None = None, stream: str = "stderr", after: float = 0.0
    ) -> SyntheticJob:
        line = LogLine(at=round(self.at + after, 6), stream=stream, text=text)
        self.say(Logs(**self.stamp(rank, "logs", self.at + after, node), lines=(line,)))
        return self

    def exits(
        self,
        rank: int,
        *,
        after: float,
        code: int | None = None,
        signal: int | None = None,
        error: tuple[str, str] | None = None,
        stopped: bool = False,
        last_lines: tuple[str, ...] = (),
    ) -> SyntheticJob:
        record = ErrorRecord(type=error[0], text=error[1]) if error else None
        self.say(
            RankExited(
                **self.stamp(rank, "events", self.at + after), exit_code=code, signal=signal, error=record,
                stopped_by_launcher=stopped, last_lines=last_lines,
            )
        )  # fmt: skip
        self.gone.add(rank)
        return self

    def peers_fall(self, *, but: Sequence[int] = (), after: float = 0.1, spread: float = 0.6) -> SyntheticJob:
        """The survivors lose their peers one after another."""
        for index, rank in enumerate(r for r in range(self.world) if r not in self.gone and r not in but):
            self.exits(rank, after=after + spread * index, code=1, error=("RuntimeError", GLOO))
        return self

    def kill(self, rank: int, signal: int = 9) -> SyntheticJob:
        self.exits(rank, after=0.05, signal=signal)
        self.peers_fall(after=0.15)
        return self.idle(8.0, "train", self.step)

    def stop(self, rank: int, *, seen: bool = True, seconds: float = 8.0) -> SyntheticJob:
        """SIGSTOP inside a step: the rank is silent, its peers wait in the collective; the launcher may see state T."""
        if seen:
            at = self.at + 0.25
            self.say(RankStalled(**self.stamp(rank, "events", at), state="T", since=round(self.at + 0.05, 6)))
        return self.idle(seconds, "collective", self.step, silent=[rank])

    def end(self, outcome: str = "finished") -> SyntheticJob:
        for rank in range(self.world):
            if rank not in self.gone:
                self.say(Metrics(**self.stamp(rank, "metrics", self.at + 0.05), phase="finished", step=self.step))
                self.exits(rank, after=0.3 + 0.1 * rank, code=0)
        for node in self.nodes:
            self.say(AttemptEnded(**self.stamp(-1, "events", self.at + 1.0, node), outcome=outcome))
        self.idle(4.0, "finished", self.step)
        return self

    def ordered(self) -> list[Message]:
        return sorted(self.messages, key=lambda m: (m.at, m.rank, TOPIC_OF[type(m)], m.node, m.sequence))


def with_places(messages: Sequence[Message]) -> list[tuple[Message, Place]]:
    """Offsets in the order given, per topic."""
    offsets: Counter[str] = Counter()
    out = []
    for message in messages:
        topic = TOPIC_OF[type(message)]
        out.append((message, Place(topic, 0, offsets[topic])))
        offsets[topic] += 1
    return out


def detect(
    messages: Sequence[Message], config: DetectorConfig | None = None, *, until: float | None = None
) -> list[Verdict]:
    """All verdicts of a list of messages that arrive in the order given, through the merge."""
    detector, merge = JobDetector(messages[0].job, config), Merge()
    verdicts: list[Verdict] = []
    for message, place in with_places(messages):
        merge.put(message, place)
        verdicts += drain(merge, detector)
    merge.advance((until or max(m.at for m in messages)) + merge.config.lateness_seconds)
    return verdicts + drain(merge, detector)


def drain(merge: Merge, detector: JobDetector) -> list[Verdict]:
    for merged in merge.take():
        detector.observe(merged.message, merged.place)
    return detector.advance(merge.watermark)
