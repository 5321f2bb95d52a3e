"""The rows a rank reports: one per step, numbered by the user's log calls or, without them, by our own count.

A row opens when a step begins and is complete when the optimizer has stepped; it closes when the next step
begins, so that what is logged after the optimizer still belongs to it. A number that `log` or `declare` gives
wins over the prediction (last number plus one). A row that rests is handed on early; what is logged into it
later follows under the same number.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .clock import Clock

FIRST_STEP = 1
SCALARS_MAX = 256  # of one step
NAME_CHARS_MAX = 120
CLOSED_ROWS_MAX = 4_096
UNREADY_ROWS_MAX = 512  # rows that wait for a device; beyond, their open samples are given up
REST_SECONDS = 0.5


class Deferred(Protocol):
    """A number that a device has yet to compute. Both methods return at once; `value` after `ready`."""

    def ready(self) -> bool: ...

    def value(self) -> float: ...


Sample = float | Deferred


@dataclass(slots=True)
class Row:
    """What is known of one step."""

    step: int
    samples: dict[str, Sample] = field(default_factory=dict)
    numbered: bool = False  # by the user
    finished: bool = False  # its optimizer step is done
    ended_at: float = 0.0
    touched: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """One step as it goes into a message; None where a device never answered."""

    step: int
    ended_at: float
    samples: Mapping[str, float | None]


class StepRows:
    """Collects samples from the training thread, hands rows to the reporter's thread."""

    def __init__(self, clock: Clock, *, first_step: int = FIRST_STEP) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # re-entrant: a signal handler may log in the middle of a log
        self._open: Row | None = None
        self._closed: deque[Row] = deque()
        self._predicted = first_step
        self._last_step = -1
        self._timed = False
        self.dropped = 0

    @property
    def step(self) -> int:
        """The step the rank is in now; -1 before the first."""
        with self._lock:
            if self._open is not None:
                return self._open.step
            return self._last_step

    def expect_optimizer(self, timed: bool) -> None:
        """Whether `finish` ends each step; where it does not, a row is whole as soon as it rests."""
        self._timed = timed

    def begin(self) -> None:
        """A step begins, unless one is in progress."""
        with self._lock:
            if self._open is None or self._open.finished:
                self._reopen(None)

    def declare(self, step: int) -> None:
        """The user says which step is beginning."""
        with self._lock:
            row = self._open
            if row is None or (row.step != step and (row.finished or row.numbered)):
                row = self._reopen(step)
            row.step, row.numbered = step, True

    def log(self, step: int | None, samples: Mapping[str, Sample]) -> None:
        """Samples of a step: of `step` where it is given, else of the one in progress."""
        with self._lock:
            row = self._open
            if row is None or (step is not None and row.numbered and row.step != step):
                row = self._reopen(step)
            if step is not None:
                row.step, row.numbered = step, True
            self._add(row, samples)

    def put(self, samples: Mapping[str, Sample]) -> None:
        """Samples that we measured, of the step in progress."""
        with self._lock:
            if self._open is None:
                self._reopen(None)
            assert self._open is not None
            self._add(self._open, samples)

    def finish(self) -> None:
        """The optimizer has stepped: the step is done, though more may still be logged about it."""
        with self._lock:
            row = self._open if self._open is not None else self._reopen(None)
            row.finished = True
            row.ended_at = self._clock.now()
            row.touched = self._clock.monotonic()

    def close(self) -> None:
        """Nothing more comes: hand on what is there."""
        with self._lock:
            self._close()

    def take(self, rows_max: int) -> list[FinishedRow]:
        """The oldest rows whose samples are all there, at most `rows_max`."""
        with self._lock:
            self._hand_on_resting_row()
            taken: list[FinishedRow] = []
            while self._closed and len(taken) < rows_max:
                give_up = len(self._closed) > UNREADY_ROWS_MAX
                samples = _resolve(self._closed[0].samples, give_up=give_up)
                if samples is None:
                    break
                row = self._closed.popleft()
                taken.append(FinishedRow(row.step, row.ended_at, samples))
            return taken

    def _reopen(self, step: int | None) -> Row:
        self._close()
        number = self._predicted if step is None else step
        self._open = Row(number, touched=self._clock.monotonic())
        return self._open

    def _close(self) -> None:
        row, self._open = self._open, None
        if row is None:
            return
        self._predicted = row.step + 1
        self._last_step = row.step
        if row.samples:
            row.ended_at = row.ended_at or self._clock.now()
            self._keep(row)

    def _keep(self, row: Row) -> None:
        self._closed.append(row)
        if len(self._closed) > CLOSED_ROWS_MAX:
            self._closed.popleft()
            self.dropped += 1

    def _hand_on_resting_row(self) -> None:
        row = self._open
        if row is None or not row.samples or not (row.finished or not self._timed):
            return
        if self._clock.monotonic() - row.touched >= REST_SECONDS:
            self._keep(Row(row.step, dict(row.samples), ended_at=row.ended_at or self._clock.now()))
            row.samples.clear()

    def _add(self, row: Row, samples: Mapping[str, Sample]) -> None:
        row.touched = self._clock.monotonic()
        for name, sample in samples.items():
            if len(row.samples) < SCALARS_MAX or name in row.samples:
                row.samples[name[:NAME_CHARS_MAX]] = sample


def _resolve(samples: Mapping[str, Sample], *, give_up: bool) -> dict[str, float | None] | None:
    """The samples as numbers; None where one is not ready yet and we do not give up."""
    resolved: dict[str, float | None] = {}
    for name, sample in samples.items():
        if isinstance(sample, float):
            resolved[name] = sample
        elif sample.ready():
            resolved[name] = sample.value()
        elif give_up:
            resolved[name] = None
        else:
            return None
    return resolved
