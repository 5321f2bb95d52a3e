"""What the ranks of a simulated job say, flush by flush: their ended steps and where they are now."""

from __future__ import annotations

from collections import deque

import numpy as np

from ingest.events import Message, Metrics, Phase, split_non_finite
from pipelines.simulation.noise import Floats, Ints
from pipelines.simulation.scenario import Scenario, node_name
from pipelines.simulation.training import SimulatedStep, Training

DIGITS = 6  # microseconds
INIT, WARMUP, TRAIN, CHECKPOINT, EVAL, COLLECTIVE, FINISHED = range(7)
PHASES: tuple[Phase, ...] = ("init", "warmup", "train", "checkpoint", "eval", "collective", "finished")
PHASE_CODES = {name: code for code, name in enumerate(PHASES)}


class Stamps:
    """Who says it, and the counters of their messages: one for each rank (or node) and topic."""

    def __init__(self, scenario: Scenario) -> None:
        dice = np.random.default_rng(np.random.SeedSequence(scenario.seed, spawn_key=(4,)))
        most = scenario.clock_skew_seconds_max
        self.job = scenario.job
        self.skew: Floats = dice.uniform(-most, most, scenario.nodes)
        self.names = [node_name(node) for node in range(scenario.nodes)]
        self.metrics = [0] * scenario.ranks
        self.logs = [0] * scenario.ranks
        self.events = [0] * scenario.ranks
        self.node_metrics = [0] * scenario.nodes
        self.node_events = [0] * scenario.nodes

    def at(self, node: int, true_at: float) -> float:
        """What the node's clock shows."""
        return round(true_at + float(self.skew[node]), DIGITS)


class _Window:
    """The steps that some rank is in or has not told yet, with their columns as lists."""

    def __init__(self) -> None:
        self.steps: deque[SimulatedStep] = deque()
        self.columns: deque[list[tuple[str, list[float]]]] = deque()
        self.finite: deque[bool] = deque()
        self.ended: deque[list[float]] = deque()

    def add(self, step: SimulatedStep, ended_at: Floats) -> None:
        self.steps.append(step)
        self.columns.append([(name, np.round(values, DIGITS).tolist()) for name, values in step.columns.items()])
        self.finite.append(all(bool(np.isfinite(values).all()) for values in step.columns.values()))
        self.ended.append(np.round(ended_at, DIGITS).tolist())

    def drop_first(self) -> None:
        for series in (self.steps, self.columns, self.finite, self.ended):
            series.popleft()


class RankTelemetry:
    """Turns steps into the ranks' messages. `flush` is asked for one flush of all ranks at a time."""

    def __init__(self, scenario: Scenario, training: Training, stamps: Stamps) -> None:
        self._scenario = scenario
        self._stamps = stamps
        self._skew = stamps.skew[training.node_of]
        self._names = [stamps.names[node] for node in training.node_of.tolist()]
        self._window = _Window()
        self._base = 0  # steps before the window
        self.told: Ints = np.zeros(scenario.ranks, dtype=np.int64)  # steps that each rank has ended and told
        self.silent_from: Floats = np.full(scenario.ranks, np.inf)  # true time from which a rank says nothing

    def add(self, step: SimulatedStep) -> None:
        """The next step of the job."""
        self._window.add(step, step.ended_at + self._skew)

    def flush(self, at: Floats) -> tuple[list[Message], list[int]]:
        """All ranks' messages of the flush in which rank r sends at `at[r]`, and who sent each."""
        scenario, window = self._scenario, self._window
        ends = np.stack([step.ended_at for step in window.steps])
        ended = self._base + (ends <= at).sum(axis=0)
        steps_now, phases = self._where(at, ended)
        speaks = at < self.silent_from
        for fault in scenario.faults:
            if fault.kind == "telemetry_gap":
                ranks = list(fault.ranks)
                speaks[ranks] &= ~((steps_now[ranks] >= fault.onset_step) & (steps_now[ranks] < fault.end_step))
        messages = self._messages(np.flatnonzero(speaks).tolist(), at, ended, steps_now, phases)
        self.told = ended
        while len(window.steps) > 1 and self._base < int(ended.min()):
            window.drop_first()
            self._base += 1
        return messages, np.flatnonzero(speaks).tolist()

    def _where(self, at: Floats, ended: Ints) -> tuple[Ints, Ints]:
        """The step each rank says it is in, and its phase's code."""
        steps = np.full(len(at), self._scenario.steps, dtype=np.int64)
        phases = np.full(len(at), FINISHED, dtype=np.int64)
        for index, step in enumerate(self._window.steps):
            here = ended == self._base + index
            if not here.any():
                continue
            told = self._scenario.tells_phases
            code = WARMUP if step.warm and told else TRAIN
            code_here = np.where(at >= step.arrived_at, COLLECTIVE, code)
            code_here = np.where(at >= step.collected_at, code, code_here)
            number = np.full(len(at), step.step, dtype=np.int64)
            if step.before is not None and told:
                pausing = at < step.begun_at
                code_here = np.where(pausing, PHASE_CODES[step.before], code_here)
                number = np.where(pausing, step.before_step, number)
            steps[here], phases[here] = number[here], code_here[here]
        return steps, phases

    def _messages(self, ranks: list[int], at: Floats, ended: Ints, steps_now: Ints, phases: Ints) -> list[Message]:
        """The messages of these ranks; the only loop over ranks there is."""
        job, names, sequences = self._stamps.job, self._names, self._stamps.metrics
        told, upto = (self.told - self._base).tolist(), (ended - self._base).tolist()
        stamped = np.round(at + self._skew, DIGITS).tolist()
        now, codes = steps_now.tolist(), phases.tolist()
        window = self._window
        numbers = [step.step for step in window.steps]
        made: list[Message] = []
        for rank in ranks:
            first, end = told[rank], upto[rank]
            sequence = sequences[rank]
            sequences[rank] = sequence + 1
            if end == first:
                made.append(
                    Metrics(
                        job=job, attempt=1, rank=rank, node=names[rank], sequence=sequence, at=stamped[rank],
                        phase=PHASES[codes[rank]], step=now[rank],
                    )
                )  # fmt: skip
                continue
            if end == first + 1 and window.finite[first]:
                made.append(
                    Metrics(
                        job=job, attempt=1, rank=rank, node=names[rank], sequence=sequence, at=stamped[rank],
                        phase=PHASES[codes[rank]], step=now[rank], steps=(numbers[first],),
                        ended_at=(window.ended[first][rank],),
                        columns={name: (values[rank],) for name, values in window.columns[first]},
                    )
                )  # fmt: skip
                continue
            columns, odd = split_non_finite(self._rows(rank, first, end))
            made.append(
                Metrics(
                    job=job, attempt=1, rank=rank, node=names[rank], sequence=sequence, at=stamped[rank],
                    phase=PHASES[codes[rank]], step=now[rank], steps=tuple(numbers[first:end]),
                    ended_at=tuple(window.ended[index][rank] for index in range(first, end)),
                    columns=columns, non_finite=odd,
                )
            )  # fmt: skip
        return made

    def _rows(self, rank: int, first: int, end: int) -> dict[str, list[float | None]]:
        columns: dict[str, list[float | None]] = {}
        for index in range(first, end):
            for name, values in self._window.columns[index]:
                columns.setdefault(name, []).append(values[rank])
        return columns
