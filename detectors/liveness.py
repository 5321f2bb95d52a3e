"""Silence and ends: hung ranks, lost ranks and nodes, and what a rank's exit says about why."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass

import msgspec

from detectors.clues import Clue, Place, Role, Source, source_of
from detectors.log_rules import Hit, RuleBook
from detectors.roster import NodeState, RankState, Roster
from detectors.verdict import Culprit, Evidence, FaultClass
from ingest.events import RankExited

ABORTED = int(signals.SIGABRT)  # libraries abort when a peer is gone: no cause by itself
INTERRUPTED = int(signals.SIGINT)  # a person's Ctrl-C
TEXT_CHARACTERS_MAX = 300
COMMUNICATION_TYPES = ("DistNetworkError", "DistBackendError", "DistStoreError")
START_FAILURE = "StartFailure"  # the launcher's word for a rank that could not be forked
STOPPED = ("T", "t")


@dataclass(frozen=True, slots=True)
class LivenessConfig:
    """How long silence must last before it means something, in seconds of event time."""

    stopped_no_progress_seconds: float = 1.0
    heartbeat_old_seconds: float = 1.5
    heartbeat_fresh_seconds: float = 1.0
    frozen_seconds: float = 2.0
    frozen_steps: float = 8.0  # times the median step
    after_exit_seconds: float = 3.0  # no hang is called so soon after any exit
    node_silent_seconds: float = 5.0
    all_silent_seconds: float = 10.0
    startup_ceiling_seconds: float = 300.0
    ceiling_seconds: float = 60.0  # of no progress at all, in training
    long_ceiling_seconds: float = 600.0  # while a rank checkpoints or evaluates
    ceiling_steps: float = 10.0  # times the median step, where that is more
    ceiling_longest: float = 3.0  # times the longest step so far, where that is more


def look_for_hang(now: float, roster: Roster, config: LivenessConfig) -> Clue | None:
    """The hang that is there now, if any. Progress, not liveness, is what a job owes."""
    live, median_step = roster.live(), roster.median_step
    if not live or roster.over:
        return None
    if roster.last_exit_at is not None and now < roster.last_exit_at + config.after_exit_seconds:
        return None
    still = now - roster.active_at
    if not roster.trained:
        return _startup(now, roster, live, config) if still >= config.startup_ceiling_seconds else None
    stopped = [rank for rank in live if rank.stalled in STOPPED]
    if stopped and still >= config.stopped_no_progress_seconds:
        since = max(rank.stalled_since for rank in stopped)
        if now - since >= config.stopped_no_progress_seconds:
            return _hang(now, roster, stopped, "stopped", settled=True)
    if still < max(config.frozen_seconds, config.frozen_steps * median_step):
        return None
    silent = _silent(now, roster, live, config)
    if silent:
        one_node = len({rank.node for rank in silent}) == 1
        return _hang(now, roster, silent, "silent", settled=one_node or still >= _ceiling(live, roster, config))
    if still < _ceiling(live, roster, config):
        return None
    odd = _odd(live)
    return _hang(now, roster, odd, "odd" if odd else "frozen", settled=True)


def any_stopped(roster: Roster) -> bool:
    """Whether a launcher sees the process of a live rank stopped."""
    return any(rank.stalled in STOPPED for rank in roster.live())


def look_for_lost_node(now: float, roster: Roster, config: LivenessConfig) -> Clue | None:
    """A node of this attempt whose launcher has fallen silent while others speak, or all of them at once."""
    nodes = _hosts(roster)
    if not nodes or roster.over:
        return None
    ages = {node.node: now - node.heard_at for node in nodes if node.heard_at is not None and not node.ended}
    silent = sorted(name for name, age in ages.items() if age > config.node_silent_seconds)
    fresh = [
        node.node
        for node in roster.nodes.values()
        if node.heard_at is not None and now - node.heard_at <= config.heartbeat_fresh_seconds
    ]
    if not silent or (not fresh and min(ages.values()) <= config.all_silent_seconds):
        return None
    lost = [node for node in nodes if node.node in silent]
    lost.sort(key=lambda node: (node.heard_at or 0.0, node.node))
    first = lost[0]
    assert first.heard_at is not None
    assert first.last is not None
    known = len(lost) == 1 or bool(fresh)
    evidence = tuple(
        Evidence(
            kind="silence", node=node.node, at=node.heard_at or 0.0, topic="events",
            text=f"no heartbeat from the launcher of {node.node} for {now - (node.heard_at or 0.0):.1f} s",
        )
        for node in lost[:4]
    )  # fmt: skip
    names = " and ".join(node.node for node in lost[:4])
    summary = (
        f"{'Nodes' if len(lost) > 1 else 'Node'} {names} {'are' if len(lost) > 1 else 'is'} silent: no launcher"
        f" heartbeat for {now - first.heard_at:.0f} s{'' if known else '; nobody else speaks either'}."
    )
    return Clue(
        kind="node", role="root", fault_class="node_lost", at=first.heard_at, rank=None, node=first.node,
        advice=None if known else "notify",
        source=Source(
            rank=first.last.rank, node=first.node, topic=first.last.topic, sequence=first.last.sequence,
            partition=first.last.partition, offset=first.last.offset, silence=True,
        ),
        evidence=evidence, summary=summary, alone=True, settled=True, key="node",
        culprits=tuple(Culprit(node=node.node) for node in lost) if known else (),
    )  # fmt: skip


def all_speak(now: float, roster: Roster, config: LivenessConfig, *, since: float) -> bool:
    """Whether every node of this attempt has been heard after `since` and speaks now: a paused one goes on."""
    return all(
        node.heard_at is not None and node.heard_at > since and now - node.heard_at <= config.heartbeat_fresh_seconds
        for node in _hosts(roster)
    )


def node_suspect(now: float, roster: Roster, config: LivenessConfig) -> bool:
    """A launcher has missed heartbeats without being lost yet: who waits for a cause should wait for this one too."""
    return any(
        config.heartbeat_old_seconds < now - node.heard_at <= config.node_silent_seconds + 0.5
        for node in _hosts(roster)
        if node.heard_at is not None and not node.ended
    )


def exit_clue(message: RankExited, place: Place | None, roster: Roster, rules: RuleBook) -> Clue | None:
    """What one rank's exit says about the cause; None where it is no fault of anybody."""
    rank = roster.ranks[message.rank]
    interrupted = message.signal == INTERRUPTED or (
        message.error is not None and _bare(message.error.type) == "KeyboardInterrupt"
    )
    if message.stopped_by_launcher or rank.finished or message.exit_code == 0 or interrupted:
        return None
    where = f"Rank {message.rank} on {message.node}"
    step = f" at step {rank.step}" if rank.step >= 0 else " before its first step"
    number = message.signal
    if number is None and message.exit_code is not None and 128 < message.exit_code <= 128 + 64:
        number = message.exit_code - 128  # a shell's way of saying it
    if number is not None:
        weak = number == ABORTED
        text = f"{where} was killed by signal {number}{step}."
        return _exit(message, place, rank, "weak" if weak else "root", "rank_lost", text, text, signal=number)
    role, fault_class, hit, line = _why(message, rules)
    if role == "cascade":
        text = f"{where} lost its peers{step}: {line}"
        return _exit(message, place, rank, "cascade", "unknown", text, text)
    if role == "weak":
        text = f"{where} exited with code {message.exit_code}{step} and said nothing of why."
        return _exit(message, place, rank, "weak", "unknown", text, text)
    text = f"{where} ended with {line}"
    return _exit(message, place, rank, "root", fault_class, text, f"{where} ended{step} with {line}", hit=hit)


