"""What people are told of an incident: which states are worth a word, how loud, and how often."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import quote

import msgspec

from recovery.action import Incident
from recovery.incident import TERMINAL, State

Level = Literal["info", "warning", "page"]
LEVELS: tuple[Level, ...] = get_args(Level)
REMEMBERED_MAX = 10_000  # incidents, and stories of the cool-down

# State: how loud, and what it means. A state that is not here is on the way to one that is.
TOLD: Mapping[State, tuple[Level, str]] = {
    "notified": ("warning", "nothing is done by itself"),
    "awaiting_approval": ("page", "a plan waits for approval"),
    "held": ("page", "held, a person's turn"),
    "fence_failed": ("page", "ranks of the old attempt may still live, nothing is started"),
    "blind": ("page", "its backend does not answer, nothing is done"),
    "waiting_capacity": ("warning", "too few nodes"),
    "stopping": ("info", "is stopped for a restart"),
    "stopped": ("page", "stopped for good"),
    "gave_up": ("page", "stopped for good, its restarts are used up"),
    "resolved": ("info", "resolved"),
    "relapsed": ("info", "failed again after the restart"),
    "superseded": ("info", "overtaken by another incident or attempt"),
    "ignored": ("info", "nothing is to be done"),
}
CLOSED = TERMINAL - {"stopped", "gave_up"}  # these two end the incident, and a person's work begins


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that people are told; as JSON it is what a webhook and a command get."""

    notice_id: str  # of one transition of one incident: whoever gets it twice can tell
    level: Level
    job: str
    attempt: int
    incident_id: str
    state: str  # of recovery.incident.STATES; "test" for a test
    closed: bool  # nothing is left to do
    fault_class: str
    culprits: tuple[str, ...]  # "rank 3 on n1"
    title: str
    text: str
    plan_hash: str  # to approve; empty where nothing is proposed
    link: str  # the incident in the console
    opened_at: float
    at: float
    like_it: int = 0  # notices of the same story that the cool-down has kept back before this one
    lost_before: int = 0  # notices that this receiver has not got, because it could not be reached


@dataclass(frozen=True, slots=True)
class Subject:
    """What an incident is about, as its store knows it."""

    fault_class: str
    culprits: tuple[str, ...]
    plan_hash: str
    opened_at: float


def compose(told: Incident, about: Subject, console_url: str) -> Notice | None:
    """The notice of one transition; None for a state on the way to another.

    Neither log lines nor error texts are in it, which may hold anything: the link leads to them.
    """
    known = next((TOLD[state] for state in TOLD if state == told.state), None)
    if known is None:
        return None
    level, words = known
    where = f" ({', '.join(about.culprits)})" if about.culprits else ""
    steps = [f"Attempt {told.attempt}, state {told.state}."]
    if told.state in ("awaiting_approval", "held", "notified") and about.plan_hash:
        steps.append(f"To do what is proposed: transom approve {told.incident_id} --plan {about.plan_hash}")
    return Notice(
        notice_id=told.message_id,
        level=level,
        job=told.job,
        attempt=told.attempt,
        incident_id=told.incident_id,
        state=told.state,
        closed=told.state in CLOSED,
        fault_class=about.fault_class,
        culprits=about.culprits,
        title=f"{told.job}: {about.fault_class or 'incident'}{where}: {words}",
        text=" ".join(steps),
        plan_hash=about.plan_hash,
        link=f"{console_url.rstrip('/')}/incident?id={quote(told.incident_id, safe='')}",
        opened_at=about.opened_at,
        at=told.at,
    )


@dataclass(slots=True)
class _Said:
    """What was last said of one incident."""

    sequence: int
    state: str = ""
    at: float = 0.0


class Telling:
    """Which notices are sent. One thread calls it; what it remembers is bounded, and gone with the process.

    `least`: quieter ones are left out. `again_seconds`: the same state of an incident is told again after so long.
    `cooldown_seconds`: the same story (job, class, state and plan) of another incident is kept back for so long.
    """

    def __init__(self, least: Level, *, again_seconds: float, cooldown_seconds: float) -> None:
        self._least = LEVELS.index(least)
        self._again_seconds = again_seconds
        self._cooldown_seconds = cooldown_seconds
        self._said: OrderedDict[str, _Said] = OrderedDict()
        self._stories: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()  # sent at; kept back since

    def new(self, told: Incident) -> bool:
        """Whether this transition was not heard before: the outbox repeats what could not be published."""
        said = self._said.setdefault(told.incident_id, _Said(-1))
        self._said.move_to_end(told.incident_id)
        _bound(self._said)
        if told.sequence <= said.sequence:
            return False
        said.sequence = told.sequence
        return True

    def choose(self, notice: Notice) -> Notice | None:
        """The notice to send, with how many like it were kept back; None: not this one."""
        said = self._said.setdefault(notice.incident_id, _Said(-1))
        if notice.closed and not said.state:
            return None  # nobody has heard of it, so nobody waits for its end
        if LEVELS.index(notice.level) < self._least and not notice.closed:
            return None
        if said.state == notice.state and notice.at - said.at < self._again_seconds:
            return None
        story = (notice.job, notice.fault_class, notice.state, notice.plan_hash)
        sent_at, kept = self._stories.get(story, (float("-inf"), 0))
        begins = said.state != notice.state and not notice.closed
        if begins and 0 <= notice.at - sent_at < self._cooldown_seconds:
            self._stories[story] = (sent_at, kept + 1)
            return None
        said.state, said.at = notice.state, notice.at
        self._stories[story] = (notice.at, 0)
        self._stories.move_to_end(story)
        _bound(self._stories)
        return msgspec.structs.replace(notice, like_it=kept)


def _bound(memory: OrderedDict[str, _Said] | OrderedDict[tuple[str, ...], tuple[float, int]]) -> None:
    while len(memory) > REMEMBERED_MAX:
        memory.popitem(last=False)
