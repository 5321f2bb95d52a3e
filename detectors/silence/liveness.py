"""Ends: lost nodes, and what a rank's exit says about why."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass

from detectors.clues import Clue, Place, Role, Source, source_of
from detectors.logs.rule_book import Hit, RuleBook
from detectors.roster import NodeState, RankState, Roster
from detectors.verdict import Culprit, Evidence, FaultClass
from ingest.events import RankExited, StopNotice

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
    heartbeat_gaps: float = (
        1.5  # and so many times the longest gap between two messages that this job has shown of late
    )
    heartbeat_gaps_seconds_max: float = 10.0  # which is not waited for beyond this
    frozen_seconds: float = 2.0
    frozen_steps: float = 8.0  # times the median step
    after_exit_seconds: float = 3.0  # no hang is called so soon after any exit
    node_silent_seconds: float = 5.0
    all_silent_seconds: float = 10.0
    startup_ceiling_seconds: float = 300.0
    ceiling_seconds: float = 60.0  # of no progress at all, in training
    long_ceiling_seconds: float = 600.0  # while a rank checkpoints or evaluates
    ceiling_steps: float = 10.0  # times the median step, where that is more
    ceiling_longest: float = 3.0  # times the longest step, or the longest such phase, where that is more
    stopped_alone_seconds: float = 3.0  # a stopped process that nobody waits for is warned of after this
    gpu_fresh_seconds: float = 15.0  # how old a GPU's last sample may be


def look_for_lost_node(now: float, roster: Roster, config: LivenessConfig) -> Clue | None:
    """A node of this attempt whose launcher has fallen silent while others speak, or all of them at once."""
    heard = (node.heard_at for node in roster.nodes.values() if node.heard_at is not None)
    if all(now - at <= config.node_silent_seconds for at in heard):
        return None
    nodes = _hosts(roster)
    if not nodes or roster.over:
        return None
    ages = {node.node: now - node.heard_at for node in nodes if node.heard_at is not None and not node.ended}
    silent = sorted(name for name, age in ages.items() if age > config.node_silent_seconds)
    silent = [name for name in silent if not _ranks_speak(now, roster, name, config)]
    fresh = [
        node.node
        for node in roster.nodes.values()
        if node.heard_at is not None and now - node.heard_at <= config.heartbeat_fresh_seconds
    ]
    if fresh:  # whom the bus still hears is not gone: its clock, or that of who seems to speak alone, has stepped
        silent = [name for name in silent if not _on_the_bus(roster, name, config)]
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


def notice_clue(message: StopNotice, place: Place | None) -> Clue:
    """A node that goes on purpose: nobody's fault, and the reason of all that its peers say afterwards."""
    source = source_of(message, place)
    text = f"Node {message.node} is taken away: {message.reason or 'its launcher was told to stop'}."
    evidence = Evidence(
        kind="event", text=text, at=message.at, node=message.node, topic=source.topic, partition=source.partition,
        offset=source.offset,
    )  # fmt: skip
    return Clue(
        kind="node", role="root", fault_class="preempted", at=message.at, rank=None, node=message.node,
        source=source, evidence=(evidence,), summary=text, alone=True, settled=True, key=f"notice/{message.node}",
        culprits=(Culprit(node=message.node),),
    )  # fmt: skip


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
        root = _root(hits)
        if root is not None:
            return "root", root.rule.fault_class, root, last
        if _bare(error.type) in COMMUNICATION_TYPES or any(
            hit.rule.role == "cascade" and hit.rule.fault_class != "storage_error" for hit in hits
        ):
            told_with = "\n".join((error.traceback, *message.last_lines))  # the peer may be a process of its own
            root = _root(rules.match_record(told_with))
            if root is not None:
                return "root", root.rule.fault_class, root, last
            return "cascade", "unknown", None, last
        return "root", "user_error", None, last
    hits = [hit for text in message.last_lines for hit in rules.match_record(text)]
    root = _root(hits)
    if root is not None:
        return "root", root.rule.fault_class, root, root.line[:TEXT_CHARACTERS_MAX]
    cascade = next((hit for hit in hits if hit.rule.role == "cascade"), None)
    if cascade is not None:
        return "cascade", "unknown", None, cascade.line[:TEXT_CHARACTERS_MAX]
    return "weak", "unknown", None, ""


def _root(hits: list[Hit]) -> Hit | None:
    """The first hit that says why; not one that matches any exception."""
    told = (hit for hit in hits if hit.rule.role == "root" and not hit.rule.weak)
    return next((hit for hit in told if hit.rule.fault_class != "warning"), None)


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


def _hosts(roster: Roster) -> list[NodeState]:
    """Nodes with ranks of this attempt still at work; a spare's silence is nobody's incident."""
    names = sorted({rank.node for rank in roster.ranks.values() if rank.live})
    return [roster.node(name) for name in names]


def _ranks_speak(now: float, roster: Roster, node: str, config: LivenessConfig) -> bool:
    """A rank of the node has been heard of late, and ranks speak through their launcher: only heartbeats are lost."""
    since = now - config.node_silent_seconds / 2
    return any(rank.node == node and (rank.heard_at or 0.0) >= since for rank in roster.ranks.values())


def _on_the_bus(roster: Roster, node: str, config: LivenessConfig) -> bool:
    """The bus has taken a heartbeat of the node about as lately as one of anybody's, whatever time it bears."""
    taken_at = roster.node(node).taken_at
    return taken_at is not None and roster.bus_at - taken_at <= config.heartbeat_old_seconds
