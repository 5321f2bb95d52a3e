"""Standstill: which ranks hang, how surely, and how long each phase may stand still."""

from __future__ import annotations

import math

import msgspec

from detectors.clues import Clue, Condition, Source
from detectors.culprits import names_of, whom
from detectors.roster import RankState, Roster
from detectors.silence.liveness import STOPPED, LivenessConfig
from detectors.verdict import Culprit, Evidence

SPINS_MIN = 2  # samples of a GPU in a row
FIRST_STEPS = 3  # of an attempt: they may compile, and nobody knows yet how long a step takes
WORKING = ("train", "collective")
STEPS_AHEAD = 3  # of a stopped rank: nobody waits for it
TOLD_SECONDS = 1.0  # what is told so soon after a rank stopped may have happened before
# Why a hang is one rank's, and why it is several ranks'.
REASONS = {
    "stopped": ("its process is stopped", "their processes are stopped"),
    "silent": ("it sends no heartbeats while its peers wait for it", "they send no heartbeats while their peers wait"),
    "odd": ("its peers wait for it", "their peers wait for them"),
    "spinning": ("its GPU has nothing to do while its peers' wait", "their GPUs have nothing to do while others' wait"),
    "working": ("its GPU works on while its peers' wait", "their GPUs work on while others' wait"),
}  # fmt: skip


def look_for_hang(now: float, roster: Roster, config: LivenessConfig) -> Clue | None:
    """The hang that is there now, if any. Progress, not liveness, is what a job owes."""
    still = now - roster.active_at
    if still < min(config.stopped_no_progress_seconds, config.frozen_seconds):
        return None  # nearly always: nobody is asked anything
    live, median_step = roster.live(), roster.median_step
    if not live or roster.over:
        return None
    if roster.last_exit_at is not None and now < roster.last_exit_at + config.after_exit_seconds:
        return None
    if not roster.trained:
        return _startup(now, roster, live, config) if still >= config.startup_ceiling_seconds else None
    stopped = [rank for rank in live if rank.stalled in STOPPED]
    if stopped and still >= config.stopped_no_progress_seconds:
        since = max(rank.stalled_since for rank in stopped)
        if now - since >= config.stopped_no_progress_seconds:
            return _hang(now, roster, stopped, "stopped", settled=True)
    if still < max(config.frozen_seconds, config.frozen_steps * median_step):
        return None
    spinning = _spinning(now, live, config) if still >= roster.longest_step else None
    if spinning is not None:
        return _spun(now, roster, live, spinning, config)
    silent = _silent(now, roster, live, config)
    if silent:
        one_node = len({rank.node for rank in silent}) == 1
        return _hang(now, roster, silent, "silent", settled=one_node or still >= _ceiling(live, roster, config))
    if still < _ceiling(live, roster, config):
        return None
    odd = _odd(live, roster.active_at)
    return _hang(now, roster, odd, "odd" if odd else "frozen", settled=True)


def any_stopped(roster: Roster) -> bool:
    """Whether a launcher sees the process of a live rank stopped."""
    return any(roster.ranks[rank].live and roster.ranks[rank].stalled in STOPPED for rank in roster.stalled)


def look_for_stopped(now: float, roster: Roster, config: LivenessConfig, open_keys: list[str]) -> list[Condition | str]:
    """Ranks whose process is stopped while the job goes on without them: to warn of, and keys of those that are over.

    Nobody waits for such a rank, so it is no hang; a debugger, a person, or a job that has lost it.
    """
    told: list[Condition | str] = []
    warned = {rank for rank in roster.ranks if f"stopped/{rank}" in open_keys} if open_keys else set()
    for rank in (roster.ranks[number] for number in sorted(roster.stalled | warned)):
        key = f"stopped/{rank.rank}"
        stopped = rank.live and rank.stalled in STOPPED
        if key in open_keys and not stopped:
            told.append(key)
        long = now - rank.stalled_since >= config.stopped_alone_seconds
        left_behind = roster.newest_step >= rank.step + STEPS_AHEAD and (
            roster.newest_at > rank.stalled_since + TOLD_SECONDS
        )
        if not stopped or key in open_keys or not long or not left_behind or rank.last is None:
            continue
        text = f"the process of rank {rank.rank} is in state {rank.stalled} for {now - rank.stalled_since:.0f} s"
        told.append(
            Condition(
                key=key, fault_class="warning", culprits=(Culprit(rank=rank.rank, node=rank.node),), victims=0,
                onset_at=rank.stalled_since, onset_step=rank.step if rank.step >= 0 else None,
                summary=f"Rank {rank.rank} on {rank.node} is stopped, and the others go on without it.",
                evidence=(
                    Evidence(
                        kind="event", text=text, at=rank.stalled_since, rank=rank.rank, node=rank.node,
                        topic=rank.last.topic, partition=rank.last.partition, offset=rank.last.offset,
                    ),
                ),
                source=rank.last, detector="liveness", severity="warning", advice="notify",
            )
        )  # fmt: skip
    return told


