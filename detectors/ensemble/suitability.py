"""May a model of PyOD be a member of the ensemble? Small experiments answer, in words that a person can use.

What is asked comes from what users of PyOD reported: scores that depend on the rest of the batch, far rows that look
normal, NaN in and NaN out, state that a second thread overwrites.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from detectors.ensemble.models import EnsembleUnavailable, Floats, Model, UnknownModel, load_model

ROWS, FEATURES = 512, 8
COPIES = 200
THREADS, CALLS = 4, 24
FAR = (4.0, 6.0, 10.0, 100.0, 1000.0)
GROWTH_MIN = 2.0  # the score of 1,000 sigma over that of 4 sigma, both above the usual score
RTOL = 1e-6


@dataclass(frozen=True, slots=True)
class Suitability:
    """`ok`: it may decide. `votes_ok`: it may vote. `reasons` says, in words, what it cannot."""

    name: str
    ok: bool
    votes_ok: bool
    reasons: tuple[str, ...] = ()


def check(name: str) -> Suitability:
    """Try a model by the name of its class. Raises EnsembleUnavailable without PyOD, UnknownModel for no such model."""
    load_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models about their own defaults
        serious, blunt = _tried(name)
    return Suitability(name, not serious and not blunt, not serious, (*serious, *blunt))


def _tried(name: str) -> tuple[list[str], list[str]]:
    """What makes it useless, and what makes it useless for deciding only."""
    dice = np.random.default_rng(7)
    rows = dice.normal(0.0, 1.0, (ROWS, FEATURES))
    try:
        model = _fit(name, rows)
        usual = _score(model, rows[:64])
    except (EnsembleUnavailable, UnknownModel):
        raise
    except Exception as error:  # noqa: BLE001  a stranger's model may fail in any way, and that is the answer
        return [f"it cannot be fitted on {ROWS} ordinary rows ({_short(error)})"], []
    serious: list[str] = []
    if not np.isfinite(usual).all():
        serious.append("it gives ordinary rows a score that is no number")
        return serious, []
    asked = (_depends_on_batch, _not_reproducible, _falls_over_constants, _not_threadsafe)
    for question in asked:
        try:
            found = question(name, model, rows)
        except Exception as error:  # noqa: BLE001  as above
            found = f"it fails where it should score ({_short(error)})"
        if found:
            serious.append(found)
    return serious, [found for found in [_does_not_grow(model, rows)] if found]


def _depends_on_batch(name: str, model: Model, rows: Floats) -> str:
    odd = rows[3].copy()
    odd[0] += 8.0
    alone = float(_score(model, odd[None])[0])
    crowd = float(_score(model, np.repeat(odd[None], COPIES, axis=0))[0])
    if np.isclose(alone, crowd, rtol=RTOL, atol=1e-9):
        return ""
    return (
        f"it scores a row by the batch it comes in ({alone:.4g} alone, {crowd:.4g} among {COPIES} copies), so that a "
        "fault of many ranks hides itself"
    )


def _not_reproducible(name: str, model: Model, rows: Floats) -> str:
    again = _fit(name, rows)
    if np.allclose(_score(model, rows[:64]), _score(again, rows[:64]), rtol=RTOL, atol=1e-9):
        return ""
    return "two fits on the same rows with the same seed score differently, so that a replay would not say the same"


def _falls_over_constants(name: str, model: Model, rows: Floats) -> str:
    """Our wrapper drops constant columns; a column that is constant in one batch must not matter."""
    flat = rows[:64].copy()
    flat[:, 2] = rows[0, 2]
    scores = _score(model, flat)
    return "" if np.isfinite(scores).all() else "a column that is constant in a batch makes it answer with no number"


def _not_threadsafe(name: str, model: Model, rows: Floats) -> str:
    """Our wrapper lets one thread in at a time; a model whose scores change after such calls keeps state."""
    before, written = _score(model, rows[:64]), _state(model)
    _score(model, rows[:16] + 3.0)
    batches = [rows[start * 16 : start * 16 + 16] + start for start in range(CALLS)]
    expected = [_score(_fit(name, rows), batch) for batch in batches[:2]]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda batch: _score(model, batch), batches))
    apart = sum(
        not np.allclose(one, two, rtol=RTOL, atol=1e-9) for one, two in zip(found[:2], expected, strict=True)
    )  # fmt: skip
    after = _score(model, rows[:64])
    if apart or written != _state(model) or not np.allclose(before, after, rtol=RTOL, atol=1e-9):
        return "scoring writes into the fitted model: calls from several threads get each other's scores"
    return ""


def _does_not_grow(model: Model, rows: Floats) -> str:
    """One feature goes out, in both directions: a score that stops growing calls 1,000 sigma what it calls four."""
    usual = float(np.median(_score(model, rows[:64])))
    for sign, way in ((1.0, "up"), (-1.0, "down")):
        outward = np.zeros((len(FAR), FEATURES))
        outward[:, 0] = sign * np.array(FAR)
        scores = _score(model, outward)
        if not np.isfinite(scores).all():
            return "far rows get a score that is no number"
        slack = RTOL * (1.0 + np.abs(scores[:-1]))
        near, far = float(scores[0]), float(scores[-1])
        if (np.diff(scores) < -slack).any() or far - usual < GROWTH_MIN * max(near - usual, 1e-9):
            return (
                f"it does not grow with distance ({near:.4g} at 4 sigma {way}, {far:.4g} at 1,000), so it may vote but "
                "not decide"
            )
    return ""


def _fit(name: str, rows: Floats) -> Model:
    model = load_model(name)
    model.fit(rows.copy())
    return model


def _score(model: Model, rows: Floats) -> Floats:
    return np.asarray(model.decision_function(rows.copy()), dtype=np.float64)


def _state(model: Model) -> dict[str, bytes]:
    """Every array that the model keeps."""
    return {name: value.tobytes() for name, value in vars(model).items() if isinstance(value, np.ndarray)}


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]
