"""What an evaluator is asked and what it answers: figures, tables for a person, and details for a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, RenderableType

from pipelines.errors import StatedError
from pipelines.figures import Figure
from pipelines.settings import Settings, load_settings


class CannotEvaluate(StatedError):
    """The target is not there or not of a shape that an evaluator reads; the text says what to give instead."""


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """What all evaluators share. `console`: for progress only.

    `ranks`, `quick`: of the simulation, its world sizes (none: all) and a small part of it. `interval_seconds`: between
    two rows of a series, where its name does not tell.
    """

    console: Console
    settings: Settings = field(default_factory=load_settings)  # of detection; `--model` is in them
    ranks: tuple[int, ...] = ()
    quick: bool = False
    interval_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`shown` is printed in its order (tables, sentences); `details` goes beside the figures into the JSON file."""

    figures: tuple[Figure, ...]
    shown: tuple[RenderableType, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)


Evaluator = Callable[[Path | None, EvaluateOptions], Evaluation]
