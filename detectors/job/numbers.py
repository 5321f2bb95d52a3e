"""The job channel: loss and gradients that are no numbers, and the rank that had them first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from detectors.clues import Clue, Place, Source, source_of
from detectors.roster import Roster
from detectors.step_block import StepBlock
from detectors.verdict import Culprit, Evidence
from ingest.events import Metrics

LOSS, GRADIENT = "train.loss", "train.gradient.local_norm"


@dataclass(frozen=True, slots=True)
class JobChannelConfig:
    """How long a non-finite step waits for the ranks that have not told of it."""

    settle_seconds: float = 3.0
    steps_max: int = 16  # non-finite steps remembered of each rank


class _Bad(msgspec.Struct, frozen=True):
    """One non-finite sample of one rank."""

    step: int
    metric: str
    value: str
    at: float
    source: Source
    sure: bool  # an infinite gradient alone may be a loss scaler's overflow


class _State(msgspec.Struct):
    told: dict[int, int] = {}  # the newest step each rank has told of
    bad: dict[int, list[_Bad]] = {}
    measured: set[int] = set()  # ranks that report gradient norms
    valued: set[int] = set()  # ranks that report losses
    since: float | None = None
    done: bool = False


class JobChannel:
    """Watches what should be finite. The reduced gradient spreads a NaN to all ranks one step later, so the lowest
    step decides who had it first; all ranks at once means the numbers, not a rank."""

    def __init__(self, config: JobChannelConfig | None = None) -> None:
        self.config = config or JobChannelConfig()
        self._state = _State()

    def observe(self, message: Metrics, place: Place | None) -> None:
        """Take in the losses and gradient norms of one message."""
        state, steps = self._state, message.steps
        if not steps:
            return
        rank, columns = message.rank, message.columns
        newest = steps[0] if len(steps) == 1 else max(steps)
        if newest > state.told.get(rank, -1):
            state.told[rank] = newest
        if GRADIENT in columns:
            state.measured.add(rank)
        if LOSS in columns:
            state.valued.add(rank)
        for entry in message.non_finite:
            if entry.metric not in (LOSS, GRADIENT) or entry.index >= len(message.steps):
                continue
            bad = state.bad.setdefault(message.rank, [])
            if len(bad) < self.config.steps_max:
                index = entry.index
                at = message.ended_at[index] if index < len(message.ended_at) else message.at
                sure = entry.metric == LOSS or entry.value == "nan"
                step = message.steps[index]
                bad.append(_Bad(step, entry.metric, entry.value, at, source_of(message, place), sure))

    def observe_block(self, block: StepBlock) -> None:
        """The same of one step of many ranks, whose samples are finite."""
        state, ranks = self._state, block.ranks.tolist()
        told = state.told
        if max(told.values(), default=-1) <= block.step:
            told.update(dict.fromkeys(ranks, block.step))
        else:
            told.update({rank: block.step for rank in ranks if block.step > told.get(rank, -1)})
        for name, having in ((GRADIENT, state.measured), (LOSS, state.valued)):
            if name in block.names and len(having) < len(told):
                having.update(ranks)

    def look(self, now: float, roster: Roster) -> Clue | None:
        """The clue for the judge: once when it begins, and again when every live rank has told of that step."""
        state = self._state
        if state.done or not state.bad:
            return None
        self._forget_overflows()
        sure = [entry for entries in state.bad.values() for entry in entries if entry.sure]
        if not sure:
            return None
        first = min(entry.step for entry in sure)
        unsure = {entry.step for entries in state.bad.values() for entry in entries if not entry.sure}
        while first - 1 in unsure:  # an infinite gradient right before it was its beginning
            first -= 1
        began = state.since is None
        state.since = now if state.since is None else state.since
        live = [rank for rank in roster.live() if rank.heard_at is not None]
        everyone = all(state.told.get(rank.rank, -1) >= first for rank in live)
        settled = everyone or now >= state.since + self.config.settle_seconds
        if not settled and not began:
            return None
        state.done = settled
        return self._clue(first, roster, settled)

    def to_state(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self._state, str_keys=True)
        return built

    @classmethod
    def from_state(cls, state: dict[str, Any], config: JobChannelConfig | None = None) -> JobChannel:
        channel = cls(config)
        channel._state = msgspec.convert(state, _State, strict=False)
        return channel

    def _forget_overflows(self) -> None:
        """An infinite gradient followed by two steps with finite ones was a loss scaler's doing: skipped and over."""
        for rank, entries in list(self._state.bad.items()):
            told = self._state.told[rank]
            newest = max(entry.step for entry in entries)
            if not any(entry.sure for entry in entries) and told >= newest + 2:
                del self._state.bad[rank]

    def _clue(self, first: int, roster: Roster, settled: bool) -> Clue:
        guilty = {
            rank: min((entry for entry in entries if entry.step == first), key=lambda entry: entry.metric != GRADIENT)
            for rank, entries in sorted(self._state.bad.items())
            if any(entry.step == first for entry in entries)
        }
        local = [rank for rank, entry in guilty.items() if entry.metric == GRADIENT]
        if local and len(local) < len(self._state.measured):  # a loss may be averaged over ranks, this norm is not
            guilty = {rank: guilty[rank] for rank in local}
        lead = min(guilty, key=lambda rank: (guilty[rank].at, rank))
        entry = guilty[lead]
        evidence = tuple(self._evidence(rank, bad, roster) for rank, bad in list(guilty.items())[:4])
        everyone = settled and len(guilty) >= max(1, len(self._state.told))
        what = "gradient" if entry.metric == GRADIENT else "loss"
        if everyone:
            summary = (
                f"The {what} is {entry.value} on all {len(guilty)} ranks from step {first}: no single rank did it."
            )
            culprits: tuple[Culprit, ...] = ()
        else:
            names = " and ".join(f"rank {rank} on {roster.node_of(rank)}" for rank in list(guilty)[:4])
            summary = f"The {what} of {names} became {entry.value} at step {first}."
            if settled and what == "gradient" and self._corrupted(lead, guilty, first):
                summary += " Its loss was finite, like everybody's: possible silent data corruption."
            share = 1.0 / len(guilty)
            culprits = tuple(
                Culprit(rank=rank, node=roster.node_of(rank), confidence=round(share, 3)) for rank in guilty
            )
        return Clue(
            kind="nan",
            role="root",
            fault_class="numeric" if everyone else "nan",
            at=entry.at,
            rank=None if everyone else lead,
            node=None if everyone else roster.node_of(lead),
            source=entry.source,
            evidence=evidence,
            summary=summary,
            alone=True,
            settled=settled,
            step=first,
            first_bad_step=first,
            culprits=culprits,
            key="nan",
        )

    def _corrupted(self, lead: int, guilty: dict[int, _Bad], first: int) -> bool:
        """One rank alone, of several that measure, made no number of a loss that was one."""
        state = self._state
        losses = [entry for entries in state.bad.values() for entry in entries if entry.metric == LOSS]
        alone = len(guilty) == 1 < len(state.measured)
        return alone and lead in state.valued and not any(entry.step <= first for entry in losses)

    def _evidence(self, rank: int, bad: _Bad, roster: Roster) -> Evidence:
        told = sorted(other for other, step in self._state.told.items() if other != rank and step >= bad.step)
        fine = [other for other in told if not any(entry.step == bad.step for entry in self._state.bad.get(other, ()))]
        return Evidence(
            kind="metric",
            text=f"{bad.metric} of rank {rank} is {bad.value} at step {bad.step}; {len(fine)} others are finite there",
            at=bad.at,
            rank=rank,
            node=roster.node_of(rank),
            metric=bad.metric,
            step=bad.step,
            topic=bad.source.topic,
            partition=bad.source.partition,
            offset=bad.source.offset,
        )
