"""The judge: one incident per cause and attempt, roots before those who suffer, revisions under one id."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from detectors.clues import Clue, Condition
from detectors.judge.blame import CLASS_TABLE, LINES, POINTING, Blame, choose, ranks_of
from detectors.judge.foregoing import BEFORE_SECONDS, slowed_by
from detectors.roster import Roster
from detectors.verdict import Verdict

EVIDENCE_MAX = 8


@dataclass(frozen=True, slots=True)
class JudgeConfig:
    """How long an incident waits for a better explanation."""

    root_wait_seconds: float = 3.0  # for a root after ends that only suffer, for an exit after a log line
    root_wait_max_seconds: float = 6.0  # while a node is suspected
    sufferers_wait_seconds: float = 1.75  # before ends that only suffer are spoken of at all
    spread_seconds: float = 1.0  # after an exception: do all ranks have it?
    confirm_seconds: float = 120.0  # a confirmation may still change the class of a settled incident
    join_seconds: float = 3.0  # a second rank of the same node, lost the same way, makes it the node
    apart_seconds: float = 30.0  # a death so long after the numbers went bad is a cause of its own
    reopen_seconds: float = 60.0  # what comes back so soon is the same incident, not a new one
    cool_down_seconds: float = 600.0  # in which a condition may come back `flaps_max` times
    flaps_max: int = 3  # after that it is over only when it has been quiet for `reopen_seconds`
    clues_max: int = 256


class _Incident(msgspec.Struct):
    """A crash-class incident: everything that may explain it, and the verdict as it was last said."""

    verdict: Verdict
    opened_at: float  # when its first clue was heard
    clues: list[Clue]
    settled_at: float | None = None
    kind: str = ""


class _State(msgspec.Struct):
    fatal: _Incident | None = None
    kept: list[Clue] = []  # log lines that explain nothing yet, ends of those who only suffer
    waiting_since: float | None = None  # something has broken, and nobody has said why
    conditions: dict[str, Verdict] = {}
    closed: dict[str, Verdict] = {}  # conditions that ended a short time ago, by key
    reopened: dict[str, list[float]] = {}  # when a condition came back
    ending: dict[str, float] = {}  # conditions that come and go: quiet since
    until: dict[str, float] = {}  # conditions that nobody ends: when they are over, unless they are said again
    ids: list[str] = []
    over: bool = False


class Judge:
    """Takes what the channels say of one attempt and answers with verdict revisions, in a fixed order."""

    def __init__(self, job: str, attempt: int, config: JudgeConfig | None = None) -> None:
        self.job, self.attempt = job, attempt
        self.config = config or JudgeConfig()
        self._state = _State()

    @property
    def fatal_open(self) -> bool:
        """A crash-class incident is open: what else breaks now is its doing."""
        return self._state.fatal is not None

    @property
    def hang_open(self) -> bool:
        fatal = self._state.fatal
        return fatal is not None and fatal.verdict.fault_class == "hang"

    @property
    def silence_open(self) -> bool:
        """A node was called lost because its launcher was silent."""
        fatal = self._state.fatal
        return fatal is not None and fatal.verdict.fault_class == "node_lost" and fatal.kind == "node"

    @property
    def opened_at(self) -> float:
        """When the open crash-class incident was first said."""
        assert self._state.fatal is not None
        return self._state.fatal.opened_at

    @property
    def waiting(self) -> bool:
        """Something has broken, and it is not yet said."""
        return self._state.waiting_since is not None

    @property
    def over(self) -> bool:
        """The attempt's ranks are gone: nothing begins any more."""
        return self._state.over

    @property
    def may_hang(self) -> bool:
        """A hang would be news: nothing is open that explains it."""
        fatal = self._state.fatal
        return fatal is None or fatal.kind in ("hang", "nan")

    @property
    def unsettled(self) -> bool:
        fatal = self._state.fatal
        return fatal is not None and not fatal.verdict.settled

    def open_conditions(self) -> list[str]:
        return sorted(self._state.conditions)

    def opened_by(self, detectors: Collection[str]) -> list[str]:
        """Keys of the open conditions that one of these has said."""
        return [key for key in self.open_conditions() if self._state.conditions[key].detector in detectors]

    def hear(self, now: float, clues: list[Clue], roster: Roster, *, node_suspected: bool = False) -> list[Verdict]:
        """Weigh new clues (and time) and say what changed about the crash-class incident."""
        state = self._state
        self._forget_survived(roster, now)
        verdicts: list[Verdict] = []
        for clue in sorted(clues, key=lambda clue: (clue.at, -1 if clue.rank is None else clue.rank)):
            if self._absorbed(clue, roster):
                continue
            self._part(clue)
            if state.fatal is not None:
                self._add(state.fatal, clue)
            else:
                state.kept = [*state.kept[-(self.config.clues_max - 1) :], clue]
                if state.waiting_since is None and _breaks(clue):
                    state.waiting_since = now
        if state.fatal is None and state.waiting_since is not None and self._ripe(now, node_suspected):
            verdicts.append(self._open(now, state.waiting_since, roster))
        elif state.fatal is not None:
            verdicts += self._weigh(state.fatal, now, roster)
        return verdicts

    def begin(self, now: float, condition: Condition) -> list[Verdict]:
        """A condition begins; nothing while one of its key is open. One that was over for less than
        `reopen_seconds` goes on under its id."""
        state = self._state
        state.ending.pop(condition.key, None)
        if condition.quiet_seconds is not None:
            state.until[condition.key] = now + condition.quiet_seconds
        if condition.key in state.conditions:
            return []
        severity, advice = CLASS_TABLE[condition.fault_class]
        cause = slowed_by(condition, list(state.conditions.values()))
        if cause is not None:
            condition = msgspec.structs.replace(
                condition, summary=f"{condition.summary} The cause may be: {cause.summary}",
                evidence=(*condition.evidence[: EVIDENCE_MAX - 1], *cause.evidence[:1]),
            )  # fmt: skip
        before = state.closed.pop(condition.key, None)
        if before is not None and now - before.at <= self.config.reopen_seconds:
            came_back = state.reopened.get(condition.key, [])
            since = now - self.config.cool_down_seconds
            state.reopened[condition.key] = [*(at for at in came_back if at > since), now]
            verdict = _revise(
                before, now, status="open", severity=condition.severity or severity, culprits=condition.culprits,
                victims=condition.victims, advice=condition.advice or advice, summary=condition.summary,
                first_bad_step=condition.first_bad_step,
                evidence=condition.evidence[:EVIDENCE_MAX], detector=condition.detector,
            )  # fmt: skip
            state.conditions[condition.key] = verdict
            return [verdict]
        verdict = Verdict(
            verdict_id=self._new_id(condition.source.identity(self.job, self.attempt)), revision=0, job=self.job,
            attempt=self.attempt, fault_class=condition.fault_class, severity=condition.severity or severity,
            settled=True, culprits=condition.culprits, victims=condition.victims, onset_at=condition.onset_at, at=now,
            onset_step=condition.onset_step, first_bad_step=condition.first_bad_step,
            advice=condition.advice or advice, summary=condition.summary,
            evidence=condition.evidence[:EVIDENCE_MAX], detector=condition.detector,
        )  # fmt: skip
        state.conditions[condition.key] = verdict
        return [verdict]

    def end(self, now: float, key: str) -> list[Verdict]:
        """A condition is over; one that has come back too often stays open until it has been quiet for a while."""
        state = self._state
        if key not in state.conditions:
            return []
        recent = [at for at in state.reopened.get(key, ()) if at > now - self.config.cool_down_seconds]
        if len(recent) >= self.config.flaps_max and not state.over:
            state.ending.setdefault(key, now)
            return []
        return [self._close(now, key)]

    def tick(self, now: float) -> list[Verdict]:
        """Time passes: what comes and goes is over when it was quiet for long; what was over for long is forgotten."""
        state, wait = self._state, self.config.reopen_seconds
        if state.closed:
            state.closed = {key: verdict for key, verdict in state.closed.items() if now - verdict.at <= wait}
        quiet = {key for key, since in state.ending.items() if now - since > wait}
        quiet |= {key for key, until in state.until.items() if now > until}
        return [self._close(now, key) for key in sorted(quiet)]

    def _close(self, now: float, key: str) -> Verdict:
        state = self._state
        state.ending.pop(key, None)
        state.until.pop(key, None)
        verdict = state.closed[key] = _revise(state.conditions.pop(key), now, status="closed")
        return verdict

    def recovered(self, now: float) -> list[Verdict]:
        """The hang or the silence is over: the job moves again, the launchers speak again."""
        fatal = self._state.fatal
        if fatal is None:
            return []
        self._state.fatal = None
        return [_revise(fatal.verdict, now, status="closed", settled=True)]

    def attempt_over(self, now: float) -> list[Verdict]:
        """All ranks are gone: conditions end; what broke the attempt stays open until another one starts."""
        if self._state.over:
            return []
        self._state.over = True
        return [self._close(now, key) for key in self.open_conditions()]

    def close_all(self, now: float) -> list[Verdict]:
        """A newer attempt has started: everything of this one ends."""
        verdicts = [self._close(now, key) for key in self.open_conditions()]
        if self._state.fatal is not None:
            verdicts.append(_revise(self._state.fatal.verdict, now, status="closed"))
            self._state.fatal = None
        return verdicts

    def to_state(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self._state, str_keys=True)
        return built

    @classmethod
    def from_state(cls, job: str, attempt: int, state: dict[str, Any], config: JudgeConfig | None = None) -> Judge:
        judge = cls(job, attempt, config)
        judge._state = msgspec.convert(state, _State, strict=False)
        return judge

    def _absorbed(self, clue: Clue, roster: Roster) -> bool:
        """What an open incident explains by itself: ends after a hang, silence after a loss; of a settled hang only
        that more ranks than it names hang is news."""
        fatal = self._state.fatal
        if fatal is None:
            return False
        if fatal.verdict.settled and fatal.kind == "hang":
            if clue.kind == "hang":
                named = ranks_of(fatal.verdict.culprits, roster)
                return not (clue.settled and named < ranks_of(clue.culprits or (), roster))
            return clue.kind not in POINTING
        if clue.kind == "hang" and fatal.kind != "hang":
            return not self._apart(fatal, clue)
        return False

    def _part(self, clue: Clue) -> None:
        """Bad numbers do not kill: a death long after them is an incident of its own, theirs stays open beside it."""
        fatal = self._state.fatal
        if fatal is not None and self._apart(fatal, clue):
            self._state.conditions["nan"] = fatal.verdict
            self._state.fatal = None

    def _apart(self, fatal: _Incident, clue: Clue) -> bool:
        if fatal.kind != "nan" or not fatal.verdict.settled or clue.kind == "nan" or clue.role != "root":
            return False
        breaks = clue.kind in ("node", "hang") or clue.signal is not None or clue.alone
        return breaks and clue.at > fatal.verdict.onset_at + self.config.apart_seconds

    def _add(self, fatal: _Incident, clue: Clue) -> None:
        if clue.key:
            fatal.clues = [known for known in fatal.clues if known.key != clue.key]
        if len(fatal.clues) < self.config.clues_max:
            fatal.clues.append(clue)

    def _ripe(self, now: float, node_suspected: bool) -> bool:
        """A cause opens an incident at once. Sufferers alone wait a little: whoever acts on the first word should
        not act on theirs while the launcher of a dead node is only just being missed."""
        state, config = self._state, self.config
        assert state.waiting_since is not None
        if any(_breaks(clue) and clue.role == "root" for clue in state.kept):
            return True
        wait = config.root_wait_max_seconds if node_suspected else config.sufferers_wait_seconds
        return now >= state.waiting_since + wait

    def _open(self, now: float, since: float, roster: Roster) -> Verdict:
        state = self._state
        clues, state.kept, state.waiting_since = state.kept, [], None
        blame = choose(clues, roster, self._before(now))
        verdict = Verdict(
            verdict_id=self._new_id(blame.lead.source.identity(self.job, self.attempt)), revision=0, job=self.job,
            attempt=self.attempt, fault_class=blame.fault_class, severity=blame.severity, settled=False,
            culprits=blame.culprits, victims=blame.victims, onset_at=blame.lead.at, at=now,
            onset_step=blame.lead.step, first_bad_step=blame.lead.first_bad_step, advice=blame.advice,
            summary=blame.summary, evidence=blame.evidence[:EVIDENCE_MAX], detector=blame.detector,
        )  # fmt: skip
        settled = self._settled(blame, since, now, roster)
        verdict = msgspec.structs.replace(verdict, settled=settled)
        state.fatal = _Incident(verdict, since, clues, now if settled else None, blame.lead.kind)
        return verdict

    def _weigh(self, fatal: _Incident, now: float, roster: Roster) -> list[Verdict]:
        old = fatal.verdict
        if fatal.settled_at is not None and now > fatal.settled_at + self.config.confirm_seconds:
            return []
        blame = choose(fatal.clues, roster, self._before(now))
        if old.settled and not self._may_change(fatal, blame, now):
            return []
        settled = old.settled or self._settled(blame, fatal.opened_at, now, roster)
        same = (
            old.settled == settled and old.fault_class == blame.fault_class and old.culprits == blame.culprits
            and old.advice == blame.advice and old.first_bad_step == blame.lead.first_bad_step
            and not _newly_pointed(blame, old)
        )  # fmt: skip
        if same:
            return []
        fatal.kind = blame.lead.kind
        fatal.settled_at = now if settled and fatal.settled_at is None else fatal.settled_at
        fatal.verdict = _revise(
            old, now, fault_class=blame.fault_class, severity=blame.severity, settled=settled,
            culprits=blame.culprits, victims=blame.victims, onset_at=blame.lead.at, onset_step=blame.lead.step,
            first_bad_step=blame.lead.first_bad_step, advice=blame.advice, summary=blame.summary,
            evidence=blame.evidence[:EVIDENCE_MAX], detector=blame.detector,
        )  # fmt: skip
        return [fatal.verdict]

    def _may_change(self, fatal: _Incident, blame: Blame, now: float) -> bool:
        """A settled incident changes for a confirmation or a better line of the same rank, or grows to a whole node."""
        assert fatal.settled_at is not None
        if blame.confirmed and blame.fault_class != fatal.verdict.fault_class:
            return True
        if _newly_pointed(blame, fatal.verdict):
            return True
        return now <= fatal.settled_at + self.config.join_seconds

    def _before(self, now: float) -> list[Verdict]:
        """Conditions that are open, or were a short time ago."""
        state = self._state
        recent = [verdict for verdict in state.closed.values() if now - verdict.at <= BEFORE_SECONDS]
        return [*state.conditions.values(), *recent]

    def _settled(self, blame: Blame, opened_at: float, now: float, roster: Roster) -> bool:
        lead, config = blame.lead, self.config
        waited = now - opened_at
        if lead.role in ("weak", "cascade"):
            return waited >= config.root_wait_seconds
        if lead.kind in ("hang", "node", "nan"):
            return lead.settled
        if lead.kind == "exit" and lead.signal is not None:
            return True
        if blame.fault_class == "user_error":
            everyone = all(rank.gone for rank in roster.ranks.values())
            return everyone or waited >= config.spread_seconds
        if lead.kind == "exit":
            return True
        ranks = roster.ranks_of(lead.node or "") if lead.rank is None else [roster.ranks[lead.rank]]
        return any(rank.gone for rank in ranks) or waited >= config.root_wait_seconds

    def _forget_survived(self, roster: Roster, now: float) -> None:
        """A line whose rank went on for two steps told of something survived; stacks of a moving job tell nothing."""
        state = self._state
        state.kept = [clue for clue in state.kept if self._still_counts(clue, roster, now)]
        if not any(_breaks(clue) for clue in state.kept):
            state.waiting_since = None

    def _still_counts(self, clue: Clue, roster: Roster, now: float) -> bool:
        if clue.kind in POINTING:
            return roster.moved_at is None or roster.moved_at <= clue.at
        if clue.kind not in LINES:
            return True
        going_on = clue.rank is not None and clue.step is not None and roster.ranks[clue.rank].step >= clue.step + 2
        return now <= clue.at + self.config.confirm_seconds and not going_on

    def _new_id(self, identity: str) -> str:
        """`identity`, made unlike every id of this attempt: two findings may begin in one message."""
        name, count = identity, 1
        while name in self._state.ids:
            count += 1
            name = f"{identity}/{count}"
        self._state.ids.append(name)
        return name


def _breaks(clue: Clue) -> bool:
    """It means that something has broken; a line in a rank's output alone does not."""
    return clue.kind not in (*LINES, *POINTING) or clue.alone


def _newly_pointed(blame: Blame, verdict: Verdict) -> bool:
    """Stacks or sequence numbers say now what the verdict does not have yet."""
    if not blame.pointed:
        return False
    told = {entry.text for entry in verdict.evidence}
    return any(entry.kind == "stack" and entry.text not in told for entry in blame.evidence[:EVIDENCE_MAX])


def _revise(verdict: Verdict, now: float, **changes: Any) -> Verdict:
    return msgspec.structs.replace(verdict, revision=verdict.revision + 1, at=now, **changes)
