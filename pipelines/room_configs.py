"""From settings to each room's own configuration."""

from __future__ import annotations

from dataclasses import replace

from detectors.config import DetectorConfig
from pipelines.settings import Settings, SettingsError
from recovery.policy_config import PolicyConfig


def policy_config(settings: Settings) -> PolicyConfig:
    """What recovery is allowed to do. Raises SettingsError for a mode of a class that does not exist."""
    chosen = settings.recover
    config = replace(
        PolicyConfig(),
        coalesce_seconds_max=settings.detect.coalesce_seconds,
        restarts_max=chosen.restarts_max,
        restarts_window_seconds=chosen.restarts_window_seconds,
        no_progress_max=chosen.same_cause_max,
        evidence_seconds_max=chosen.evidence_seconds,
        stop_grace_seconds=chosen.stop_grace_seconds,
        probation_steps=chosen.probation_steps,
        probation_seconds=chosen.probation_seconds,
    )
    try:
        return config.with_modes(chosen.modes)
    except ValueError as error:
        raise SettingsError(f"recover.modes: {error}") from error


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
            node_silent_seconds=chosen.node_silent_seconds,
        ),
        judge=replace(base.judge, root_wait_seconds=chosen.coalesce_seconds),
        ensemble=base.ensemble if chosen.ensemble else replace(base.ensemble, model=""),
    )
