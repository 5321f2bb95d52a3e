"""How well alarms meet labelled events, event by event; nothing here is point-adjusted.

An event is found when an alarm overlaps it or the `tolerance` rows after it; an alarm is false when it overlaps no
event so widened. Precision counts alarms, recall counts events. With point adjustment one lucky row would credit a
whole event, and random scores would look good (Kim et al., AAAI 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

PERIOD_DEFAULT = 125  # the buffer where a series shows no period
PERIOD_LAGS = 400
PERIOD_ROWS_MAX = 20_000
PERIOD_LAG_MIN, PERIOD_LAG_MAX = 6, 303  # lags: local maxima outside are no period
VUS_THRESHOLDS = 250

_T = TypeVar("_T")


class Span(NamedTuple):
    """Rows from `start` to `end`, both inclusive, counted from 0."""

    start: int
    end: int

    def overlaps(self, other: Span) -> bool:
        return self.start <= other.end and other.start <= self.end


def shared_delay(delays: Sequence[float], asked: int, share: float) -> float:
    """The delay within which `share` of all that was `asked` for is found, a missed one being never found."""
    needed = math.ceil(share * asked)
    if not needed:
        return float("nan")
    return float(sorted(delays)[needed - 1]) if len(delays) >= needed else math.inf


@dataclass(frozen=True, slots=True)
class EventScore:
    """Counts of one entity, or of several added up. `delays`: rows from an event's first row to the alarm, ≥ 0."""

    events: int = 0
    found: int = 0
    alarms: int = 0
    false: int = 0
    delays: tuple[int, ...] = ()
    entity_days: float = 0.0
    quiet_rows: int = 0  # rows in no widened event
    alarmed_rows: int = 0  # of those, how many stood under an alarm

    @property
    def recall(self) -> float:
        return self.found / self.events if self.events else 0.0

    @property
    def precision(self) -> float:
        """1 without an alarm: nothing that was said was wrong."""
        return 1.0 - self.false / self.alarms if self.alarms else 1.0

    @property
    def f1(self) -> float:
        both = self.precision + self.recall
        return 2.0 * self.precision * self.recall / both if both else 0.0

    @property
    def false_per_day(self) -> float:
        return self.false / self.entity_days if self.entity_days else 0.0

    @property
    def alarmed_share(self) -> float:
        """Of the rows outside events, how many stood under an alarm: one that never closes finds all and costs this."""
        return self.alarmed_rows / self.quiet_rows if self.quiet_rows else 0.0

    def delay(self, quantile: float = 0.5) -> float:
        """Rows; NaN where nothing was found."""
        return float(np.quantile(self.delays, quantile)) if self.delays else float("nan")

    def found_within(self, share: float = 0.5) -> float:
        """Rows within which this share of *all* events is found; infinite where it never is."""
        return shared_delay(self.delays, self.events, share)

    def __add__(self, other: EventScore) -> EventScore:
        return EventScore(
            self.events + other.events,
            self.found + other.found,
            self.alarms + other.alarms,
            self.false + other.false,
            self.delays + other.delays,
            self.entity_days + other.entity_days,
            self.quiet_rows + other.quiet_rows,
            self.alarmed_rows + other.alarmed_rows,
        )


def spans(flags: npt.ArrayLike) -> list[Span]:
    """The runs of set flags, in order; touching rows are one run."""
    set_ = np.asarray(flags).astype(np.int8)
    edges = np.diff(np.concatenate([[0], set_, [0]]))
    return [
        Span(int(a), int(b) - 1) for a, b in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
    ]


def score_events(events: Sequence[Span], alarmed: npt.ArrayLike, tolerance: int, rows_per_day: float) -> EventScore:
    """Compare one entity's events with its alarms, a flag for each row: a run of flags is one alarm."""
    flags = np.asarray(alarmed, dtype=np.bool_)
    alarms = spans(flags)
    widened = [Span(event.start, event.end + tolerance) for event in events]
    delays = []
    for event in widened:
        first = next((alarm for alarm in alarms if alarm.overlaps(event)), None)
        if first is not None:
            delays.append(max(0, first.start - event.start))
    false = sum(not any(alarm.overlaps(event) for event in widened) for alarm in alarms)
    quiet = np.ones(len(flags), dtype=np.bool_)
    for event in widened:
        quiet[event.start : event.end + 1] = False
    return EventScore(
        events=len(events),
        found=len(delays),
        alarms=len(alarms),
        false=false,
        delays=tuple(delays),
        entity_days=len(flags) / rows_per_day,
        quiet_rows=int(quiet.sum()),
        alarmed_rows=int((flags & quiet).sum()),
    )


