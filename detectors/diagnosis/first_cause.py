"""Which sighting came first and caused the others: order, what explains what, who is behind, who only suffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from detectors.diagnosis.sightings import Sighting

EXPLAIN_SECONDS = 120.0
SAME_BLOW_SECONDS = 5.0
CHAIN_LINES = 120  # an exception "during handling of" another stands this close behind it
REPORTERS_MIN = 3  # before one missing among them means anything

DEVICE = frozenset((
    "gpu_off_bus", "gpu_ecc", "gpu_ecc_contained", "nvlink_error", "nvswitch_error", "gpu_driver_fault", "pcie_fatal",
    "gpu_reset_required",
))  # fmt: skip
MACHINE = DEVICE | {"node_loss", "cpu_lockup", "host_hw"}
TIMED_OUT = frozenset(("nccl_timeout", "nccl_hang_watchdog"))
ENDED = frozenset(("sigkill_unknown", "segfault", "dataloader_killed", "bus_error", "illegal_instruction"))
TELLS_LEAST = frozenset(("abort", "terminated", "actor_died"))  # of those who suffer
TOLD_BY_CUDA = frozenset(("illegal_memory_access", "cuda_error_other", "cuda_init"))
TOLD_AFTER = frozenset(("gpu_reset_required",))
# What a cause explains although it may be seen later: a kernel's line beats a CUDA error, any reason beats an exit.
EXPLAINS: Mapping[str, frozenset[str]] = {
    **{name: TOLD_BY_CUDA | ENDED | TOLD_AFTER | {"xid_app"} for name in MACHINE - TOLD_AFTER},
    "gpu_off_bus": TOLD_BY_CUDA | ENDED | TOLD_AFTER | {"xid_app", "pcie_fatal"},
    "host_oom": ENDED,
    "preemption": ENDED, "requeue": ENDED, "time_limit": ENDED,
    "dataloader_shm": ENDED, "nccl_segfault": ENDED, "illegal_memory_access": ENDED - {"dataloader_killed"},
    "cuda_oom": frozenset(("cuda_error_other",)),
}  # fmt: skip
GROUP_ORDER = {"kernel": 0, "scheduler": 1, "program": 2, "user": 3, "exit": 4, "sufferer": 5, "warning": 6}


@dataclass(frozen=True, slots=True)
class Behind:
    """Ranks whose last completed collective is behind the others'."""

    ranks: tuple[int, ...]
    completed: int
    others: int


def put_in_order(sightings: Sequence[Sighting], untimed_before: bool = True) -> list[Sighting]:
    """Sightings by time. What has no time stands where its source's lines before and after it stand.

    A source without any time goes before those with times: ranks that say why they died seldom say when.
    """
    year = max((one.stamp.year for one in sightings if one.stamp is not None), default=0)
    by_source: dict[int, list[Sighting]] = {}
    for one in sightings:
        by_source.setdefault(one.source_order, []).append(one)
    only_uptime = all(one.stamp is None or one.stamp.uptime for one in sightings)
    for lines in by_source.values():
        lines.sort(key=lambda one: one.line)
        last: float | None = None
        for one in lines:
            if one.stamp is not None and (not one.stamp.uptime or (only_uptime and len(by_source) == 1)):
                last = one.stamp.seconds if one.stamp.uptime else one.stamp.in_year(year)
            one.at = last
        following: float | None = None
        for one in reversed(lines):
            following = one.at if one.at is not None else following
            one.at = following
    start = float("-inf")
    return sorted(
        sightings,
        key=lambda one: (
            one.at if one.at is not None else start,
            GROUP_ORDER[one.symptom.group] if one.at is None and len(by_source) > 1 else 0,
            one.source_order, one.line,
        ),
    )  # fmt: skip


