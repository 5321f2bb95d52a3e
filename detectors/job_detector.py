"""One job's detector: messages in their merged order go in, verdict revisions come out on a grid of event time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy.typing as npt

from detectors.attempt import BY_STEPS, Attempt, part_of
from detectors.channel import Ended
from detectors.clues import Clue, Condition, Place
from detectors.config import DetectorConfig
from detectors.ensemble.ensemble import Ensemble, EnsembleRefused
from detectors.ensemble.watch import Seen, Watch
from detectors.job.numbers import JobChannel
from detectors.judge.judge import Judge
from detectors.logs.book import LogBook
from detectors.logs.rule_book import RuleBook
from detectors.merge import Merged
from detectors.ranks.channel import RankChannel
from detectors.ranks.finding import Finding
from detectors.ranks.findings import condition_of
from detectors.roster import Roster
from detectors.silence.hang import any_stopped, look_for_hang, look_for_stopped
from detectors.silence.liveness import all_speak, exit_clue, look_for_lost_node, node_suspect, notice_clue
from detectors.step_block import StepBlock
from detectors.steps import StepMatrix
from detectors.verdict import Verdict
from ingest.events import AttemptStarted, FaultInjected, Logs, Message, Metrics, NodeHeartbeat, RankExited, StopNotice

TICK_SECONDS = 0.25
GAP_TICKS_MAX = 2400  # of a longer silence only the end is looked at
CLOCK_STEP_SECONDS = 5.0  # no node is lost by event time that has not passed
BESIDE = ("warning/", "storm/")  # conditions that say nothing about timings
STATE_VERSION = 3


class Counts(msgspec.Struct):
    """What a detector has seen, for its service's metrics."""

    messages: int = 0
    older_attempts: int = 0
    late: int = 0
    steps: int = 0
    verdicts: int = 0


