"""From settings to recovery's own configuration: apart from detection's, whose libraries recovery need not load."""

from __future__ import annotations

from dataclasses import replace

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
