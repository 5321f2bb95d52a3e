"""How our series detector does on labelled public series, baselines beside it at the same budget: `evaluate PATH`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.progress import Progress
from rich.table import Table

from detectors.calibration import CalibrationError
from detectors.ensemble.models import EnsembleUnavailable
from detectors.series.series import SeriesRefused, ranked_metrics
from pipelines.extras import missing_extra
from pipelines.figures import Figure

from .evaluation import CannotEvaluate, EvaluateOptions, Evaluation
from .scoring import EventScore, hit_rate, period, score_events, vus_pr
from .series_baselines import METHODS, OURS, Answer, answer
from .series_files import TRAIN, LabelledSeries, entities, read_series

TOLERANCE_ROWS = 10
ALARMS_PER_DAY = 0.5  # of one entity, in the training part: all alarms, for nobody labelled what happened there


@dataclass(frozen=True, slots=True)
class MethodScore:
    """One method on one entity, or on several: event counts add up, the others are means over their lists."""

    events: EventScore = field(default_factory=EventScore)
    vus_pr: tuple[float, ...] = ()
    hit_rates: tuple[float, ...] = ()

    def __add__(self, other: MethodScore) -> MethodScore:
        return MethodScore(self.events + other.events, self.vus_pr + other.vus_pr, self.hit_rates + other.hit_rates)


def evaluate(path: Path | None, options: EvaluateOptions) -> Evaluation:
    """Every entity below `path`, each method fitted on its training part. Raises CannotEvaluate and MissingExtra."""
    assert path is not None
    found = entities(path)
    if not found:
        raise CannotEvaluate(f"{path} holds no NAME{TRAIN}; give a folder of such series, or one of their files")
    scores: dict[str, dict[str, dict[str, MethodScore]]] = {}  # dataset, method, entity
    with Progress(console=options.console, transient=True) as progress:
        task = progress.add_task("reading", total=len(found) * len(METHODS))
        for file in found:
            series = read_series(file, options.interval_seconds)
            buffer = period(series.test[:, 0])
            for method in METHODS:
                progress.update(task, description=f"{series.name}: {method}")
                score = score_answer(series, _answer(method, series), buffer)
                scores.setdefault(series.dataset, {}).setdefault(method, {})[series.name] = score
                progress.advance(task)
    totals = {
        dataset: {method: sum(of.values(), MethodScore()) for method, of in methods.items()}
        for dataset, methods in scores.items()
    }
    return Evaluation(
        figures=tuple(figure for dataset, of in totals.items() for figure in figures(dataset, of[OURS])),
        shown=tuple(methods_table(dataset, of) for dataset, of in totals.items()),
        details={
            "methods": {dataset: {method: told(all_) for method, all_ in of.items()} for dataset, of in totals.items()},
            "entities": {
                name: told(score) for methods in scores.values() for name, score in sorted(methods[OURS].items())
            },
        },
    )


def _answer(method: str, series: LabelledSeries) -> Answer:
    try:
        return answer(method, series.train, series.test, series.rows_per_day, ALARMS_PER_DAY)
    except EnsembleUnavailable as error:
        raise missing_extra("detect", "evaluating series") from error
    except (SeriesRefused, CalibrationError) as error:
        raise CannotEvaluate(f"{series.name}: {error}") from error


def score_answer(series: LabelledSeries, said: Answer, buffer: int) -> MethodScore:
    """One method's answer against the labels of one entity; `buffer` is VUS's, in rows."""
    rates = [
        hit_rate(ranked_metrics(said.blame[rows.start : rows.end + 1]), metrics)
        for rows, metrics in (series.causes if said.blame is not None else ())
        if said.blame is not None and metrics
    ]
    volume = vus_pr(series.labels, said.score, buffer)
    return MethodScore(
        events=score_events(series.events, said.alarmed, TOLERANCE_ROWS, series.rows_per_day),
        vus_pr=() if math.isnan(volume) else (volume,),
        hit_rates=tuple(rates),
    )


def figures(dataset: str, score: MethodScore) -> list[Figure]:
    """The figures of our detector on one dataset, named after it."""
    events = score.events
    rows = [
        Figure(f"{dataset}.event_f1", round(events.f1, 4), "ratio", n=events.events),
        Figure(f"{dataset}.false_per_day", round(events.false_per_day, 4), "alarms/entity-day", n=events.alarms),
        Figure(f"{dataset}.vus_pr", round(_mean(score.vus_pr), 4), "ratio", n=len(score.vus_pr)),
        Figure(f"{dataset}.delay_p50_rows", events.delay(), "rows", n=events.found),
        Figure(f"{dataset}.hit_rate", round(_mean(score.hit_rates), 4), "ratio", n=len(score.hit_rates)),
    ]
    return [row for row in rows if not math.isnan(row.value)]


def methods_table(dataset: str, scores: dict[str, MethodScore]) -> Table:
    """Every method on one dataset, ours first."""
    of = scores[OURS]
    table = Table(
        title=f"{dataset}: {len(of.vus_pr)} entities, {of.events.entity_days:.0f} days, {of.events.events} events",
        caption=f"All: {ALARMS_PER_DAY:g} alarms a day in the training part; tolerance {TOLERANCE_ROWS} rows",
        box=None,
        pad_edge=False,
    )
    table.add_column("method", no_wrap=True)
    for name in ("F1", "precision", "recall", "false/day", "delay", "open", "VUS-PR", "HitRate"):
        table.add_column(name, justify="right", no_wrap=True)
    for method, score in scores.items():
        table.add_row(method, *cells(score), style="bold" if method == OURS else None)
    return table


def cells(score: MethodScore) -> Sequence[str]:
    """One row of the table, in the order of its columns."""
    events = score.events
    numbers = [
        (events.f1, "{:.3f}"), (events.precision, "{:.2f}"), (events.recall, "{:.2f}"),
        (events.false_per_day, "{:.3f}"), (events.delay(), "{:.0f}"), (100.0 * events.alarmed_share, "{:.1f} %"),
        (_mean(score.vus_pr), "{:.3f}"), (_mean(score.hit_rates), "{:.2f}"),
    ]  # fmt: skip
    return ["–" if math.isnan(value) else form.format(value) for value, form in numbers]


def told(score: MethodScore) -> dict[str, float | int | None]:
    """A score in a form that JSON can carry; None where there is nothing to tell."""
    events = score.events
    found: dict[str, float | int] = {
        "event_f1": events.f1, "precision": events.precision, "recall": events.recall,
        "false_per_day": events.false_per_day, "delay_p50_rows": events.delay(), "delay_p90_rows": events.delay(0.9),
        "half_found_rows": events.found_within(),
        "alarmed_share": events.alarmed_share, "vus_pr": _mean(score.vus_pr), "hit_rate": _mean(score.hit_rates),
        "events": events.events, "found": events.found, "alarms": events.alarms, "false": events.false,
    }  # fmt: skip
    return {name: None if not math.isfinite(value) else value for name, value in found.items()}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return float(np.mean(listed)) if listed else float("nan")
