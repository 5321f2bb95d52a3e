"""The registry of evaluators: a target's name and the function that measures it, each in a file of its own.

A new target is one function here that imports its file when it is called, and one line in `TARGETS`. What is no name
of a target is the path of a dataset or of recorded runs.
"""

from __future__ import annotations

from pathlib import Path

from .evaluation import CannotEvaluate, EvaluateOptions, Evaluation, Evaluator


def _logs(path: Path | None, options: EvaluateOptions) -> Evaluation:
    from .logs import evaluate

    return evaluate(path, options)


def _faults(path: Path | None, options: EvaluateOptions) -> Evaluation:
    from .faults import evaluate

    return evaluate(path, options)


def _sim(path: Path | None, options: EvaluateOptions) -> Evaluation:
    from .sim import evaluate

    return evaluate(path, options)


def _path(path: Path | None, options: EvaluateOptions) -> Evaluation:
    """A folder of labelled series, or of recorded runs."""
    from .series import evaluate
    from .series_files import entities

    if path is not None and not entities(path) and path.is_dir():
        return _faults(path, options)
    return evaluate(path, options)


TARGETS: dict[str, Evaluator] = {"faults": _faults, "sim": _sim, "logs": _logs}
DATASET: Evaluator | None = _path  # for TARGET = a path: evaluate(path, options)


def evaluate_target(target: str, path: Path | None, options: EvaluateOptions) -> Evaluation:
    """Measure a target. Raises CannotEvaluate where it is neither a target's name nor a path that exists."""
    if target in TARGETS:
        return TARGETS[target](path, options)
    names = ", ".join(sorted(TARGETS))
    if not Path(target).exists():
        raise CannotEvaluate(f"{target!r} is no target ({names}) and no path that exists; name one of them")
    if path is not None:
        raise CannotEvaluate(f"{target} is a path already; leave {path} out, or name a target first: {names}")
    if DATASET is None:
        raise CannotEvaluate(f"{target} is a path, and nothing evaluates datasets in this version; targets: {names}")
    return DATASET(Path(target), options)