def first_cause(ordered: Sequence[Sighting]) -> Sighting | None:
    """The sighting that explains the rest; None where there is nothing but what went on by itself."""
    strong = [one for one in ordered if not one.weak]
    roots = [one for one in strong if one.symptom.group not in ("sufferer", "warning")]
    suffering = [one for one in strong if one.symptom.group == "sufferer" and one.symptom.action != "none"]
    warnings = [one for one in strong if one.symptom.group == "warning"]
    harmless = [one for one in strong if one.symptom.group == "sufferer" and one.symptom.action == "none"]
    roots = [one for one in roots if not _told_by(one, warnings)]
    if roots:
        first = _better(roots[0], roots)
        if first.symptom.group == "exit":
            waited = [one for one in suffering if one.symptom.name in TIMED_OUT]
            if waited and not _precedes(first, waited[0]):
                return waited[0]  # whoever waited ten minutes was not ended by the exit that followed
        return first
    telling = [one for one in suffering if one.symptom.name not in TELLS_LEAST]
    return next((group[0] for group in (telling, suffering, warnings, harmless) if group), None)


def _told_by(one: Sighting, warnings: Sequence[Sighting]) -> bool:
    """nvidia-smi's loss of a handle right after a storm of corrected errors tells of the storm."""
    return one.rule.id == "nvml_handle" and any(warning.symptom.name == "pcie_corrected" for warning in warnings)


def _better(first: Sighting, roots: Sequence[Sighting]) -> Sighting:
    """What explains the earliest root better than it explains itself."""
    seen = {first.symptom.name}
    while True:
        better = next((one for one in roots if explains(one, first) and one.symptom.name not in seen), None)
        if better is None:
            return first
        seen.add(better.symptom.name)
        first = better


def explains(cause: Sighting, one: Sighting) -> bool:
    """Whether `one` is what `cause` looks like from elsewhere, or the weak word that came before it."""
    if cause is one:
        return False
    if one.symptom.name in EXPLAINS.get(cause.symptom.name, ()) and _near(cause, one, EXPLAIN_SECONDS):
        same_node = not cause.speaker.node or not one.speaker.node or cause.speaker.node == one.speaker.node
        return same_node or cause.symptom.group == "scheduler"
    # the weakest of roots gives way to what the same rank says right behind it
    return (
        one.symptom.name == "python_exception" and cause.symptom.group in ("program", "user", "kernel")
        and cause.symptom.name != "python_exception" and cause.source == one.source
        and 0 <= cause.line - one.line <= CHAIN_LINES and _near(cause, one, SAME_BLOW_SECONDS)
        and (cause.speaker.rank == one.speaker.rank or None in (cause.speaker.rank, one.speaker.rank))
    )  # fmt: skip


def _near(cause: Sighting, one: Sighting, seconds: float) -> bool:
    if cause.at is None or one.at is None:
        return True
    return abs(cause.at - one.at) <= seconds


def _precedes(one: Sighting, other: Sighting) -> bool:
    if one.at is not None and other.at is not None and one.at != other.at:
        return one.at < other.at
    return one.source_order == other.source_order and one.line < other.line


def who_is_behind(completed: Mapping[tuple[str, int], int]) -> Behind | None:
    """The ranks with the lowest completed collective of a process group, unless they are its majority."""
    groups: dict[str, dict[int, int]] = {}
    for (group, rank), number in completed.items():
        groups.setdefault(group, {})[rank] = number
    found: Behind | None = None
    for ranks in groups.values():
        lowest = min(ranks.values())
        behind = tuple(sorted(rank for rank, number in ranks.items() if number == lowest))
        if len(behind) == len(ranks) or len(behind) * 2 > len(ranks):
            continue
        others = Counter(number for number in ranks.values() if number != lowest).most_common(1)[0][0]
        if found is None or others - lowest > found.others - found.completed:
            found = Behind(behind, lowest, others)
    return found


def who_is_missing(reporters: Iterable[int], known: Iterable[int]) -> int | None:
    """The one rank that did not report what all others reported, None where it is none or more than one."""
    spoke = set(reporters)
    world = max(spoke | set(known), default=-1) + 1
    silent = set(range(world)) - spoke
    return silent.pop() if len(silent) == 1 and len(spoke) >= REPORTERS_MIN else None
