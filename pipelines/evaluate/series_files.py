"""Labelled series on disk: `NAME.train.parquet`, `NAME.test.parquet` with a column `label`, `NAME.causes.json`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pipelines.extras import missing_extra

from .evaluation import CannotEvaluate
from .scoring import Bools, Floats, Span, spans

TRAIN, TEST, CAUSES = ".train.parquet", ".test.parquet", ".causes.json"
LABEL = "label"
INTERVALS = {"omi": ("asd", 300.0), "machine": ("smd", 60.0)}  # what an entity's name begins with: dataset, seconds
INTERVAL_SECONDS_DEFAULT = 300.0


class Cause(msgspec.Struct, frozen=True):
    """One labelled event as its file has it; `metrics` are numbers from 1. Which row `end` is, the labels tell."""

    start: int
    end: int
    metrics: list[int]


@dataclass(frozen=True, slots=True)
class LabelledSeries:
    """One entity: rows × metrics of both parts, a label for each row of the test, and what caused each event."""

    name: str
    dataset: str
    interval_seconds: float
    train: Floats
    test: Floats
    labels: Bools
    causes: tuple[tuple[Span, frozenset[int]], ...]  # rows, and the columns (from 0) to blame

    @property
    def events(self) -> list[Span]:
        return spans(self.labels)

    @property
    def rows_per_day(self) -> float:
        return 86_400.0 / self.interval_seconds


def entities(path: Path) -> list[Path]:
    """The training file of each entity under a folder, or of the one entity that `path` names; in order of names."""
    if path.is_dir():
        return sorted(path.rglob(f"*{TRAIN}"))
    stem = path.name.removesuffix(TRAIN).removesuffix(TEST).removesuffix(CAUSES)
    train = path.with_name(stem + TRAIN)
    return [train] if train.is_file() else []


def read_series(train_file: Path, interval_seconds: float | None = None) -> LabelledSeries:
    """Read one entity. Raises CannotEvaluate where parts are missing or do not fit, MissingExtra without pandas."""
    name = train_file.name.removesuffix(TRAIN)
    dataset, inferred = next(
        (known for prefix, known in INTERVALS.items() if name.startswith(prefix)),
        (train_file.absolute().parent.name, INTERVAL_SECONDS_DEFAULT),
    )
    train, test = _table(train_file), _table(train_file.with_name(name + TEST))
    if LABEL not in test:
        raise CannotEvaluate(
            f"{name}{TEST} has no column {LABEL!r}; the test part needs one, 1 in events and 0 outside"
        )
    labels = np.asarray(test.pop(LABEL)) > 0
    columns = [column for column in train if column != LABEL]
    if not columns or columns != list(test):
        raise CannotEvaluate(
            f"the parts of {name} have different metrics; both need the same columns in the same order"
        )
    try:
        parts = [np.column_stack([table[column].astype(np.float64) for column in columns]) for table in (train, test)]
    except (TypeError, ValueError) as error:
        raise CannotEvaluate(f"{name} has a column that is not numeric ({error}); leave it out") from error
    return LabelledSeries(
        name=name,
        dataset=dataset,
        interval_seconds=inferred if interval_seconds is None else interval_seconds,
        train=parts[0],
        test=parts[1],
        labels=labels,
        causes=tuple(_causes(train_file.with_name(name + CAUSES), labels, len(columns))),
    )


def _table(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The columns of a Parquet file by name."""
    try:
        import pandas as pd
        import pyarrow
    except ImportError as error:
        raise missing_extra("ledger", "reading Parquet series") from error
    if not path.is_file():
        raise CannotEvaluate(
            f"there is no {path.name} beside the other part; an entity needs {TRAIN[1:]} and {TEST[1:]}"
        )
    try:
        frame = pd.read_parquet(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise CannotEvaluate(f"{path} cannot be read as Parquet: {error}") from error
    return {str(column): frame[column].to_numpy() for column in frame}


def _causes(path: Path, labels: Bools, metrics: int) -> Iterator[tuple[Span, frozenset[int]]]:
    """Each cause with inclusive rows and columns from 0. `end` is the last row or one past it, as fits the labels."""
    if not path.is_file():
        return
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Cause])
    except msgspec.MsgspecError as error:
        raise CannotEvaluate(f"{path} is no list of causes (start, end, metrics): {error}") from error
    past = 1 if _mismatches(found, labels, 1) < _mismatches(found, labels, 0) else 0
    for cause in found:
        blamed = frozenset(number - 1 for number in cause.metrics)
        if not 0 <= cause.start <= cause.end - past < len(labels) or not blamed <= set(range(metrics)):
            raise CannotEvaluate(
                f"{path}: the cause at row {cause.start} names rows or metrics that the series has not"
            )
        yield Span(cause.start, cause.end - past), blamed


def _mismatches(causes: list[Cause], labels: Bools, past: int) -> int:
    """Rows whose label differs from the causes', read with `end` that many rows past the last."""
    said = np.zeros(len(labels), dtype=np.bool_)
    for cause in causes:
        said[max(cause.start, 0) : max(cause.end + 1 - past, 0)] = True
    return int(np.count_nonzero(said != labels))
