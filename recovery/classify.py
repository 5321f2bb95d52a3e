"""What an exit is taken for that no verdict explains: error files first, then the scheduler, then exit codes.

Order: the first failure by time whose error file says more than that it lost its peers; what the scheduler says;
the exit code of the first rank that ended by itself; unknown, which is restarted once. Ranks that were ended by
SIGTERM, or that only report a lost peer, are victims: they are read only where nobody else says anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from detectors.verdict import Advice, Culprit, Evidence, FaultClass, Severity, Verdict

from .backend import Observation, RankView
from .policy_config import ExitRules

TEXT_CHARACTERS_MAX = 2000
SHOWN_MAX = 8  # exits that the evidence lists
DETECTOR = "recovery"
_ADVICE: dict[str, Advice] = {
    "user_error": "stop",
    "node_lost": "restart_exclude_node",
    "gpu_lost": "restart_exclude_node",
}


@dataclass(frozen=True, slots=True)
class Classified:
    """What it is, whose it is, and by which rule, in words."""

    fault_class: FaultClass
    rank: RankView | None
    rule: str
    text: str  # the sentence for people, the error's own text after it


def classify(observation: Observation, rules: ExitRules) -> Classified:
    """What ended this job, as far as its ranks' ends and its scheduler tell. Pure; see the module for the order."""
    ended = sorted(
        (rank for rank in observation.ranks if rank.state == "exited" and rank.exit_code != 0),
        key=lambda rank: (rank.ended_at if rank.ended_at is not None else float("inf"), rank.rank),
    )
    own = [rank for rank in ended if not _is_victim(rank, rules)]
    for rank in own:
        if code_of(rank) in rules.stop_codes or code_of(rank) in rules.planned_codes:
            return _by_code(rank, rules)
    told = next((rank for rank in own if rank.error), None)
    if told is not None:
        return _by_error(told, rules)
    for words, fault_class in rules.states:
        if words in observation.reason:
            rule = f"scheduler state {words}"
            return Classified(fault_class, None, rule, f"The scheduler ended the job: {observation.reason}.")
    if own:
        return _by_code(own[0], rules)
    if ended:
        text = f"All ranks that ended only lost their peers or were told to stop; {_end(ended[0])} first."
        return Classified("unknown", None, "only victims", text)
    return Classified("unknown", None, "no exit is known", "The ranks are gone, and nobody says how they ended.")


def synthesized(observation: Observation, rules: ExitRules, verdict_id: str, now: float) -> Verdict:
    """The verdict that recovery gives itself where detection has given none; settled, and says by which rule."""
    found = classify(observation, rules)
    rank = found.rank
    at = rank.ended_at if rank is not None and rank.ended_at is not None else now
    severity: Severity = "info" if found.fault_class == "preempted" else "error"
    evidence = [
        Evidence(kind="event", text=_end(one), at=one.ended_at or now, rank=one.rank, node=one.node, rule=found.rule)
        for one in _first(observation.ranks)
    ]
    if rank is not None and rank.error:
        text = rank.error[:TEXT_CHARACTERS_MAX]
        evidence.insert(0, Evidence(kind="log", text=text, at=at, rank=rank.rank, node=rank.node, rule=found.rule))
    return Verdict(
        verdict_id=verdict_id,
        revision=1,
        job=observation.job,
        attempt=observation.attempt,
        fault_class=found.fault_class,
        severity=severity,
        settled=True,
        culprits=(Culprit(rank=rank.rank, node=rank.node),) if rank is not None else (),
        onset_at=at,
        at=now,
        onset_step=max((one.step for one in observation.ranks if one.step >= 0), default=None),
        advice=_ADVICE.get(found.fault_class, "restart_in_place"),
        summary=found.text[:TEXT_CHARACTERS_MAX],
        evidence=tuple(evidence),
        detector=DETECTOR,
    )


def code_of(rank: RankView) -> int:
    """The exit code, 128 + the signal where it was ended by one, as shells and schedulers say it; 0: not known."""
    return 128 + rank.signal if rank.signal is not None else rank.exit_code or 0


def _is_victim(rank: RankView, rules: ExitRules) -> bool:
    lost_peers = bool(rank.error) and any(words in rank.error.partition("\n")[0] for words in rules.victims)
    return rank.stopped_by_us or lost_peers or (code_of(rank) in rules.victim_codes and not rank.error)


def _by_error(rank: RankView, rules: ExitRules) -> Classified:
    first = rank.error.partition("\n")[0]
    if code_of(rank) in rules.recover_codes:
        return Classified("unknown", rank, f"exit code {code_of(rank)} is in recover_on_exit_codes", _sentence(rank))
    for words, fault_class in rules.errors:
        if words in rank.error:
            return Classified(fault_class, rank, f"error file: {words}", _sentence(rank))
    return Classified("user_error", rank, f"error file: {first[:120]}", _sentence(rank))


def _by_code(rank: RankView, rules: ExitRules) -> Classified:
    code = code_of(rank)
    if code in rules.planned_codes:
        return Classified("preempted", rank, f"exit code {code} is planned", _sentence(rank))
    if code in rules.stop_codes:
        return Classified("user_error", rank, f"exit code {code}: do not restart", _sentence(rank))
    if code in rules.recover_codes:
        return Classified("unknown", rank, f"exit code {code} is in recover_on_exit_codes", _sentence(rank))
    listed = rules.codes.get(code)
    if listed is not None:
        return Classified(listed, rank, f"exit code {code}: {listed}", _sentence(rank))
    if 1 <= code <= 127:
        return Classified("user_error", rank, f"exit code {code}: the job's own error", _sentence(rank))
    return Classified("unknown", rank, f"exit code {code} is not listed", _sentence(rank))


def _sentence(rank: RankView) -> str:
    error = f": {rank.error}" if rank.error else ""
    return f"{_end(rank)}{error}"


def _end(rank: RankView) -> str:
    how = f"was ended by signal {rank.signal}" if rank.signal is not None else f"ended with exit code {rank.exit_code}"
    step = f" at step {rank.step}" if rank.step >= 0 else " before its first step"
    return f"Rank {rank.rank} on {rank.node} {how}{step}"


def _first(ranks: Sequence[RankView]) -> list[RankView]:
    ended = [rank for rank in ranks if rank.state == "exited" and rank.exit_code != 0]
    return sorted(ended, key=lambda rank: (rank.ended_at or 0.0, rank.rank))[:SHOWN_MAX]
