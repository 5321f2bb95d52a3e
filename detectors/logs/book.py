"""Log records into clues: teardown noise passed over, storms folded, devices and processes mapped to ranks."""

from __future__ import annotations

from typing import Any

import msgspec

from detectors.clues import Clue, Condition, Place, Role, source_of
from detectors.logs.memory import LogMemory
from detectors.logs.progress_lines import parse_progress
from detectors.logs.rule_book import TRACEBACK, Hit, RuleBook, is_handled, strip_prefixes
from detectors.logs.storms import STORM_LINES_MAX, STORM_SECONDS, Folded, LogStorms
from detectors.roster import Roster
from detectors.verdict import Advice, Culprit, Evidence, Verdict
from ingest.events import Logs

TEARDOWN_RECORDS = 10  # how far behind its announcement the error of a teardown may stand
ANNOUNCED_SECONDS = 1.0  # a traceback so soon after "retrying" is the one that is retried
ANNOUNCEMENTS_MAX = 1_024
TEXT_CHARACTERS_MAX = 400
STEPS_MAX = 4_096  # ranks whose steps are known from their lines alone
GOES_ON = ("retry", "again", "ignor", "skip", "handled", "attempt", "continu", "fall")
WARNING_SECONDS = 3_600.0  # after its last line a warning is over
AGAIN_KINDS = ("xid_app", "gpu_ecc_contained")  # the first asks for little, the second for the node


class _State(msgspec.Struct):
    teardown: dict[str, int] = {}
    announced: dict[str, float] = {}
    storms: LogStorms = msgspec.field(default_factory=LogStorms)
    steps: dict[int, int] = {}
    records: int = 0
    hits: dict[str, int] = {}


class LogBook:
    """Reads one attempt's log messages."""

    def __init__(self, rules: RuleBook, memory: LogMemory | None = None) -> None:
        self.rules = rules
        self.memory = memory or LogMemory()
        self._state = _State()

    @property
    def hits(self) -> dict[str, int]:
        """How often each rule has matched."""
        return dict(self._state.hits)

    def successor(self) -> LogBook:
        """The book of the job's next attempt: it knows what the job's lines look like, and which GPUs were named."""
        return LogBook(self.rules, self.memory)

    def read(self, message: Logs, place: Place | None, roster: Roster) -> tuple[list[Clue], list[Condition]]:
        """Clues for the judge, and warnings to open, of one batch."""
        clues: list[Clue] = []
        warnings: list[Condition] = []
        producer = f"{message.rank}/{message.node}"
        for line in message.lines:
            self._state.records += 1
            self.memory.remember(line.text, line.at, message, place)
            self._follow(line.text, message.rank, roster)
            for hit in self._hits(line.text, f"{producer}/{line.stream}", line.at):
                if hit.rule.weak:
                    continue
                storm = self._storm(hit, message, place, line.at)
                warnings += [storm] if storm is not None else []
                device = hit.pci if hit.xid is None else f"{hit.pci}/{hit.xid}"
                told = self._state.storms.tell(
                    hit.rule.id, producer, device, line.at, suffers=hit.rule.role == "cascade"
                )  # fmt: skip
                if told is None:
                    continue
                if hit.rule.fault_class == "warning":
                    if hit.rule.role == "root":
                        warnings.append(_warning(hit, message, place, line.at, told))
                else:
                    clues.append(self._clue(hit, message, place, line.at, roster, told))
        return clues, warnings

    def support(self, verdict: Verdict) -> Verdict:
        """`verdict` with the lines its culprits said for the first time just before it."""
        return self.memory.support(verdict)

    def to_state(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self._state, str_keys=True)
        return {**built, "memory": self.memory.to_state()}

    @classmethod
    def from_state(cls, state: dict[str, Any], rules: RuleBook) -> LogBook:
        book = cls(rules, LogMemory.from_state(state.get("memory", {})))
        book._state = msgspec.convert(state, _State, strict=False)
        return book

    def _hits(self, text: str, stream: str, at: float) -> list[Hit]:
        state = self._state
        if self.rules.begins_teardown(text):
            state.teardown[stream] = TEARDOWN_RECORDS
            return []
        announced = state.announced.pop(stream, None)
        if "\n" not in text:
            lower = text[:TEXT_CHARACTERS_MAX].lower()
            if any(word in lower for word in GOES_ON) and is_handled(lower):
                if len(state.announced) >= ANNOUNCEMENTS_MAX:
                    del state.announced[next(iter(state.announced))]
                state.announced[stream] = at
        elif announced is not None and at <= announced + ANNOUNCED_SECONDS and TRACEBACK in text:
            return []
        hits = self.rules.match_record(text)
        left = state.teardown.get(stream, 0)
        if left:
            state.teardown[stream] = 0 if hits else left - 1
            if hits:
                return []
        for hit in hits:
            state.hits[hit.rule.id] = state.hits.get(hit.rule.id, 0) + 1
        return hits

    def _follow(self, text: str, rank: int, roster: Roster) -> None:
        """A rank that sends no metrics tells its step in its progress lines."""
        known = roster.ranks.get(rank)
        if known is None or known.step >= 0 or (rank not in self._state.steps and len(self._state.steps) >= STEPS_MAX):
            return
        progress = parse_progress(strip_prefixes(text)) if "\n" not in text else None
        if progress is not None and progress.step is not None:
            self._state.steps[rank] = progress.step

    def _storm(self, hit: Hit, message: Logs, place: Place | None, at: float) -> Condition | None:
        """What so many lines of one device in an hour mean, where the rule says that they mean something."""
        if hit.rule.storm is None:
            return None
        key = f"{hit.rule.id}/{message.node}/{hit.pci}"
        if not self._state.storms.is_storm(key, at):
            return None
        device = f" of {hit.pci}" if hit.pci else ""
        return Condition(
            key=f"storm/{key}", fault_class=hit.rule.storm, culprits=(Culprit(node=message.node, confidence=0.7),),
            victims=0, onset_at=at, onset_step=None, source=source_of(message, place),
            summary=f"Node {message.node} said more than {STORM_LINES_MAX} times in an hour{device}: "
            f"{hit.line.strip()[:TEXT_CHARACTERS_MAX]}",
            evidence=(_evidence(hit, message, place, at, message.rank if message.rank >= 0 else None, None),),
            detector=f"rules/{hit.rule.id}", quiet_seconds=STORM_SECONDS,
        )  # fmt: skip

    def _clue(self, hit: Hit, message: Logs, place: Place | None, at: float, roster: Roster, told: Folded) -> Clue:
        rule, rank = hit.rule, message.rank if message.rank >= 0 else _rank_of(hit, message.node, roster)
        where = f"Rank {message.rank} on {message.node}" if message.rank >= 0 else f"Node {message.node}"
        role: Role = "root" if rule.role == "root" else "confirm" if rule.role == "confirm" else "cascade"
        # a kernel line is about its node unless it names the process of a rank
        about = message.rank if message.rank >= 0 else rank if hit.pid is not None and not hit.pci else None
        advice, culprits, more = self._again(hit, message.node, at)
        return Clue(
            kind="log", role=role, fault_class=rule.fault_class, at=at, rank=about, node=message.node,
            source=source_of(message, place), evidence=(_evidence(hit, message, place, at, rank, told),),
            summary=f"{where} said{more}: {hit.line.strip()[:TEXT_CHARACTERS_MAX]}", rule=rule.id,
            severity=rule.severity, advice=advice, alone=rule.alone and role == "root", culprits=culprits,
            step=self._step_of(rank, message.node, roster),
        )  # fmt: skip

    def _step_of(self, rank: int | None, node: str, roster: Roster) -> int | None:
        """The step that a rank is in; of a whole node the one that all its ranks have reached."""
        ranks = roster.ranks_of(node) if rank is None else [roster.ranks[rank]] if rank in roster.ranks else []
        reached = min((known.step for known in ranks if known.step >= 0), default=None)
        return reached if reached is not None else self._state.steps.get(-1 if rank is None else rank)

    def _again(self, hit: Hit, node: str, at: float) -> tuple[Advice, tuple[Culprit, ...] | None, str]:
        """(advice, culprits, words): what would be the program's fault is the GPU's where it alone has it twice."""
        if hit.rule.kind not in AGAIN_KINDS or not hit.pci:
            return hit.rule.advice, None, ""
        times, others = self.memory.again(node, hit.pci, at)
        if times < 2 or (others and hit.rule.kind == "xid_app"):
            return hit.rule.advice, None, ""
        return "restart_exclude_node", (Culprit(node=node, confidence=0.8),), f" for the {times}. time within a day"


