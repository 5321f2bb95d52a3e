"""The job's pace: what all ranks do together becomes slower, waits for data, or goes over to another regime.

The history of what the ranks have in common (`step_summary`), one for each phase, watched by change points: the step
itself, everybody's compute, the collective that nobody waits for anybody in. What one rank does to all shows as wait
that the last one does not have: that is for the rank channel to say, here it is only understood.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec
import numpy as np

from detectors.channel import Arrays, Ended, Told
from detectors.clues import Place
from detectors.job.change_point import Change, ChangePoint, ChangePointConfig, ChangePointState
from detectors.job.pace_data import DataWatch, DataWatchConfig, DataWatchState
from detectors.job.pace_story import (
    Cut,
    PaceStory,
    StoryConfig,
    cut_of,
    finite,
    growth_of,
    is_everywhere,
    is_regime,
    story_of,
    with_slower_ranks,
)
from detectors.job.pace_words import condition_of
from detectors.job.phases import Phases, PhasesConfig
from detectors.job.step_summary import INDEX, ROWS_MAX, Rows, block_of, summary_of
from detectors.ranks.few_peers import FEW_MAX
from detectors.roster import Roster
from detectors.steps import APART, Floats, StepMatrix
from ingest.events import Message, Metrics

JOB_SLOW, DATA, REGIME = "job_slow", "data_stall/job", "regime_change"
SERIES = ("seconds", "own", "wait")  # the step, everybody's compute, the transfer


@dataclass(frozen=True, slots=True)
class PaceConfig:
    """Limits of the pace; shares are of the step."""

    phases: PhasesConfig = field(default_factory=PhasesConfig)
    change: ChangePointConfig = field(default_factory=ChangePointConfig)
    row_seconds_min: float = 1.0  # shorter steps are taken together: neighbours come and go within seconds
    many_nodes: int = 4  # one neighbour's burst does not move the median of the ranks of so many machines
    many_persist_max: int = 24
    many_sigmas: float = 4.75  # of the median since the onset: the median of eight nodes still has bursts of its own
    many_step_share: float = 0.8  # of `change_min`: by so much a step has to be longer for what all do to be told
    wait_persist_min: int = 24  # a network has bursts that all ranks feel
    many_part_min: float = 0.06  # of a part: all ranks drift by some per cent in hours
    few_part_min: float = 0.1  # on fewer, neighbours move the parts of a step by this much
    pause_steps_min: float = 2.0  # a checkpoint's growth in normal steps, and by half
    story: StoryConfig = field(default_factory=StoryConfig)
    data: DataWatchConfig = field(default_factory=DataWatchConfig)
    alone_after_steps: int = 50  # what one rank does to all is said here only when nobody else has a limit for it
    alone_share_max: float = 0.10
    alone_majority: float = 0.7  # of the steps the same rank was the last
    several_share: float = 0.25  # of the ranks that compute longer: fewer are named by the rank channel
    several_named_max: int = 4  # which names so many at once whatever their share, but in the smallest jobs
    accept_steps: int = 200  # after being told: the new pace is the normal one
    settle_steps: int = 50  # a regime that has not changed for so long has settled
    pause: ChangePointConfig = field(
        default_factory=lambda: ChangePointConfig(
            learn_min=10, sure_min=10, change_min=0.405, persist_min=4, persist_max=4, calm_values=3,
            recover_values=3, sigma_min=0.05,
        )
    )  # fmt: skip  # checkpoints and evaluations, visit by visit: half as long again, four times in a row


class _State(msgspec.Struct):
    points: dict[str, ChangePointState] = {}
    many: bool | None = None  # None before the first step of training
    scale: float = 0.0  # seconds of a normal step: parts are shares of it
    last_step: int = -1
    block_steps: int = 0  # the newest steps, which are no row yet, and how long they took
    block_seconds: float = 0.0
    opener: str = ""  # the series that opened job_slow
    open: list[str] = []
    slow_for: int = 0  # train steps since job_slow was told
    regime: str = ""  # the key of the regime that has not settled
    regime_for: int = 0
    silent: list[str] = []  # series that are held for what one rank does
    waiting: list[str] = []  # that are held, but no step takes longer
    visit: list[float] = []  # seconds of the steps of the checkpoint or evaluation in progress
    visit_phase: str = ""


class PaceChannel:
    """Watches one attempt; see `Channel`."""

    wants: ClassVar[tuple[type[Message], ...]] = (Metrics,)

    def __init__(self, config: PaceConfig | None = None) -> None:
        self.config = config or PaceConfig()
        self.phases = Phases(self.config.phases)
        self._state = _State()
        self._steps, self._rows = Rows.empty(), Rows.empty()  # each step; steps that take at least a second together
        self._data = DataWatch(self.config.data)
        self._points = {name: ChangePoint(self.config.change) for name in SERIES}
        self._points |= {name: ChangePoint(self.config.pause) for name in ("checkpoint", "eval")}
        self._told: list[Told] = []

    def observe(self, message: Message, place: Place | None, roster: Roster) -> None:
        if isinstance(message, Metrics) and message.phase in APART and message.rank >= 0:
            self.phases.observe(message)

    def closed(self, step: int, matrix: StepMatrix, roster: Roster) -> None:
        state = self._state
        row = summary_of(matrix, step)
        if row is None or step <= state.last_step:
            return
        state.last_step = step
        seconds = float(row[INDEX["seconds"]])
        if not seconds > 0.0:
            return
        phase = self.phases.phase_of(step, seconds, state.scale)
        if phase != state.visit_phase and state.visit:
            self._end_visit(matrix, roster)
        if phase in ("checkpoint", "eval"):
            state.visit, state.visit_phase = [*state.visit[-63:], seconds], phase
        elif phase == "train":
            self._train(row, matrix, roster)

    def look(self, now: float, roster: Roster) -> list[Told]:
        told, self._told = self._told, []
        return told

    def to_state(self) -> tuple[dict[str, Any], Arrays]:
        assert not self._told
        self._state.points = {name: point.state for name, point in self._points.items()}
        built = msgspec.to_builtins(self._state, str_keys=True)
        state = {"pace": built, "phases": self.phases.to_state(), "data": msgspec.to_builtins(self._data.state)}
        return state, {"rows": self._rows.table, "steps": self._steps.table}

    def load_state(self, state: dict[str, Any], arrays: Arrays) -> None:
        self._state = msgspec.convert(state["pace"], _State, strict=False)
        self._data.state = msgspec.convert(state["data"], DataWatchState)
        self.phases.load_state(state["phases"])
        for name, held in self._state.points.items():
            self._points[name].state = held
        if self._state.many is not None:
            self._set_many(self._state.many)
        self._rows, self._steps = Rows(arrays["rows"].copy()), Rows(arrays["steps"].copy())

    def _train(self, row: Floats, matrix: StepMatrix, roster: Roster) -> None:
        """One step of plain training."""
        state = self._state
        if state.many is None:
            nodes = {roster.node_of(rank) for rank in matrix.ranks}
            self._set_many(len(nodes) >= self.config.many_nodes)
        if state.scale <= 0.0:
            state.scale = float(np.median(self.phases.warm)) if self.phases.warm else float(row[INDEX["seconds"]])
        self._steps.add(row)
        self._watch_data(matrix, roster)
        state.block_steps += 1
        state.block_seconds += float(row[INDEX["seconds"]])
        if state.block_seconds >= self.config.row_seconds_min or state.block_steps >= ROWS_MAX:
            self._rows.add(block_of(self._steps.table[-state.block_steps :]))
            state.block_steps, state.block_seconds = 0, 0.0
            self._weigh(matrix, roster)

    def _weigh(self, matrix: StepMatrix, roster: Roster) -> None:
        """One row more: has a series changed its level?"""
        state = self._state
        state.slow_for += JOB_SLOW in state.open
        state.regime_for += bool(state.regime)
        if state.regime and state.regime_for >= self.config.settle_steps:
            self._end(state.regime)
            state.regime = ""
        for name in SERIES:
            value = float(self._values(name, slice(-1, None))[0])
            if not math.isfinite(value):
                continue
            change = self._points[name].add(value)
            if change is not None and change.kind == "ended":
                self._ended(name)
            elif change is not None:
                self._began(name, change, matrix, roster)
        self._while_held(matrix, roster)

    def _set_many(self, many: bool) -> None:
        """Over many machines, what all ranks have in common is steady, and a change of it need not persist so long."""
        self._state.many = many
        change = self.config.change
        if many:
            self._points["seconds"].config = change = replace(change, change_sigmas=self.config.many_sigmas)
        least = self.config.many_part_min if many else self.config.few_part_min
        longest = self.config.many_persist_max if many else change.persist_max
        config = replace(change, persist_max=longest, change_min=least)
        self._points["own"].config = config
        longest = max(self.config.wait_persist_min, config.persist_max)
        self._points["wait"].config = replace(
            config, persist_min=self.config.wait_persist_min, persist_max=longest, burst_max=longest
        )

    def _values(self, name: str, rows: slice) -> Floats:
        """Values of a series: logarithms, but the transfer, which may be nothing, as a share of a normal step."""
        values = self._rows.column(name, rows)
        if name == "wait":
            return values / self._state.scale
        if name == "own":
            values = np.where(np.isfinite(values), values, self._rows.column("wall", rows))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(values)

    def _cut(self, count: int) -> Cut:
        return cut_of(self._rows, count, self.config.story)

    def _is_regime(self, cut: Cut) -> bool:
        return is_regime(self._rows, cut, self.config.story)

    def _story(self, cut: Cut) -> PaceStory:
        return story_of(self._rows, cut, self.config.story)

    def _began(self, name: str, change: Change, matrix: StepMatrix, roster: Roster) -> None:
        """A series has changed: understand it, and say it, accept it, or hold it silently."""
        state = self._state
        cut = self._cut(change.values)
        if change.size < 0.0 and name == "seconds":
            self._restart(change.values)  # faster: nobody is hurt
            return
        if change.size < 0.0:
            self._points[name].accept()
            return
        if self._is_regime(cut):
            self._open_regime(self._story(cut), matrix, roster)
        elif JOB_SLOW not in state.open:
            self._explain(name, cut, matrix, roster)

    def _explain(self, name: str, cut: Cut, matrix: StepMatrix, roster: Roster) -> None:
        state = self._state
        story = self._story(cut)
        if story.part == "one_rank" and DATA not in state.open:
            story = self._several(story, cut, matrix, roster)
        if DATA in state.open or story.part in ("one_rank", "delay"):
            state.silent = [*state.silent, name] if name not in state.silent else state.silent
            return
        longer = math.log(story.after / story.before)
        somewhere = state.many and not is_everywhere(story, self._rows, cut, matrix, roster)
        if longer <= self._least(name, cut, story.part) or somewhere:
            state.waiting = [*state.waiting, name] if name not in state.waiting else state.waiting
            return  # longer in one part, and no step takes longer: not yet, or for something that became shorter
        state.waiting = [other for other in state.waiting if other != name]
        state.opener, state.slow_for = name, 0
        self._open(JOB_SLOW, story, matrix, roster)

    def _several(self, story: PaceStory, cut: Cut, matrix: StepMatrix, roster: Roster) -> PaceStory:
        """Is it not one rank, but so many on several nodes that the rank channel calls none of them odd?"""
        found, config = with_slower_ranks(story, self._rows, cut, matrix, self.config.few_part_min), self.config
        named = 0 if len(matrix.ranks) <= FEW_MAX else config.several_named_max
        many = len(found.ranks) > max(named, config.several_share * len(matrix.ranks))
        apart = len({roster.node_of(rank) for rank in found.ranks}) > 1
        return found._replace(part="several") if many and apart else story

    def _least(self, name: str, cut: Cut, part: str) -> float:
        """By how much (a logarithm) a step has to be longer for a change of this series to be worth a word."""
        state, least = self._state, self.config.change.change_min
        if name == "seconds":  # as long as the last rank: of many machines always some have a burst
            unseen = state.many and part == "compute" and self._points["own"].state.held is None
            return math.inf if unseen else (self._points[name].state.held or 0.0) / 2
        if not state.many:
            return least
        column = "wall" if name == "own" else name
        grown = self._rows.median(column, cut.since) - self._rows.median(column, cut.before)
        return max(self.config.many_step_share * least, grown / state.scale / 2)

    def _while_held(self, matrix: StepMatrix, roster: Roster) -> None:
        """Look again at what is held: has it become the normal, is it the regime, is it one rank too slight to name?"""
        state, config = self._state, self.config
        if JOB_SLOW in state.open:
            count = self._points[state.opener].state.held_count
            if state.slow_for % 10 == 9 and self._is_regime(self._cut(count)):
                self._open_regime(self._story(self._cut(count)), matrix, roster)
            elif state.slow_for >= config.accept_steps:
                story = self._story(self._cut(count))
                self._restart(count)
                self._open(REGIME, story._replace(part="accepted"), matrix, roster)
            return
        for name in list(state.waiting):
            count = self._points[name].state.held_count
            if count % 8 == 0:
                self._explain(name, self._cut(count), matrix, roster)
            elif count >= config.accept_steps:
                state.waiting.remove(name)
                self._points[name].accept()
        for name in list(state.silent):
            count = self._points[name].state.held_count
            if count % 10 == 9 and self._is_regime(self._cut(count)):
                self._open_regime(self._story(self._cut(count)), matrix, roster)
                return
            if count == config.alone_after_steps and name == "seconds":
                self._one_rank(count, matrix, roster)
            elif count >= config.accept_steps:
                self._restart(count)
                return

    def _one_rank(self, count: int, matrix: StepMatrix, roster: Roster) -> None:
        """The same rank arrives last in most steps, by less than anybody has a limit for: say so, with half a heart."""
        config, cut = self.config, self._cut(count)
        busiest = self._rows.column("busiest", cut.since)
        ranks, counts = np.unique(busiest, return_counts=True)
        rank = int(ranks[np.argmax(counts)])
        story = self._story(cut)
        if story.part != "one_rank" or counts.max() < config.alone_majority * len(busiest):
            return
        if not 0.0 < growth_of(rank, self._rows, cut, matrix) < config.alone_share_max:
            return
        self._state.opener, self._state.slow_for = "seconds", 0
        self._open(JOB_SLOW, story._replace(rank=rank), matrix, roster)

    def _watch_data(self, matrix: StepMatrix, roster: Roster) -> None:
        """All ranks wait for data, steadily or in every second or third step."""
        steps = self._steps
        waits = steps.column("data")
        verdict = self._data.add(float(waits[-1]), self._state.scale)
        if verdict == "ended":
            self._end(DATA)
        elif verdict == "began":
            cut = cut_of(steps, self._data.since_first_hit, self.config.story)
            story = story_of(steps, cut, self.config.story)
            if is_regime(steps, cut, self.config.story):
                self._data.forget()
                self._open_regime(story, matrix, roster)
                return
            usual = steps.median("data", cut.before)
            longer = float(np.median(waits[self._data.hit_rows()]))
            self._open(DATA, story._replace(part="data", part_before=usual, part_after=longer), matrix, roster)

    def _open_regime(self, story: PaceStory, matrix: StepMatrix, roster: Roster) -> None:
        since = self._rows.column("step") >= story.onset[INDEX["step"]]
        self._restart(max(1, int(since.sum())))
        self._open(REGIME, story._replace(part="signals"), matrix, roster)

    def _open(self, key: str, story: PaceStory, matrix: StepMatrix, roster: Roster) -> None:
        if key == REGIME:  # a second one before the first has settled is part of it
            self._state.regime_for = 0
            if self._state.regime:
                return
            key = self._state.regime = f"{REGIME}/{int(story.onset[INDEX['step']])}"
        if key in self._state.open:
            return
        self._state.open.append(key)
        self._told.append(condition_of(key, story, matrix, roster))

    def _end(self, key: str) -> None:
        if key in self._state.open:
            self._state.open.remove(key)
            self._told.append(Ended(key))

    def _ended(self, name: str) -> None:
        """A held series is back where it was."""
        state = self._state
        state.silent = [other for other in state.silent if other != name]
        state.waiting = [other for other in state.waiting if other != name]
        if JOB_SLOW in state.open and name == state.opener:
            self._end(JOB_SLOW)
            for other in SERIES:
                if other != name and self._points[other].state.held is not None:
                    self._points[other].release()
            state.silent, state.waiting = [], []  # nothing is held any more

    def _restart(self, count: int) -> None:
        """The last `count` steps are the new normal for every series."""
        state = self._state
        for key in (JOB_SLOW, DATA):
            self._end(key)
        state.silent, state.waiting, state.opener = [], [], ""
        if not len(self._rows.table):
            return
        state.scale = self._rows.median("seconds", slice(-count, None))
        for name in SERIES:
            self._points[name].restart(finite(self._values(name, slice(-count, None))).tolist())

    def _end_visit(self, matrix: StepMatrix, roster: Roster) -> None:
        """A checkpoint or an evaluation is over: its longest step against the earlier ones'."""
        state, name = self._state, self._state.visit_phase
        longest, state.visit, state.visit_phase = max(state.visit), [], ""
        change = self._points[name].add(math.log(longest))
        key = f"{JOB_SLOW}/{name}"
        if change is None or len(self._rows.table) < 2:
            return
        if change.kind == "ended":
            self._end(key)
        elif change.size < 0.0:
            self._points[name].accept()
        else:
            usual = math.exp(self._points[name].level)
            now = usual * math.exp(change.size)
            if now - usual < self.config.pause_steps_min * state.scale:
                self._points[name].accept()
                return
            story = self._story(self._cut(1))._replace(part=name, before=usual, after=now, steps=change.values)
            self._open(key, story, matrix, roster)