def _spinning(now: float, live: list[RankState], config: LivenessConfig) -> list[RankState] | None:
    """Ranks whose GPU is busy at a fraction of its usual power, where that is at least half of the ranks: kernels
    that wait for somebody. None where the GPUs say nothing of the kind, and where it is known for what they wait:
    for a rank that checkpoints or evaluates."""
    if any(rank.phase not in WORKING for rank in live):
        return None
    spinning = [
        rank
        for rank in live
        if rank.gpu.spinning_since is not None
        and rank.gpu.spins >= SPINS_MIN
        and rank.gpu.seen_at is not None
        and now - rank.gpu.seen_at <= config.gpu_fresh_seconds
    ]
    return spinning if spinning and 2 * len(spinning) >= len(live) else None


def _spun(now: float, roster: Roster, live: list[RankState], spinning: list[RankState], config: LivenessConfig) -> Clue:
    """The hang that spinning GPUs corroborate, and who is waited for: the rank whose GPU has nothing to do, who has
    fallen silent, who is not where the others are, or whose GPU works on."""
    others = [rank for rank in live if rank not in spinning]
    working = [rank for rank in others if rank.gpu.seen_at is not None and not rank.gpu.idle]
    working = [rank for rank in working if now - (rank.gpu.seen_at or 0.0) <= config.gpu_fresh_seconds]
    found: list[tuple[str, list[RankState]]] = [
        ("spinning", [rank for rank in others if rank.gpu.idle]), ("silent", _silent(now, roster, live, config)),
        ("odd", _odd(live, roster.active_at)), ("working", working),
    ]  # fmt: skip
    how, ranks = next(((how, ranks) for how, ranks in found if 0 < 2 * len(ranks) < len(live)), ("spinning", []))
    clue = _hang(now, roster, ranks, how, settled=True)
    rank = spinning[0]
    usual, power = rank.gpu.usual_power, rank.gpu.power
    assert usual is not None
    assert power is not None
    assert rank.gpu.seen_at is not None
    text = (
        f"the GPUs of {len(spinning)} of {len(live)} ranks are busy at a fraction of their power, that of rank"
        f" {rank.rank} at {power:.0f} W instead of {usual:.0f} W: they wait in a collective"
    )
    seen = Evidence(
        kind="metric", text=text, at=rank.gpu.seen_at, rank=rank.rank, node=rank.node, metric="hw.gpu.power",
        value=round(power, 1), peers_median=round(usual, 1), unit="W",
    )  # fmt: skip
    return msgspec.structs.replace(clue, evidence=(seen, *clue.evidence[:3]))


def _silent(now: float, roster: Roster, live: list[RankState], config: LivenessConfig) -> list[RankState]:
    """Ranks whose heartbeat stopped in training while their launcher and at least as many peers go on, and wait: for
    longer than telemetry that is lost or late keeps a rank of this job silent."""
    gaps = min(config.heartbeat_gaps * roster.gap_seconds, config.heartbeat_gaps_seconds_max)
    old_at = now - max(config.heartbeat_old_seconds, gaps)
    fresh_at = now - config.heartbeat_fresh_seconds
    silent = []
    for rank in live:
        node = roster.node(rank.node)
        if rank.heard_at is None or rank.heard_at >= old_at:
            continue
        overdue = rank.phase in WORKING or now - rank.heard_at > _patience(rank.phase, roster, config)
        if node.heard_at is not None and node.heard_at >= fresh_at and overdue:
            silent.append(rank)
    fresh = [rank for rank in live if rank.heard_at is not None and rank.heard_at >= fresh_at]
    waiting = [rank for rank in fresh if rank.phase in WORKING]
    return silent if waiting and len(fresh) >= len(silent) and 2 * len(waiting) >= len(fresh) else []


def _patience(phase: str, roster: Roster, config: LivenessConfig) -> float:
    """How long a rank that was last heard in a checkpoint or an evaluation may say nothing: its end may be what was
    not heard, so three times what such ones took; without limit while nobody knows that."""
    usual = roster.phase_p99(phase) if phase in ("checkpoint", "eval") else 0.0
    return max(config.heartbeat_gaps_seconds_max, config.ceiling_longest * usual) if usual > 0.0 else math.inf