def _why(message: RankExited, rules: RuleBook) -> tuple[Role, FaultClass, Hit | None, str]:
    """(role, class, rule hit, the line to show) of an exit with a code: the exception first, then the last lines."""
    error = message.error
    told = f"{error.type}: {error.text}" if error is not None else ""
    last = told.split("\n")[0][:TEXT_CHARACTERS_MAX]
    if error is not None:
        if error.type == START_FAILURE:
            return "root", "start_failure", None, last
        hits = rules.match_record(told)
        root = next((hit for hit in hits if hit.rule.role == "root" and hit.rule.fault_class != "warning"), None)
        if root is not None:
            return "root", root.rule.fault_class, root, last
        if _bare(error.type) in COMMUNICATION_TYPES or any(
            hit.rule.role == "cascade" and hit.rule.fault_class != "storage_error" for hit in hits
        ):
            return "cascade", "unknown", None, last
        return "root", "user_error", None, last
    hits = [hit for text in message.last_lines for hit in rules.match_record(text)]
    root = next((hit for hit in hits if hit.rule.role == "root" and hit.rule.fault_class != "warning"), None)
    if root is not None:
        return "root", root.rule.fault_class, root, root.line[:TEXT_CHARACTERS_MAX]
    cascade = next((hit for hit in hits if hit.rule.role == "cascade"), None)
    if cascade is not None:
        return "cascade", "unknown", None, cascade.line[:TEXT_CHARACTERS_MAX]
    return "weak", "unknown", None, ""


