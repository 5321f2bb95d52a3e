"""The symptoms that a diagnosis can name: finer than a fault class, with action and words for each.

A log rule's `kind` is its symptom. The words are data (`symptoms.toml`), as the rules are; a kind that they do not
name, that of a user's own rule, takes its words from the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from detectors.logs.rule_book import Rule
from detectors.verdict import Advice, FaultClass

Action = Literal[
    "none", "restart_in_place", "restart_new_port", "restart_exclude_node", "rollback_restart", "stop",
    "diagnose_then_restart",
]  # fmt: skip
Group = Literal["kernel", "scheduler", "program", "user", "exit", "sufferer", "warning"]


class Symptom(msgspec.Struct, frozen=True):
    """What a rule's lines tell of. `what` completes "Rank 3 ...", `mend` is what a person should do."""

    name: str
    action: Action
    group: Group
    what: str
    mend: str


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: Group
    what: str
    mend: str
    refines: Literal["diagnose_then_restart", "restart_new_port"] | None = None
    within: str = ""


OF_ADVICE: Mapping[Advice, Action] = {
    "none": "none", "notify": "none", "restart_in_place": "restart_in_place",
    "restart_exclude_node": "restart_exclude_node", "rollback_restart": "rollback_restart", "stop": "stop",
}  # fmt: skip
# What a rule of a kind without words is taken for, by its class; what is not here is a program's own trouble.
GROUP_OF_CLASS: Mapping[FaultClass, Group] = {
    "warning": "warning", "throttled": "warning", "rank_lost": "exit", "user_error": "user", "host_oom": "kernel",
    "gpu_lost": "kernel", "gpu_ecc": "kernel", "nvlink_error": "kernel", "link_degraded": "kernel",
    "node_lost": "scheduler", "preempted": "scheduler",
}  # fmt: skip


@cache
def words() -> Mapping[str, _Row]:
    """The table, by kind."""
    return msgspec.toml.decode(
        (resources.files("detectors.diagnosis") / "symptoms.toml").read_bytes(), type=dict[str, _Row]
    )


def symptom_of(rule: Rule) -> Symptom:
    """The symptom that a rule's lines tell of, with the action for it."""
    action, row = OF_ADVICE[rule.advice], words().get(rule.kind)
    if row is None:
        group = "sufferer" if rule.role == "cascade" else GROUP_OF_CLASS.get(rule.fault_class, "program")
        what = f"met what rule {rule.id} describes ({rule.fault_class.replace('_', ' ')})"
        return Symptom(rule.kind or rule.id, action, group, what, "Read the lines below.")
    if row.refines is not None and action == "restart_in_place":
        action = row.refines
    group = "sufferer" if rule.role == "cascade" else row.group
    return Symptom(rule.kind, action, group, row.what, row.mend)
