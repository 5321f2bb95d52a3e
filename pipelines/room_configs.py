"""From settings to each room's own configuration."""

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
from recovery.policy_config import PolicyConfig


def policy_config(settings: Settings) -> PolicyConfig:
    """What recovery is allowed to do. Raises SettingsError for a mode of a class that does not exist."""
    chosen = settings.recover
    nodes, exits, tries = chosen.quarantine, chosen.exits, chosen.preflight
    base = PolicyConfig()
    config = replace(
        base,
        coalesce_seconds_max=settings.detect.coalesce_seconds,
        restarts_max=chosen.restarts_max,
        restarts_window_seconds=chosen.restarts_window_seconds,
        no_progress_max=chosen.same_cause_max,
        evidence_seconds_max=chosen.evidence_seconds,
        stop_grace_seconds=chosen.stop_grace_seconds,
        probation_steps=chosen.probation_steps,
        probation_seconds=chosen.probation_seconds,
        nodes_per_restart=chosen.nodes_per_restart,
        spent_budget=chosen.spent_budget,
        rung_repeats_max=chosen.rung_repeats_max,
        flap_restarts_max=chosen.flap_restarts_max,
        flap_seconds=chosen.flap_seconds,
        without_checkpoint=chosen.without_checkpoint,
        rollback_margin_steps=chosen.rollback_margin_steps,
        approval_seconds_max=chosen.approval_seconds,
        starting_seconds_max=chosen.starting_seconds,
        capacity_seconds=chosen.capacity_seconds,
        held_again_seconds=chosen.held_again_seconds,
        quarantine_mode=nodes.mode,
        strikes_max=nodes.strikes_max,
        strikes_window_seconds=nodes.strikes_window_seconds,
        quarantine_seconds=nodes.seconds,
        spare_seconds=nodes.spare_seconds,
        breaker_share=nodes.breaker_share,
        breaker_nodes_max=nodes.breaker_nodes_max,
        breaker_seconds=nodes.breaker_seconds,
        preflight=tries.enabled,
        preflight_seconds_max=tries.seconds,
        check_seconds_max=tries.check_seconds,
        slow_ratio=tries.slow_ratio,
        watch_seconds=exits.watch_seconds,
        exit_grace_seconds=exits.grace_seconds,
        blind_seconds_max=exits.blind_seconds,
        exits=replace(
            base.exits,
            recover_codes=frozenset(exits.recover_codes),
            stop_codes=frozenset(exits.stop_codes),
            planned_codes=frozenset(exits.planned_codes),
        ),
    )
    try:
        config = config.with_budgets({str(name): number for name, number in chosen.budgets.items()})
    except ValueError as error:
        raise SettingsError(f"recover.budgets: {error}") from error
    try:
        config = config if tries.classes is None else config.with_checks(tries.classes)
    except ValueError as error:
        raise SettingsError(f"recover.preflight.classes: {error}") from error
    try:
        return config.with_verbs(chosen.actions).with_modes(chosen.modes)
    except ValueError as error:
        raise SettingsError(f"recover.{'actions' if 'action' in str(error) else 'modes'}: {error}") from error


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
