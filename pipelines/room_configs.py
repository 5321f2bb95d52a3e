"""From settings to detection's own configuration; recovery's stands in `policy_settings.py`, without its libraries."""

from __future__ import annotations

from dataclasses import replace

from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.ensemble.ensemble import UnsuitableMember, check_members
from detectors.ensemble.models import EnsembleUnavailable, UnknownModel
from detectors.ensemble.start import start_from
from detectors.ensemble.stored import ModelRefused, StoredModel
from detectors.steps import TIMINGS
from pipelines.settings import Settings, SettingsError


def detector_config(settings: Settings) -> DetectorConfig:
    """What detection looks for and how long it waits."""
    chosen, base = settings.detect, DetectorConfig()
    return replace(
        base,
        rank=base.rank.with_ratio(chosen.straggler_ratio),
        liveness=replace(
            base.liveness,
            frozen_seconds=chosen.hang_without_stop_seconds,
            ceiling_seconds=chosen.hang_ceiling_seconds,
            startup_ceiling_seconds=chosen.start_ceiling_seconds,
            node_silent_seconds=chosen.node_silent_seconds,
        ),
        judge=replace(base.judge, root_wait_seconds=chosen.coalesce_seconds),
        ensemble=ensemble_config(settings),
    )


def ensemble_config(settings: Settings) -> EnsembleConfig:
    """Members, budget and the model to start from. Raises SettingsError for a member that does not suit, a feature
    that does not exist, and a model that was fitted for something else."""
    chosen = settings.detect.ensemble
    unknown = [name for name in chosen.features if name not in TIMINGS]
    if len(chosen.features) == 1:
        raise SettingsError("detect.ensemble.features: give at least two timings, or none for all of them")
    if unknown:
        raise SettingsError(f"detect.ensemble.features: {unknown[0]!r} is no timing; there are {', '.join(TIMINGS)}")
    if not 1 <= chosen.persistence[0] <= chosen.persistence[1] <= 16:
        raise SettingsError("detect.ensemble.persistence: give [k, n] with 1 <= k <= n <= 16, such as [6, 8]")
    config = EnsembleConfig(
        on=chosen.enabled, members=chosen.members, votes=chosen.votes, vote_weight=chosen.vote_weight,
        weights=tuple(sorted(chosen.weights.items())), features=chosen.features or TIMINGS,
        budget_per_day=chosen.budget_per_day, persistence=chosen.persistence,
    )  # fmt: skip
    if not config.on:
        return config
    try:
        check_members(config)
        path = settings.detect.model
        if path is None:
            return config
        return replace(config, start=start_from(StoredModel.from_bytes(path.read_bytes()), config))
    except (UnsuitableMember, UnknownModel) as error:
        raise SettingsError(f"detect.ensemble: {error}") from error
    except EnsembleUnavailable as error:
        if settings.detect.model is None:
            return config  # whoever runs it says that it is off
        raise SettingsError(f"detect.model: {error}") from error
    except ModelRefused as error:
        raise SettingsError(f"detect.model: {settings.detect.model}: {error}") from error
    except OSError as error:
        raise SettingsError(f"detect.model: {settings.detect.model} cannot be read ({error.strerror})") from error