def _warning(hit: Hit, message: Logs, place: Place | None, at: float, told: Folded) -> Condition:
    rank = message.rank if message.rank >= 0 else None
    return Condition(
        key=f"warning/{hit.rule.id}/{message.node}", fault_class="warning",
        culprits=(Culprit(rank=rank, node=message.node, confidence=0.5),), victims=0, onset_at=at, onset_step=None,
        summary=f"Node {message.node} said: {hit.line.strip()[:TEXT_CHARACTERS_MAX]}",
        evidence=(_evidence(hit, message, place, at, rank, told),), source=source_of(message, place),
        detector=f"rules/{hit.rule.id}", severity=hit.rule.severity, advice=hit.rule.advice,
        quiet_seconds=WARNING_SECONDS,
    )  # fmt: skip


def _evidence(
    hit: Hit, message: Logs, place: Place | None, at: float, rank: int | None, told: Folded | None
) -> Evidence:
    text = hit.line.strip()[:TEXT_CHARACTERS_MAX]
    if told is not None and told.times > 1:
        of = f", of {told.producers} ranks or nodes" if told.producers > 1 else ""
        text += f" (the {told.times}. such line in {at - told.first_at:.0f} s{of})"
    return Evidence(
        kind="log", text=text, at=at, rank=rank, node=message.node, rule=hit.rule.id, topic="logs",
        partition=None if place is None else place.partition, offset=None if place is None else place.offset,
    )  # fmt: skip


def _rank_of(hit: Hit, node: str, roster: Roster) -> int | None:
    """The rank on `node` whose device or process the line names."""
    for rank in roster.ranks_of(node):
        if hit.pci and rank.pci_address and _one_device(hit.pci, rank.pci_address):
            return rank.rank
        if hit.pid is not None and rank.pid == hit.pid:
            return rank.rank
    return None


def _one_device(pci: str, address: str) -> bool:
    """`0000:3b:00` and `00000000:3B:00.0` are one; the domain counts where it is told, for a node may have a GPU at
    01:00 of each of its domains."""
    ours, theirs = (name.lower().partition(".")[0].split(":") for name in (pci, address))
    domains = [name[0].lstrip("0") for name in (ours, theirs) if len(name) == 3]
    return ours[-2:] == theirs[-2:] and len(set(domains)) <= 1