def _bare(name: str) -> str:
    """An exception's name without its module."""
    return name.rsplit(".", 1)[-1]


def _exit(
    message: RankExited,
    place: Place | None,
    rank: RankState,
    role: Role,
    fault_class: FaultClass,
    text: str,
    summary: str,
    *,
    signal: int | None = None,
    hit: Hit | None = None,
) -> Clue:
    source = source_of(message, place)
    evidence = Evidence(
        kind="event", text=text[:TEXT_CHARACTERS_MAX], at=message.at, rank=message.rank, node=message.node,
        rule=hit.rule.id if hit else "", step=rank.step if rank.step >= 0 else None,
        topic=source.topic, partition=source.partition, offset=source.offset,
    )  # fmt: skip
    return Clue(
        kind="exit", role=role, fault_class=fault_class, at=message.at, rank=message.rank, node=message.node,
        source=source, evidence=(evidence,), summary=summary, rule=hit.rule.id if hit else "", signal=signal,
        severity=hit.rule.severity if hit else None, advice=hit.rule.advice if hit else None,
        step=rank.step if rank.step >= 0 else None,
    )  # fmt: skip


def _silent(now: float, roster: Roster, live: list[RankState], config: LivenessConfig) -> list[RankState]:
    """Ranks whose heartbeat stopped in training while their launcher and at least as many peers go on."""
    silent = []
    for rank in live:
        node = roster.node(rank.node)
        if rank.heard_at is None or now - rank.heard_at <= config.heartbeat_old_seconds:
            continue
        speaks = node.heard_at is not None and now - node.heard_at <= config.heartbeat_fresh_seconds
        if speaks and rank.phase in ("train", "collective"):
            silent.append(rank)
    fresh = [
        rank for rank in live if rank.heard_at is not None and now - rank.heard_at <= config.heartbeat_fresh_seconds
    ]
    return silent if fresh and len(fresh) >= len(silent) else []


def _odd(live: list[RankState]) -> list[RankState]:
    """The one rank that is behind all others, or the one that is not in the collective with them."""
    if len(live) < 2:
        return []
    behind = [rank for rank in live if rank.step < max(other.step for other in live)]
    if len(behind) == 1:
        return behind
    away = [rank for rank in live if rank.phase != "collective"]
    return away if not behind and len(away) == 1 else []


def _ceiling(live: list[RankState], roster: Roster, config: LivenessConfig) -> float:
    """The longest that any rank's phase may stand still."""
    seconds = max(_ceiling_of(rank.phase, config) for rank in live)
    return max(seconds, config.ceiling_steps * roster.median_step, config.ceiling_longest * roster.longest_step)


def _ceiling_of(phase: str, config: LivenessConfig) -> float:
    if phase in ("train", "collective"):
        return config.ceiling_seconds
    return config.long_ceiling_seconds if phase in ("checkpoint", "eval") else config.startup_ceiling_seconds


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
    confidence = {"stopped": 1.0, "silent": 0.95, "odd": 0.7}.get(how, 1.0)
    nodes = {rank.node for rank in ranks}
    whole = len(ranks) > 1 and len(nodes) == 1 and len(ranks) == len(roster.ranks_of(ranks[0].node))
    if whole and len(roster.nodes) > 1:
        culprits: tuple[Culprit, ...] = (Culprit(node=ranks[0].node, confidence=confidence),)
        who = f"All ranks on {ranks[0].node} hang"
    else:
        culprits = tuple(Culprit(rank=rank.rank, node=rank.node, confidence=confidence) for rank in ranks)
        who = " and ".join(f"Rank {rank.rank} on {rank.node}" for rank in ranks[:4]) + " hang" + "s" * (len(ranks) == 1)
    step = max((rank.step for rank in roster.live()), default=-1)
    reason = {
        "stopped": "its process is stopped", "silent": "it sends no heartbeats while its peers wait for it",
        "odd": "its peers wait for it",
    }.get(how, "")  # fmt: skip
    summary = (
        f"{who} in step {step}: {reason}." if ranks else f"All ranks stand still in step {step}; nobody stands out."
    )
    return Clue(
        kind="hang", role="root", fault_class="hang", at=onset, rank=witness.rank if ranks else None,
        node=witness.node if ranks else None, source=source, evidence=evidence, summary=summary, alone=True,
        settled=settled, step=step if step >= 0 else None, culprits=culprits, key="hang",
    )  # fmt: skip


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


def _hosts(roster: Roster) -> list[NodeState]:
    """Nodes with ranks of this attempt still at work; a spare's silence is nobody's incident."""
    names = sorted({rank.node for rank in roster.ranks.values() if rank.live})
    return [roster.node(name) for name in names]
