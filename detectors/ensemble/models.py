"""The door to PyOD: models by name, one thread each, seeded, nothing of them ever pickled."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
SEED = 0

# HBOS and IForest saturate far out, so they vote and do not decide; ECOD and COPOD score a row by the batch it comes
# in, so they are baselines only. What is not listed takes PyOD's own parameters.
PARAMETERS: dict[str, dict[str, Any]] = {
    "PCA": {"n_components": 0.95, "svd_solver": "full", "standardization": True},
    "KNN": {"n_neighbors": 5, "method": "mean"},
    "HBOS": {"n_bins": 20},
    "IForest": {"n_estimators": 50, "max_samples": 256},
}
# PyOD compiles these with numba in their first fit: eight seconds in mid-stream, which their few rows never give back.
INTERPRETED = frozenset(("HBOS",))


class EnsembleUnavailable(RuntimeError):
    """PyOD is not installed; the text names the extra."""


class UnknownModel(ValueError):
    """PyOD has no detector of this name; the text says what a name looks like."""


class Model(Protocol):
    """A detector of PyOD: the higher the score, the odder the row."""

    def fit(self, rows: Floats) -> Any: ...
    def decision_function(self, rows: Floats) -> Floats: ...


def load_model(name: str) -> Model:
    """A fresh model; the import of PyOD takes about two seconds, so a service does it before its first message.

    Any detector of PyOD may be named by its class. Raises EnsembleUnavailable without PyOD, UnknownModel for a name.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]{1,30}", name):
        raise UnknownModel(f"{name!r} is no name of a PyOD detector; give a class of pyod.models, such as KNN")
    try:
        importlib.import_module("pyod.models.base")
    except ImportError as error:
        raise EnsembleUnavailable("PyOD is not installed: pip install 'transom[detect]'") from error
    try:
        module = importlib.import_module(f"pyod.models.{name.lower()}")
        kind = getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise UnknownModel(f"PyOD has no detector {name!r} here ({error}); name a class such as KNN") from error
    if name in INTERPRETED:
        for key, value in list(vars(module).items()):
            setattr(module, key, getattr(value, "py_func", value))
    taken = inspect.signature(kind).parameters
    fixed = {"random_state": SEED, "n_jobs": 1}
    chosen = {key: value for key, value in fixed.items() if key in taken} | PARAMETERS.get(name, {})
    model: Model = kind(**chosen)
    return model


def version() -> str:
    """PyOD's version. Raises EnsembleUnavailable."""
    try:
        return str(importlib.import_module("pyod.version").__version__)
    except ImportError as error:
        raise EnsembleUnavailable("PyOD is not installed: pip install 'transom[detect]'") from error
