"""A stored ensemble made ready: its committees fitted again from the stored windows, and held against its checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from detectors.ensemble.committee import Committee, fitted
from detectors.ensemble.config import EnsembleConfig
from detectors.ensemble.stored import CHECKS_RTOL, ModelRefused, Peers, StoredModel


@dataclass(frozen=True, slots=True)
class Start:
    """What an ensemble knows before its first step; shared by all jobs of a process."""

    model: StoredModel
    committees: Mapping[Peers, Committee]


def start_from(model: StoredModel, config: EnsembleConfig) -> Start:
    """Fit a stored model again. Raises ModelRefused where it was made for something else or scores otherwise here."""
    for what, theirs, ours in (
        ("features", model.features, config.features),
        ("members", model.members, config.members),
        ("votes", model.votes, config.votes),
        ("persistence", model.persistence, config.persistence),
    ):
        if theirs != ours:
            raise ModelRefused(
                f"the model was fitted with other {what} ({_listed(theirs)}) than are configured ({_listed(ours)}); "
                f"fit it anew with `transom fit`, or set detect.ensemble.{what}"
            )
    plain = replace(config, start=None)
    committees = {}
    for peers, part in model.parts.items():
        found = fitted(np.asarray(model.windows[peers]), plain)
        if found is None or not same_checks(found, part.checks):
            told = ", ".join(f"{name} {number}" for name, number in sorted(model.versions.items()))
            raise ModelRefused(
                f"the model does not reproduce its scores here (it was fitted with {told}); fit it anew with "
                "`transom fit`"
            )
        committees[peers] = found
    return Start(model, committees)


def same_checks(committee: Committee, checks: tuple[float, ...]) -> bool:
    """The committee scores its check rows as they were scored when it was stored."""
    return len(checks) == len(committee.checks) and np.allclose(committee.checks, checks, rtol=CHECKS_RTOL, atol=1e-8)


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))
