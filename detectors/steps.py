"""The step matrix: what every rank measured in every step of an attempt, closed step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.clues import Place
from detectors.step_block import StepBlock
from ingest.events import Metrics

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

TIMINGS = (
    "train.compute.own", "train.compute.duration", "train.step.duration", "train.data.duration",
    "train.forward.duration", "train.backward.duration", "train.optimizer.duration", "train.collective.wait",
    "train.compute.cpu", "train.run_queue.delay",
)  # fmt: skip
NUMBERS = (
    "train.loss", "train.gradient.local_norm", "train.gradient.norm", "train.learning_rate", "train.samples",
    "train.tokens",
)  # fmt: skip
FEATURES = TIMINGS + NUMBERS
ALIASES = {  # what `run.log(grad_norm=…)` and its like mean; a number under its own name wins
    "train.gradient.norm": ("train.grad_norm", "train.gradient_norm", "train.global_norm"),
    "train.learning_rate": ("train.lr",),
    "train.samples": ("train.batch_size", "train.global_batch_size", "train.num_samples"),
    "train.tokens": ("train.num_tokens", "train.tokens_per_step"),
    "train.loss": ("train.train_loss", "train.lm_loss"),
}
APART = frozenset(("init", "warmup", "checkpoint", "eval"))  # phases whose steps are not compared with training
NOWHERE = -(2**62)
LAYOUTS_MAX = 1_000  # sets of column names remembered
BACK_ROWS = 3  # of steps told before, one after another: the rank has gone back
LARGEST = float(np.finfo(np.float32).max)  # beyond it a sample is no number


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """How much is kept and how long a step waits for its last ranks."""

    steps_max: int = 512
    steps_min: int = 64  # kept whatever the bytes: the longest window of the rank channel
    matrix_bytes_max: int = 64 * 2**20
    quorum: float = 0.95  # of the live ranks
    close_after_seconds: float = 3.0


class _State(msgspec.Struct):
    ranks: list[int] = []
    next_step: int | None = None  # the lowest step that is not closed
    newest_step: int = -1
    first_step: int | None = None
    opened_at: dict[int, float] = {}
    apart: list[int] = []
    partition: int | None = None
    revised: list[int] = []
    ahead: set[int] = set()  # columns of ranks that tell of steps where the ring does not reach
    back: dict[int, int] = {}  # by column: rows, one after another, of steps before those it had told


class StepMatrix:
    """rank × feature for each step in a ring; NaN = not measured or not there yet."""

    def __init__(self, ranks: list[int], config: StepsConfig | None = None) -> None:
        self.config = config or StepsConfig()
        self._state = _State(ranks=sorted(ranks))
        self._column = {rank: index for index, rank in enumerate(self._state.ranks)}
        row_bytes = max(1, len(ranks)) * (len(FEATURES) * 4 + 3 * 8)  # samples have six digits: float32 holds them
        depth = int(min(self.config.steps_max, max(self.config.steps_min, self.config.matrix_bytes_max // row_bytes)))
        self._values: Singles = np.full((depth, len(ranks), len(FEATURES)), np.nan, dtype=np.float32)
        self._seen_at: Floats = np.full((depth, len(ranks)), np.nan)
        self._sequence: Ints = np.full((depth, len(ranks)), -1, dtype=np.int64)
        self._offset: Ints = np.full((depth, len(ranks)), -1, dtype=np.int64)
        self._step: list[int] = [NOWHERE] * depth
        self._depth = depth
        self._newest = [-1] * len(ranks)  # of each rank: the sequence of its newest message with steps
        self._highest = [-1] * len(ranks)  # and the step it has come to
        self._telling = 0  # ranks that have told of any
        self._reported = [bytearray(len(ranks)) for _ in range(depth)]  # who has told of a slot's step at all
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._fresh: list[_Layout] = []  # those with first reports that are not in the matrix yet

    @property
    def ranks(self) -> list[int]:
        return self._state.ranks

    def has(self, rank: int) -> bool:
        return rank in self._column

    @property
    def first_step(self) -> int | None:
        """The lowest step seen in this attempt."""
        return self._state.first_step

    def add(self, message: Metrics, place: Place | None) -> None:
        """Write the steps of one message; a step that is closed already, and changes, is remembered as revised.

        Of two messages about the same step the one sent later counts, whichever comes first. Steps far from those of
        the others are not taken in: one rank's wrong number must not carry the whole matrix away.
        """
        state, column = self._state, self._column.get(message.rank)
        if column is None:
            return  # nobody announced it; who has made this matrix makes another with it
        if message.phase in APART and message.step >= 0 and message.step not in state.apart:
            state.apart = [*state.apart[-63:], message.step]
        steps, sequence = message.steps, message.sequence
        if not steps or (sequence > self._newest[column] and self._is_elsewhere(steps, sequence, column)):
            return
        offset = -1
        if place is not None:
            state.partition, offset = place.partition, place.offset
        columns, ended_at = message.columns, message.ended_at
        key = tuple(columns)
        layout = self._layouts.get(key) or self._layout(key)
        told = columns.values() if layout.whole else list(map(columns.__getitem__, layout.names))
        rows = list(zip(*told, strict=True)) if len(steps) > 1 else None
        for row, step in enumerate(steps):
            slot = step % self._depth
            if self._step[slot] != step and not self._takes(step, slot, message.at):
                continue
            samples: Iterable[float | None] = rows[row] if rows else chain.from_iterable(told)  # for one row: quicker
            reported = self._reported[slot]
            if reported[column]:
                changed = self._revise(layout, (slot, column, sequence, offset), ended_at[row], samples)
            else:  # the first report of this rank and step: written with the others, a matrix at a time
                reported[column] = 1
                if not layout.reports:
                    self._fresh.append(layout)
                layout.reports += (slot, column, sequence, offset)
                layout.ended_at.append(ended_at[row])
                layout.samples += samples
                changed = True
            if changed and state.next_step is not None and step < state.next_step and step not in state.revised:
                state.revised.append(step)

    def takes_block(self, block: StepBlock) -> bool:
        """Whether `add_block` can write it: all ranks tell for the first time of a step that comes as steps do."""
        state, step, depth = self._state, block.step, self._depth
        if len(block.ranks) != len(state.ranks) or block.ranks.tolist() != state.ranks or state.back or state.ahead:
            return False
        near = step - depth < state.newest_step < step + depth
        if step < 0 or not near or min(self._highest) < 0 or max(self._highest) > step:
            return False
        slot = step % depth
        return self._step[slot] < step or (self._step[slot] == step and not any(self._reported[slot]))

    def add_block(self, block: StepBlock) -> None:
        """`add` of each of its messages, where `takes_block`."""
        step, rows = block.step, len(block.ranks)
        slot = step % self._depth
        self._highest, self._newest = [step] * rows, block.sequence.tolist()
        if self._step[slot] != step:
            self._takes(step, slot, block.at)
        layout = self._layouts.get(block.names) or self._layout(block.names)
        samples = block.values
        if layout.names != list(block.names):
            samples = samples[:, [block.names.index(name) for name in layout.names]]
        self._reported[slot] = bytearray(b"\1") * rows
        if not np.abs(samples).max(initial=0.0) <= LARGEST:  # seldom: one is beyond it, or missing
            samples = np.where(np.abs(samples) <= LARGEST, samples, np.nan)
        self._values[slot][:, layout.indices] = samples
        self._seen_at[slot], self._sequence[slot], self._offset[slot] = block.ended_at, block.sequence, -1
        state = self._state
        if state.next_step is not None and step < state.next_step and step not in state.revised:
            state.revised.append(step)

    @property
    def astray(self) -> bool:
        """Most ranks that tell of steps have gone back behind what they, or all, had told: the job counts its steps
        anew, and so must whoever watches them."""
        back = sum(rows >= BACK_ROWS for rows in self._state.back.values())
        return 2 * back > self._telling

    def _is_elsewhere(self, steps: Sequence[int], sequence: int, column: int) -> bool:
        """Whether the ring has no place for these steps. A rank that goes back is noted, though its steps may have."""
        state, first, last, depth = self._state, steps[0], steps[-1], self._depth
        self._newest[column] = sequence
        near = first - depth < state.newest_step < last + depth
        if near and 0 <= self._highest[column] <= last and not state.back and not state.ahead:  # nearly always
            self._highest[column] = last
            return False
        known = state.newest_step >= 0
        if known and first >= state.newest_step + depth:
            state.ahead.add(column)
            if 2 * len(state.ahead) <= self._telling:
                return True
            state.ahead.clear()  # most have leapt: that is where the job is
        behind = known and last <= state.newest_step - depth
        if behind or last < self._highest[column]:
            state.back[column] = state.back.get(column, 0) + len(steps)
            self._telling += self._highest[column] < 0
            self._highest[column] = max(self._highest[column], 0)
            return behind
        if state.back or state.ahead:
            state.back.pop(column, None)
            state.ahead.discard(column)
        self._telling += self._highest[column] < 0
        self._highest[column] = last
        return False

    def _layout(self, key: tuple[str, ...]) -> _Layout:
        if len(self._layouts) >= LAYOUTS_MAX:
            self._write_fresh()
            self._layouts.clear()
        layout = self._layouts[key] = _Layout(key)
        return layout

    def _revise(self, layout: _Layout, report: _Report, ended_at: float, samples: Iterable[float | None]) -> bool:
        """Another message about a step that this rank has told of: does it change anything?"""
        self._write_fresh()
        slot, column, sequence, offset = report
        newer = sequence >= self._sequence[slot, column]
        cells, changed = self._values[slot, column], False
        for index, value in zip(layout.indices, samples, strict=True):
            if value is None or not -LARGEST <= value <= LARGEST or not (newer or np.isnan(cells[index])):
                continue
            changed |= bool(cells[index] != np.float32(value))
            cells[index] = value
        if newer:
            self._seen_at[slot, column] = ended_at
            self._sequence[slot, column], self._offset[slot, column] = sequence, offset
        return changed

    def _write_fresh(self) -> None:
        for layout in self._fresh:
            slots, columns, sequences, offsets = np.array(layout.reports, dtype=np.int64).reshape(-1, 4).T
            self._sequence[slots, columns], self._offset[slots, columns] = sequences, offsets
            self._seen_at[slots, columns] = layout.ended_at
            samples = np.array(layout.samples, dtype=np.float64).reshape(len(slots), len(layout.indices))
            samples[~(np.abs(samples) <= LARGEST)] = np.nan
            self._values[slots[:, None], columns[:, None], layout.indices] = samples
            layout.reports, layout.ended_at, layout.samples = [], [], []
        self._fresh = []

    @property
    def may_close(self) -> bool:
        """Whether `close` has anything to look at."""
        state = self._state
        following = state.first_step if state.next_step is None else state.next_step
        return following is not None and following <= state.newest_step

    def close(self, now: float, live: set[int]) -> list[int]:
        """The steps that close now, in order: enough live ranks have reported them, or they have waited long enough."""
        state = self._state
        if state.next_step is None:
            if state.first_step is None:
                return []
            state.next_step = state.first_step
        if state.next_step > state.newest_step:
            return []
        self._write_fresh()
        everyone = live.issuperset(state.ranks)
        wanted = np.full(len(state.ranks), True) if everyone else np.array([rank in live for rank in state.ranks])
        quorum = math.ceil(self.config.quorum * int(wanted.sum()))
        closed: list[int] = []
        while state.next_step <= state.newest_step:
            step = state.next_step
            slot = step % self._depth
            opened = state.opened_at.get(step)
            if self._step[slot] == step and opened is not None:
                there = int((~np.isnan(self._seen_at[slot]) & wanted).sum())
                if (there < quorum or quorum == 0) and now < opened + self.config.close_after_seconds:
                    break
                closed.append(step)
            elif not self._passed(step, now):
                break
            state.opened_at.pop(step, None)
            told = [other for other in state.opened_at if other > step]
            state.next_step = min(told) if told and step not in closed else step + 1
        return closed

    def take_revised(self) -> list[int]:
        """Closed steps that late messages have changed since the last call."""
        revised, self._state.revised = sorted(self._state.revised), []
        return revised

    def is_apart(self, step: int) -> bool:
        """A rank said during this step that it is not plain training (checkpoint, evaluation, warm-up)."""
        return step in self._state.apart

    def values(self, step: int, feature: str) -> Floats | None:
        """One feature of all ranks, in the order of `ranks`; None where the ring no longer has the step."""
        self._write_fresh()
        slot = step % self._depth
        if self._step[slot] != step:
            return None
        return self._values[slot, :, FEATURES.index(feature)].astype(np.float64)

    def rows(self, step: int) -> Floats | None:
        """rank × timing of one step, in seconds, timings as in TIMINGS."""
        self._write_fresh()
        slot = step % self._depth
        return self._values[slot, :, : len(TIMINGS)].astype(np.float64) if self._step[slot] == step else None

    def told(self, step: int) -> npt.NDArray[np.bool_] | None:
        """rank × FEATURES: which samples of a step are there; None where the ring no longer has it."""
        self._write_fresh()
        slot = step % self._depth
        return np.asarray(~np.isnan(self._values[slot])) if self._step[slot] == step else None

    def ended_at(self, step: int) -> float | None:
        """When the first rank had ended the step, as far as they have told; None where none has."""
        self._write_fresh()
        slot = step % self._depth
        seen = self._seen_at[slot][np.isfinite(self._seen_at[slot])]
        return float(seen.min()) if self._step[slot] == step and len(seen) else None

    def report(self, step: int, rank: int) -> tuple[float, int, int | None, int | None]:
        """(ended at, sequence, partition, offset) of the message in which `rank` told of `step`."""
        self._write_fresh()
        slot, column = step % self._depth, self._column[rank]
        offset = int(self._offset[slot, column])
        seen = float(self._seen_at[slot, column])
        partition = self._state.partition if offset >= 0 else None
        return seen, int(self._sequence[slot, column]), partition, offset if offset >= 0 else None

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        self._write_fresh()
        return msgspec.to_builtins(self._state, str_keys=True), {
            "values": self._values, "seen_at": self._seen_at, "sequence": self._sequence,
            "offset": self._offset, "step": np.array(self._step, dtype=np.int64),
            "told": np.array([self._newest, self._highest], dtype=np.int64),
        }  # fmt: skip

    @classmethod
    def from_state(
        cls, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], config: StepsConfig | None = None
    ) -> StepMatrix:
        parsed = msgspec.convert(state, _State, strict=False)
        matrix = cls(parsed.ranks, config)
        matrix._state = parsed
        matrix._values, matrix._seen_at = arrays["values"].copy(), arrays["seen_at"].copy()
        matrix._sequence, matrix._offset = arrays["sequence"].copy(), arrays["offset"].copy()
        matrix._step = arrays["step"].tolist()
        matrix._depth = len(matrix._step)
        matrix._reported = [bytearray((row >= 0).tobytes()) for row in matrix._sequence]
        if "told" in arrays:
            matrix._newest, matrix._highest = arrays["told"].tolist()
            matrix._telling = sum(step >= 0 for step in matrix._highest)
        return matrix

    def _passed(self, step: int, now: float) -> bool:
        """Nobody told of `step`, but later steps have waited long enough (or the ring has wrapped over it)."""
        later = [at for other, at in self._state.opened_at.items() if other > step]
        wrapped = self._state.newest_step - step >= self._depth
        return wrapped or bool(later and now >= min(later) + self.config.close_after_seconds)

    def _takes(self, step: int, slot: int, at: float) -> bool:
        """Whether the slot is now this step's, emptied for it; not for one that the ring has left behind."""
        state = self._state
        if step < 0 or self._step[slot] > step:
            return False
        self._write_fresh()  # none of it may belong to the step that leaves this slot
        self._step[slot] = step
        self._values[slot], self._seen_at[slot] = np.nan, np.nan
        self._sequence[slot], self._offset[slot] = -1, -1
        self._reported[slot] = bytearray(len(state.ranks))
        state.newest_step = max(state.newest_step, step)
        if state.next_step is None or step >= state.next_step:
            state.opened_at[step] = at
        if state.next_step is None:
            state.first_step = step if state.first_step is None else min(state.first_step, step)
        return True


class _Layout:
    """Which of a message's columns are features (own names first, then aliases), and first reports of such messages
    that wait to be written."""

    def __init__(self, told: tuple[str, ...]) -> None:
        found = [(name, index) for index, feature in enumerate(FEATURES) if (name := _told_as(feature, told))]
        self.whole = sorted(name for name, _ in found) == sorted(told)  # every column is one feature
        if self.whole:
            found.sort(key=lambda pair: told.index(pair[0]))
        self.names = [name for name, _ in found]
        self.indices: Ints = np.array([index for _, index in found], dtype=np.int64)
        self.reports: list[int] = []  # slot, column, sequence, offset of one after another
        self.ended_at: list[float] = []
        self.samples: list[float | None] = []  # `names` of one after another


_Report = tuple[int, int, int, int]  # slot, column, sequence, offset


def _told_as(feature: str, told: tuple[str, ...]) -> str | None:
    return next((name for name in (feature, *ALIASES.get(feature, ())) if name in told), None)