class JobDetector:
    """`observe` in merged order, then `advance` to the watermark. What comes out depends only on the messages and
    the times of the ticks, which lie on a grid: live, after a restart and in a replay it is the same."""

    def __init__(
        self,
        job: str,
        config: DetectorConfig | None = None,
        rules: RuleBook | None = None,
        ensemble: Ensemble | None = None,
        *,
        trusted: Callable[[float], bool] | None = None,
    ) -> None:
        """`trusted`: whether what happened at a time may be learned from, where somebody knows better than we."""
        self.job = job
        self.config = config or DetectorConfig()
        self.rules = rules or RuleBook.shipped()
        self._rules_next: RuleBook | None = None
        self.ensemble = ensemble or Ensemble(self.config.ensemble)
        self._trusted = trusted
        self.counts = Counts()
        self._attempt: Attempt | None = None
        self._tick: int | None = None
        self._taken_at: float | None = None  # the bus's time of the last message before which ticks were run
        self._out: list[Verdict] = []

    @property
    def attempt(self) -> int | None:
        return self._attempt.roster.attempt if self._attempt else None

    @property
    def roster(self) -> Roster | None:
        """Who is who in the current attempt; read only."""
        return self._attempt.roster if self._attempt else None

    def limits(self) -> tuple[str, ...]:
        """What detection cannot do for this job now, in sentences."""
        notes = []
        attempt = self._attempt
        if attempt is not None and attempt.roster.size == 1:
            notes.append("peer comparison is off: the job has one rank")
        elif attempt is not None and attempt.channel is not None and attempt.channel.peerless:
            alone = attempt.channel.peerless
            notes.append(
                f"peer comparison is off for {len(alone)} ranks that have a role of their own, rank {alone[0]} first;"
                " give the ranks that do the same work the same role"
            )
        if self.ensemble.reason:
            notes.append(self.ensemble.reason)
        return tuple(notes)

    def ensemble_level(self, rank: int, fault_class: str) -> tuple[float, float] | None:
        """How far the ensemble's evidence against a rank has come, and how far it must; in decades."""
        watch = self._attempt.watch if self._attempt is not None else None
        return None if watch is None else watch.level_of(rank, fault_class)

    def observe(self, message: Message, place: Place | None = None) -> None:
        """Take in one message. Ticks that lie before it happen first, so that no tick sees what comes after it."""
        kind = type(message)
        if kind is FaultInjected or message.job != self.job:
            return
        self.counts.messages += 1
        if self._tick is not None:
            self.counts.late += message.at <= self._tick * TICK_SECONDS
            if message.at >= (self._tick + 1) * TICK_SECONDS:
                self._run_ticks(message.at, before=True, taken_at=None if place is None else place.appended_at)
        attempt = self._attempt
        if attempt is not None and message.attempt < attempt.roster.attempt:
            self.counts.older_attempts += 1
            if isinstance(message, NodeHeartbeat):  # a launcher without ranks beats for no attempt, and lives
                attempt.roster.beat(message, place)
            return
        if attempt is None or message.attempt > attempt.roster.attempt:
            attempt = self._begin_attempt(message)
        roster = attempt.roster
        roster.observe(message, place)
        for channel in attempt.listening.get(kind, ()):
            channel.observe(message, place, roster)
        if isinstance(message, Metrics):
            if message.rank >= 0:
                attempt.numbers.observe(message, place)
                (attempt.matrix or attempt.begin_steps(self.ensemble, message.at)).add(message, place)
        elif isinstance(message, Logs):
            clues, warnings = attempt.book.read(message, place, attempt.roster)
            attempt.clues += clues
            attempt.warnings += warnings
        elif isinstance(message, RankExited) and message.rank >= 0:
            clue = exit_clue(message, place, attempt.roster, self.rules)
            attempt.clues += [clue] if clue is not None else []
        elif isinstance(message, StopNotice):
            attempt.clues.append(notice_clue(message, place))

    def observe_all(self, batch: Iterable[Merged]) -> None:
        """`observe` of one after another; quicker for what nearly all of them are, metrics of ranks between ticks."""
        rest = iter(batch)
        following = next(rest, None)
        while following is not None:
            self.observe(following.message, following.place)
            following = self._observe_metrics(rest)

    def _observe_metrics(self, rest: Iterator[Merged]) -> Merged | None:
        """Take in metrics of this attempt's ranks up to the next tick; returns the first message that is none."""
        attempt, tick, counts = self._attempt, self._tick, self.counts
        if attempt is None or attempt.matrix is None or tick is None:
            return next(rest, None)
        roster, numbers, matrix = attempt.roster, attempt.numbers, attempt.matrix
        listening, current = attempt.listening.get(Metrics, ()), roster.attempt
        after, before = tick * TICK_SECONDS, (tick + 1) * TICK_SECONDS
        for merged in rest:
            message, place = merged.message, merged.place
            if type(message) is not Metrics or not after < message.at <= before or message.rank < 0:
                return merged
            if message.attempt != current or message.job != self.job:
                return merged
            counts.messages += 1
            if message.at == before and place is not None and place.appended_at is not None:
                self._taken_at = place.appended_at  # the tick that is due then comes after it
            roster.heard(message, place)
            for channel in listening:
                channel.observe(message, place, roster)
            numbers.observe(message, place)
            matrix.add(message, place)
        return None

    def observe_block(self, block: StepBlock) -> None:
        """`observe` of each message that the block stands for, in the order of its ranks; much quicker where a whole
        job trains."""
        if self._tick is not None and block.at >= (self._tick + 1) * TICK_SECONDS:
            self._run_ticks(block.at, before=True)
        if self._tick is None or self._attempt is None or not self._attempt.observe_block(block):
            for message in block.messages():
                self.observe(message)
            return
        self.counts.messages += len(block.ranks)
        self.counts.late += len(block.ranks) * (block.at <= self._tick * TICK_SECONDS)

    def use_rules(self, rules: RuleBook) -> None:
        """Other log rules, from the next tick on."""
        self._rules_next = rules

    def advance(self, watermark: float | None, taken_at: float | None = None) -> list[Verdict]:
        """Everything up to `watermark`, by the bus's clock up to `taken_at`, has been observed: run the ticks up to it
        and hand out what they said."""
        if watermark is not None:
            self._run_ticks(watermark, before=False, taken_at=taken_at)
        out, self._out = self._out if self._attempt is None else self._attempt.roster.owned(self._out), []
        self.counts.verdicts += len(out)
        return out

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """State between two calls of `advance`: JSON-able fields, and arrays for an npz file."""
        assert not self._out
        arrays: dict[str, npt.NDArray[Any]] = {}
        ensemble, parts = self.ensemble.to_state()
        arrays |= {f"ensemble.{name}": array for name, array in parts.items()}
        state: dict[str, Any] = {
            "version": STATE_VERSION, "job": self.job, "tick": self._tick, "ensemble": ensemble,
            "counts": msgspec.to_builtins(self.counts), "attempt": None, "taken_at": self._taken_at,
        }  # fmt: skip
        attempt = self._attempt
        if attempt is None:
            return state, arrays
        held, parts = attempt.to_state()
        arrays |= parts
        state["attempt"] = held
        return state, arrays

    @classmethod
    def from_state(
        cls,
        job: str,
        config: DetectorConfig | None,
        rules: RuleBook | None,
        state: dict[str, Any],
        arrays: Mapping[str, npt.NDArray[Any]],
    ) -> JobDetector:
        """A detector that goes on where `to_state` stopped. Raises ValueError for a state of another version."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"this detection state has version {state.get('version')!r}, this program reads {STATE_VERSION}; "
                "remove it, and detection starts from the stored offsets"
            )
        detector = cls(job, config, rules)
        detector.counts = msgspec.convert(state["counts"], Counts)
        detector._tick, detector._taken_at = state["tick"], state.get("taken_at")
        try:
            detector.ensemble = Ensemble.from_state(
                state["ensemble"], part_of(arrays, "ensemble."), detector.config.ensemble
            )
        except EnsembleRefused:
            detector.ensemble = Ensemble(detector.config.ensemble)  # the rules go on; it is learned anew
        held = state["attempt"]
        if held is not None:
            detector._attempt = detector._restore(held, arrays)
        return detector

    def _restore(self, held: dict[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Attempt:
        config = self.config
        roster = msgspec.convert(held["roster"], Roster, strict=False)
        attempt = Attempt(self.job, roster, config, LogBook.from_state(held["book"], self.rules))
        attempt.numbers = JobChannel.from_state(held["numbers"], config.job)
        attempt.judge = Judge.from_state(self.job, roster.attempt, held["judge"], config.judge)
        attempt.clues = msgspec.convert(held["clues"], list[Clue])
        attempt.warnings = msgspec.convert(held["warnings"], list[Condition])
        for name, channel in attempt.channels.items():
            if name in held["channels"]:  # a channel that is newer than the state begins anew
                channel.load_state(held["channels"][name], part_of(arrays, f"channels.{name}."))
        if held["matrix"] is not None:
            attempt.matrix = StepMatrix.from_state(held["matrix"], part_of(arrays, "matrix."), config.steps)
            attempt.channel = RankChannel.from_state(
                attempt.matrix.ranks, held["nodes"], held["channel"], part_of(arrays, "channel."), config.rank
            )
            attempt.watch = Watch(self.ensemble, attempt.matrix.ranks, held["nodes"])
            if "watch" in held:
                attempt.watch.load_state(held["watch"], part_of(arrays, "watch."))
        return attempt

    def _begin_attempt(self, message: Message) -> Attempt:
        """A newer attempt: whatever is open of the old one ends, and nothing of it is carried over."""
        started = message.at
        roster = Roster(attempt=message.attempt, started_at=started)
        if self._attempt is not None:
            self._out += self._attempt.judge.close_all(message.at)
            roster.clocks = self._attempt.roster.clocks  # of the nodes, which outlive attempts
        book = self._attempt.book.successor() if self._attempt is not None else LogBook(self.rules)
        self._attempt = Attempt(self.job, roster, self.config, book)
        if self._tick is None or isinstance(message, AttemptStarted):
            self._tick = max(self._tick or 0, math.floor(started / TICK_SECONDS))
        return self._attempt

    def _run_ticks(self, until: float, *, before: bool, taken_at: float | None = None) -> None:
        """Run the ticks up to `until` (not `until` itself where `before`). `taken_at`: the bus's time of what comes
        then; where less of that has passed, a producer's clock has stepped, and nobody was silent meanwhile."""
        if self._tick is None or until < (self._tick + 1) * TICK_SECONDS:
            return
        last = math.ceil(until / TICK_SECONDS) - 1 if before else math.floor(until / TICK_SECONDS)
        if taken_at is not None:
            leap = until - self._tick * TICK_SECONDS - max(0.0, taken_at - (self._taken_at or 0.0))
            self._taken_at = taken_at
            if leap > CLOCK_STEP_SECONDS:
                self._tick = last
                if self._attempt is not None:
                    self._attempt.roster.leap(leap)
        if last - self._tick > GAP_TICKS_MAX:
            self._look(self._tick + 1)
            self._tick = last - GAP_TICKS_MAX
        while self._tick < last:
            self._tick += 1
            self._look(self._tick)

    def _look(self, tick: int) -> None:
        """One tick: close steps, look for silence, let the judge weigh it."""
        if self._rules_next is not None:
            self._swap_rules(self._rules_next)
        attempt, now, told_before = self._attempt, tick * TICK_SECONDS, len(self._out)
        if attempt is None:
            return
        judge, roster, config = attempt.judge, attempt.roster, self.config.liveness
        findings = self._score(attempt, now)
        clues, attempt.clues = attempt.clues, []
        warnings, attempt.warnings = attempt.warnings, []
        told = [thing for channel in attempt.channels.values() for thing in channel.look(now, roster)]
        clues += [thing for thing in told if isinstance(thing, Clue)]
        numbers = attempt.numbers.look(now, roster)
        clues += [numbers] if numbers is not None else []
        moved = roster.moved_at is not None and judge.hang_open and roster.moved_at > judge.opened_at
        if moved and not any_stopped(roster):  # peers may still end the step they were in
            self._out += judge.recovered(now)
        if judge.silence_open and all_speak(now, roster, config, since=judge.opened_at):
            self._out += judge.recovered(now)
        if judge.may_hang:
            hang = look_for_hang(now, roster, config)
            clues += [hang] if hang is not None else []
        lost = look_for_lost_node(now, roster, config)
        clues += [lost] if lost is not None else []
        if clues or judge.fatal_open or judge.waiting:
            self._out += judge.hear(now, clues, roster, node_suspected=node_suspect(now, roster, config))
        for finding in findings:
            self._out += self._say(attempt, finding, now)
        told += attempt.watch.take() if attempt.watch is not None else []
        for warning in warnings:
            self._out += judge.begin(now, warning)
        for thing in told:
            if isinstance(thing, Ended):
                self._out += judge.end(now, thing.key)
            elif isinstance(thing, Condition) and not judge.over:
                self._out += judge.begin(now, thing)
        for stopped in look_for_stopped(now, roster, config, judge.open_conditions()):
            self._out += judge.end(now, stopped) if isinstance(stopped, str) else judge.begin(now, stopped)
        self._out += judge.tick(now)
        if roster.over:
            self._out += judge.attempt_over(now)
        self._out[told_before:] = [attempt.book.support(verdict) for verdict in self._out[told_before:]]

    def _swap_rules(self, rules: RuleBook) -> None:
        self.rules, self._rules_next = rules, None
        if self._attempt is not None:
            self._attempt.book.rules = rules

    def _score(self, attempt: Attempt, now: float) -> list[Finding]:
        """Close what can be closed, score it, and let the models learn from what is clean."""
        if attempt.counts_anew:
            ended = attempt.judge.opened_by(BY_STEPS)
            self._out += [said for key in ended for said in attempt.judge.end(now, key)]
            attempt.begin_steps(self.ensemble, now)
        matrix, channel, watch = attempt.matrix, attempt.channel, attempt.watch
        if matrix is None or channel is None or watch is None:
            return []
        found: list[Finding] = []
        judge = attempt.judge
        if attempt.roster.roles_told > channel.roles_told:
            roles = [attempt.roster.ranks[rank].role for rank in channel.ranks]
            channel.give_roles(roles, attempt.roster.roles_told)
        live = attempt.roster.live_numbers() if matrix.may_close else set()
        for step in matrix.close(now, live):
            self.counts.steps += 1
            for watching in attempt.channels.values():
                watching.closed(step, matrix, attempt.roster)
            found += channel.score(matrix, step)
            busy = [key for key in judge.open_conditions() if not key.startswith(BESIDE)]
            broken = judge.fatal_open or judge.waiting or judge.over
            quiet = not (busy or broken or found or channel.anomalous or matrix.is_apart(step))
            quiet = quiet and (self._trusted is None or self._trusted(now))
            if not broken:
                watch.closed(Seen(step, matrix, channel, attempt.roster, busy, quiet))
        for step in matrix.take_revised():
            found += channel.rescore(matrix, step)
        return found

    def _say(self, attempt: Attempt, finding: Finding, now: float) -> list[Verdict]:
        matrix, channel, watch = attempt.matrix, attempt.channel, attempt.watch
        assert matrix is not None
        assert channel is not None
        assert watch is not None
        if not finding.open:
            watch.ends(finding)
            return attempt.judge.end(now, f"{finding.kind}/{finding.subject}")
        if attempt.judge.over:
            return []
        support = watch.support(finding, matrix, channel)
        if not watch.begins(finding, support):
            return []
        return attempt.judge.begin(now, condition_of(finding, matrix, attempt.roster, support))
