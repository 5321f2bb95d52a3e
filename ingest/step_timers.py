"""From what the hooks see to the metrics of a step: which span is data, compute, waiting, optimizer.

No torch in here. A mark is a reading of the training thread and, where there is a device, an event on it; the
events arrive in this order, as often as a step has micro-batches:

    data_begin data_end · forward_begin forward_end · gradients_ready reduced · optimizer_begin optimizer_end
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from .events import Phase
from .run_queue import Reading
from .step_rows import Sample, StepRows


class DeviceEvent(Protocol):
    """A moment on a device's own time line (torch.cuda.Event, recorded)."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this one to a later one, both passed."""
        ...


class Mark(NamedTuple):
    """One moment of the training thread, and of its device."""

    reading: Reading
    event: DeviceEvent | None = None


class ElapsedOnDevice:
    """Seconds between two device events, once both have passed. A `Deferred`."""

    def __init__(self, begin: DeviceEvent, end: DeviceEvent) -> None:
        self._begin = begin
        self._end = end

    def ready(self) -> bool:
        return self._end.query()

    def value(self) -> float:
        return self._begin.elapsed_time(self._end) / 1e3


class Total:
    """The sum of samples of which some are deferred. A `Deferred`."""

    def __init__(self, parts: Sequence[Sample]) -> None:
        self._parts = parts

    def ready(self) -> bool:
        return all(isinstance(part, float) or part.ready() for part in self._parts)

    def value(self) -> float:
        return sum(part if isinstance(part, float) else part.value() for part in self._parts)