def hit_rate(ranked: Sequence[_T], causes: Iterable[_T], percent: float = 100.0) -> float:
    """HitRate@P%: how many of the causes stand among the first ⌊P % of their number⌋ of `ranked` (Su et al., KDD 2019).

    NaN where no cause is known.
    """
    wanted = set(causes)
    if not wanted:
        return float("nan")
    return len(wanted.intersection(ranked[: int(percent / 100.0 * len(wanted))])) / len(wanted)


def period(series: npt.ArrayLike) -> int:
    """The lag of the highest local maximum of the autocorrelation among 400 lags, 125 where there is none to trust.

    The rule of TSB-AD (Liu & Paparrizos, NeurIPS 2024; `find_length_rank`) for the length of the buffer of VUS.
    """
    values = np.asarray(series, dtype=np.float64)[:PERIOD_ROWS_MAX]
    centred = values - values.mean() if len(values) else values
    if len(values) < 5 or not (power := float(centred @ centred)) > 0.0:
        return PERIOD_DEFAULT
    lags = min(PERIOD_LAGS, len(values) - 1)
    size = 1 << (2 * len(values) - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    correlation = np.fft.irfft(spectrum * np.conj(spectrum), size)[: lags + 1] / power
    middle = correlation[4:-1]
    peaks = 4 + np.flatnonzero((middle > correlation[3:-2]) & (middle > correlation[5:]))
    if not len(peaks):
        return PERIOD_DEFAULT
    best = int(peaks[np.argmax(correlation[peaks])])
    return best if PERIOD_LAG_MIN <= best <= PERIOD_LAG_MAX else PERIOD_DEFAULT


def vus_pr(labels: npt.ArrayLike, scores: npt.ArrayLike, buffer_max: int, thresholds: int = VUS_THRESHOLDS) -> float:
    """The volume under the precision-recall surface: range-AUC-PR, averaged over buffer lengths 0…buffer_max.

    Paparrizos et al., "Volume Under the Surface", VLDB 2022, with the details of TSB-AD (Liu & Paparrizos, NeurIPS
    2024): a label fades over half a buffer on either side as sqrt(1 - distance / buffer), recall is taken against the
    mean of the plain and the faded number of positives, and is multiplied by the share of events of which any row is
    predicted; thresholds at equal ranks. NaN without an event.
    """
    truth = np.asarray(labels, dtype=np.bool_)
    given = np.asarray(scores, dtype=np.float64)
    events = spans(truth)
    if not events:
        return float("nan")
    order = np.argsort(-given, kind="stable")
    ranked = given[order]
    levels = ranked[np.linspace(0, len(given) - 1, thresholds).astype(int)]
    predicted = np.searchsorted(-ranked, -levels, side="right")  # how many rows score at least the level
    positives = float(truth.sum())
    areas = []
    for buffer in range(buffer_max + 1):
        faded = _faded(truth, events, buffer)
        in_events = np.cumsum(truth[order])[predicted - 1]
        hits = np.cumsum(faded[order])[predicted - 1]
        recall = np.minimum(hits / (positives + (hits - in_events) / 2.0), 1.0)
        highest = np.array([given[span.start : span.end + 1].max() for span in _joined(events, buffer, len(truth))])
        recall *= (highest[None, :] >= levels[:, None]).mean(axis=1)
        areas.append(float(np.diff(recall, prepend=0.0) @ (hits / predicted)))
    return float(np.mean(areas))


def _faded(truth: Bools, events: Sequence[Span], buffer: int) -> Floats:
    """Labels that fade out over half a buffer before and after each event, at most 1."""
    out = truth.astype(np.float64)
    half = buffer // 2
    for event in events:
        after = np.arange(event.end + 1, min(event.end + half + 1, len(out)))
        out[after] += np.sqrt(1.0 - (after - event.end) / max(buffer, 1))
        before = np.arange(max(event.start - half, 0), event.start)
        out[before] += np.sqrt(1.0 - (event.start - before) / max(buffer, 1))
    return np.minimum(out, 1.0)


def _joined(events: Sequence[Span], buffer: int, rows: int) -> list[Span]:
    """Events widened by half a buffer; those that meet are one."""
    half, out = buffer // 2, [Span(max(events[0].start - buffer // 2, 0), events[0].end + buffer // 2)]
    for event in events[1:]:
        if out[-1].end < event.start - half:
            out.append(Span(event.start - half, event.end + half))
        else:
            out[-1] = Span(out[-1].start, event.end + half)
    out[-1] = Span(out[-1].start, min(out[-1].end, rows - 1))
    return out