def _odd(live: list[RankState], since: float) -> list[RankState]:
    """The one rank (or the ranks of one node) behind all others, else the one that is not in the collective with them:
    never the larger side. Of those that have spoken since the job stands still: of others it is not known where they
    are."""
    live = [rank for rank in live if rank.heard_at is not None and rank.heard_at >= since]
    if len(live) < 2:
        return []
    behind = [rank for rank in live if rank.step < max(other.step for other in live)]
    away = [rank for rank in live if rank.phase != "collective"]
    odd = behind or away
    one_node = len({rank.node for rank in odd}) == 1 and 2 * len(odd) < len(live)
    return odd if len(odd) == 1 or one_node else []


def _ceiling(live: list[RankState], roster: Roster, config: LivenessConfig) -> float:
    """The longest that any rank's phase may stand still."""
    seconds = max(_ceiling_of(rank.phase, roster, config) for rank in live)
    if len(roster.step_seconds) < FIRST_STEPS:
        seconds = max(seconds, config.startup_ceiling_seconds)
    done = any(rank.finished or rank.exit_code == 0 for rank in roster.ranks.values())
    if done and not any(rank.phase == "collective" for rank in live):
        seconds = max(seconds, config.long_ceiling_seconds)  # nobody waits: who is left writes the result, perhaps
    return max(seconds, config.ceiling_steps * roster.median_step, config.ceiling_longest * roster.longest_step)


def _ceiling_of(phase: str, roster: Roster, config: LivenessConfig) -> float:
    """A checkpoint or an evaluation may take three times what such ones took, and ten minutes at least."""
    if phase in WORKING:
        return config.ceiling_seconds
    if phase in ("checkpoint", "eval"):
        return max(config.long_ceiling_seconds, config.ceiling_longest * roster.phase_p99(phase))
    return config.startup_ceiling_seconds


def _startup(now: float, roster: Roster, live: list[RankState], config: LivenessConfig) -> Clue:
    clue = _hang(now, roster, [], "frozen", settled=True)
    seconds = now - roster.started_at
    summary = f"No rank of attempt {roster.attempt} has trained a step {seconds:.0f} s after its start."
    return msgspec.structs.replace(clue, summary=summary)


def _hang(now: float, roster: Roster, ranks: list[RankState], how: str, *, settled: bool) -> Clue:
    onset = max(roster.moved_at or roster.started_at, roster.started_at)
    witness = ranks[0] if ranks else min(roster.live(), key=lambda rank: (rank.heard_at or 0.0, rank.rank))
    last = witness.last
    source = Source(
        rank=witness.rank, node=witness.node, topic=last.topic if last else "metrics",
        sequence=last.sequence if last else -1, partition=last.partition if last else None,
        offset=last.offset if last else None, silence=how != "stopped",
    )  # fmt: skip
    evidence = tuple(_hang_evidence(now, roster, rank, how) for rank in (ranks or [witness])[:4])
    confidence = {"stopped": 1.0, "silent": 0.95, "odd": 0.7, "spinning": 0.6, "working": 0.5}.get(how, 1.0)
    culprits = whom((rank.rank for rank in ranks), roster, confidence, whole=True)
    step = max((rank.step for rank in roster.live()), default=-1)
    summary = f"All ranks stand still in step {step}; nobody stands out."
    if ranks:
        summary = f"{_who(culprits, len(ranks))} in step {step}: {REASONS[how][len(ranks) > 1]}."
    return Clue(
        kind="hang", role="root", fault_class="hang", at=onset, rank=witness.rank if ranks else None,
        node=witness.node if ranks else None, source=source, evidence=evidence, summary=summary, alone=True,
        settled=settled, step=step if step >= 0 else None, culprits=culprits, key="hang",
    )  # fmt: skip


def _who(culprits: tuple[Culprit, ...], ranks: int) -> str:
    """The subject of a sentence, with its verb."""
    if len(culprits) == 1 and culprits[0].rank is None:
        return f"All ranks on {culprits[0].node} hang"
    names = names_of(culprits)
    return f"{names[0].upper()}{names[1:]} hang{'s' if ranks == 1 else ''}"


def _hang_evidence(now: float, roster: Roster, rank: RankState, how: str) -> Evidence:
    still = now - max(roster.moved_at or roster.started_at, roster.started_at)
    if how == "stopped":
        text, at = (
            f"the process of rank {rank.rank} is in state {rank.stalled}, no progress for {still:.1f} s",
            rank.stalled_since,
        )
    else:
        heard = rank.heard_at if rank.heard_at is not None else roster.started_at
        text = (
            f"rank {rank.rank}: last heartbeat {now - heard:.1f} s ago in phase {rank.phase}, no step for {still:.1f} s"
        )
        at = heard
    last = rank.last
    return Evidence(
        kind="event" if how == "stopped" else "silence", text=text, at=at, rank=rank.rank, node=rank.node,
        step=rank.step if rank.step >= 0 else None, topic=last.topic if last else None,
        partition=last.partition if last else None, offset=last.offset if last else None,
    )  # fmt: skip