class StepTimers:
    """The spans of the step in progress. Used by the training thread; `reduced` may come from another one.

    `compute_is_local`: whether no collective can hide in forward and backward, because ours is the
    communication hook or because there is a single process. Where it is false, compute is not reported: it
    would contain the waiting, and every rank would look equally slow.
    """

    def __init__(
        self,
        rows: StepRows,
        mark: Callable[[], Mark],
        see_phase: Callable[[Phase], None],
        *,
        compute_is_local: bool,
        has_optimizer: bool,
    ) -> None:
        self._rows = rows
        self._mark = mark
        self._see_phase = see_phase
        self._compute_is_local = compute_is_local
        self._has_optimizer = has_optimizer
        self._lock = threading.Lock()  # guards the buckets under way
        self._step_ended: Mark | None = None
        rows.expect_optimizer(has_optimizer)
        self._reset()

    def _reset(self) -> None:
        self._data: list[Sample] = []
        self._forward: list[Sample] = []
        self._backward: list[Sample] = []
        self._waits: list[Sample] = []
        self._compute: list[tuple[Mark, Mark]] = []
        self._norm: Sample | None = None
        self._data_began: Mark | None = None
        self._compute_began: Mark | None = None
        self._forward_began: Mark | None = None
        self._forward_ended: Mark | None = None
        self._optimizer_began: Mark | None = None
        self._wait_began: Mark | None = None
        self._wait_ended: Mark | None = None
        self._buckets_under_way = 0

    def data_begin(self) -> None:
        """The training loop asks for the next batch."""
        mark = self._mark()
        self._end_compute(mark)
        if not self._has_optimizer and self._compute:
            self._compose(mark)
        self._rows.begin()
        self._data_began = mark

    def data_end(self) -> None:
        """It has the batch, or there is none left."""
        if self._data_began is not None:
            self._data.append(_wall(self._data_began, self._mark()))
            self._data_began = None

    def forward_begin(self) -> None:
        """The forward of a training step begins (not of an evaluation)."""
        mark = self._mark()
        computed = self._compute or self._forward_ended is not None
        if not self._has_optimizer and computed and not self._data:
            self._end_compute(mark)
            self._compose(mark)
        self._rows.begin()
        self._see_phase("train")
        self._forward_began = mark
        if self._compute_began is None:
            self._compute_began = mark

    def forward_end(self) -> None:
        """It is done; loss and backward follow."""
        if self._forward_began is not None:
            mark = self._mark()
            self._forward.append(_span(self._forward_began, mark))
            self._forward_began, self._forward_ended = None, mark

    def bucket_ready(self, *, last: bool, norm: Sample | None = None) -> None:
        """A bucket's gradients are there; with the last one local computation ends and waiting begins."""
        with self._lock:
            self._buckets_under_way += 1
        if last:
            mark = self._mark()
            self._end_compute(mark)
            self._norm = norm
            self._wait_began, self._wait_ended = mark, None
            self._see_phase("collective")

    def bucket_reduced(self) -> None:
        """The all-reduce of a bucket is done. Comes from the thread of the process group."""
        with self._lock:
            self._buckets_under_way -= 1
            done = self._buckets_under_way <= 0 and self._wait_began is not None
            if done:
                self._wait_ended = self._mark()
        if done:
            self._see_phase("train")

    def optimizer_begin(self) -> None:
        """The optimizer steps; where no bucket told the end of backward, it ends here."""
        mark = self._mark()
        self._end_compute(mark)
        self._optimizer_began = mark

    def optimizer_end(self) -> None:
        """The step is done."""
        self._compose(self._mark())

    def _end_compute(self, mark: Mark) -> None:
        if self._compute_began is None:
            return
        self._compute.append((self._compute_began, mark))
        self._compute_began = None
        if self._forward_ended is not None:
            self._backward.append(_span(self._forward_ended, mark))
            self._forward_ended = None

    def _compose(self, mark: Mark) -> None:
        """Put the samples of the step that ends at `mark` into its row."""
        samples: dict[str, Sample] = {}
        if self._step_ended is not None:
            samples["train.step.duration"] = _wall(self._step_ended, mark)
        if self._optimizer_began is not None:
            samples["train.optimizer.duration"] = _span(self._optimizer_began, mark)
        if self._wait_began is not None and self._wait_ended is not None:
            self._waits.append(_span(self._wait_began, self._wait_ended))
        for name, parts in (
            ("train.data.duration", self._data),
            ("train.forward.duration", self._forward),
            ("train.backward.duration", self._backward),
            ("train.collective.wait", self._waits),
        ):
            if parts:
                samples[name] = _total(parts)
        if self._norm is not None:
            samples["train.gradient.local_norm"] = self._norm
        if self._compute and self._compute_is_local:
            samples.update(_compute_samples(self._compute))
        self._rows.put(samples)
        self._rows.finish()
        self._step_ended = mark
        self._reset()


def _compute_samples(spans: Sequence[tuple[Mark, Mark]]) -> dict[str, Sample]:
    """Wall, own and processor time of the local computation. On a device only its own time line counts."""
    samples: dict[str, Sample] = {"train.compute.duration": _total([_span(begin, end) for begin, end in spans])}
    if any(begin.event is not None for begin, _ in spans):
        return samples
    wall = sum(end.reading.wall - begin.reading.wall for begin, end in spans)
    samples["train.compute.cpu"] = sum(end.reading.cpu - begin.reading.cpu for begin, end in spans)
    delay = 0.0
    for begin, end in spans:
        if begin.reading.run_queue_delay is None or end.reading.run_queue_delay is None:
            return samples
        delay += end.reading.run_queue_delay - begin.reading.run_queue_delay
    samples["train.run_queue.delay"] = delay
    samples["train.compute.own"] = max(0.0, wall - delay)
    return samples


def _wall(begin: Mark, end: Mark) -> float:
    return end.reading.wall - begin.reading.wall


def _span(begin: Mark, end: Mark) -> Sample:
    if begin.event is not None and end.event is not None:
        return ElapsedOnDevice(begin.event, end.event)
    return _wall(begin, end)


def _total(parts: Sequence[Sample]) -> Sample:
    if all(isinstance(part, float) for part in parts):
        return float(sum(part for part in parts if isinstance(part, float)))
    return Total(parts)
