"""Eight and more ranks of a role: distance from the peers' median, less the rank's own offset, over the peers' spread.

A whole step is scored as one rank × timing array. Times that make up the computation count as shares of themselves,
waits as shares of the step, so that a batch ramp moves nothing. Offsets are running medians (sign steps, which need
no history) of clean steps; they stand still for a rank that is odd now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.medians import finite_median, median, row_medians
from detectors.ranks.excess import AT, COLUMNS, DATA, IN_STEPS, STEP, WALL, Excesses, StepRows, rows_of
from detectors.ranks.hysteresis import Bools, Singles
from detectors.ranks.node_view import NodeView
from detectors.steps import TIMINGS, Ints, StepMatrix

CORRELATED_STEPS = 10.0  # a node's noise is the same for about so long
KEPT = 64  # steps whose medians are kept for what comes late
SHOWN = 16  # steps whose deviations are kept


@dataclass(frozen=True, slots=True)
class ManyPeersConfig:
    """Shares are of the time itself or of the step; see `excess.OF_STEP`."""

    z_freeze: float = 4.0
    z_clip: float = 20.0
    smooth_slow: float = 1.5  # smoothed distance, in spreads, above which offsets move at a quarter of their pace:
    # a weak slowdown must not be learned away, a rank that has wandered must not stay apart for ever
    smooth_steps: float = 16.0
    mates_min: int = 4
    floor_fraction: float = 0.005  # of the unit: timers and clocks are not better
    first_steps: int = 20  # clean steps behind the first offsets
    offset_steps_max: int = 50  # few, because a rank that is odd among its mates learns nothing
    node_offset_steps_max: int = 800
    capped_steps: int = 100  # so long an offset stays within its cap
    cap_floors: float = 10.0
    odd_tests: tuple[int, ...] = (120, 240)  # clean steps at which the slow test looks, then every `odd_every`
    odd_every: int = 500
    odd_chance: float = 1e-3  # of one wrong name in one test, over all ranks
    odd_stretch: float = 1.5  # offsets have longer tails than a normal distribution
    odd_min: float = 0.08
    missing_max: float = 0.2  # of the ranks; with more missing a step is scored but not learned from
    length_max: float = 1.5  # of the usual step, and its inverse: other steps are not learned from


class _State(msgspec.Struct):
    rows: int = 0  # clean steps in the offsets
    steps: list[int] = []  # the newest steps with kept medians, oldest first
    shown: list[int] = []  # which step each slot of `_shown` holds
    newest_slot: int = -1  # of them
    clean: list[int] = []  # the newest clean steps
    lengths: list[float] = []  # medians of the newest steps' durations
    tested: int = 0
    odd: list[int] = []  # columns of ranks that were odd from the beginning


class ManyPeers:
    """Deviations of every rank from its role, step by step."""

    def __init__(self, nodes: Sequence[str], config: ManyPeersConfig | None = None, *, keeps: bool = True) -> None:
        """Not `keeps`: nobody asks for `deviations` and `beside_peers`."""
        self.config = config or ManyPeersConfig()
        self.nodes, self.count = list(nodes), len(nodes)
        count = self.count
        self.keeps = keeps
        kept, shown = (KEPT, SHOWN) if keeps else (0, 0)
        self._state = _State()
        self._oldest = 0  # row of `_beside`, a ring
        self.metric = ""  # of the computation: OWN or WALL, chosen once by whoever owns this
        self._groups: list[Ints] = []
        self._offset: Singles = np.zeros((count, len(COLUMNS)), dtype=np.float32)
        self._smooth: Singles = np.zeros((count, len(COLUMNS)), dtype=np.float32)
        self._beside: Singles = np.full((kept, count), np.nan, dtype=np.float32)  # of the computation, from all peers
        self._first: Singles = np.zeros(count, dtype=np.float32)  # of the computation, over the first clean steps
        self._shown: Singles = np.full((2, shown, count, len(TIMINGS)), np.nan, dtype=np.float32)
        # step × group × (median, unit, centre, spread) × column
        self._statistics: Singles = np.empty((0, 1, 4, len(COLUMNS)), dtype=np.float32)
        self._set_groups([np.arange(count)])

    @property
    def learned(self) -> int:
        """Clean steps in the offsets."""
        return self._state.rows

    @property
    def odd(self) -> list[int]:
        """Columns of the ranks that were odd from their first step on."""
        return self._state.odd

    def set_groups(self, groups: list[Ints], known: ManyPeers) -> None:
        """Compare within these groups (columns of the matrix) from now on. `known` compares with everybody: what it
        has learned of a rank, less what it has learned of its new peers' median, is the rank's offset among them."""
        self._set_groups(groups)
        state = self._state
        state.steps, state.shown, state.newest_slot = [], [], -1
        state.rows = known._state.rows
        for members in groups:
            theirs = known._offset[members]
            middle = row_medians(np.ascontiguousarray(theirs.T))
            self._offset[members] = np.where(IN_STEPS, theirs - middle, (1.0 + theirs) / (1.0 + middle) - 1.0)

    def score(self, matrix: StepMatrix, step: int, told: StepRows | None, *, again: bool = False) -> Excesses | None:
        """Excess of each rank by kind of evidence, in the units of the module; None where the step is not kept.
        `told`: what `rows_of` gives. `again`: the step was scored before, and some of its samples have come since."""
        state = self._state
        if told is None or (again and step not in state.steps):
            return None
        rows = told.rows
        slot = state.steps.index(step) if step in state.steps else None
        if slot is None:
            state.steps = [*state.steps[-(KEPT - 1) :], step]
            measured, own = self._measure(rows)
            self._statistics = np.concatenate([self._statistics[-(KEPT - 1) :], measured[None]])
            self._make_room(step)
        else:
            own = None
        own, spread, unit = self._own(rows, own, -1 if slot is None else slot - len(state.steps))
        apart, width = self._from_mates(own, spread)
        if self.keeps:
            self._beside[self._row_beside(state.steps.index(step))] = own[:, AT[self.metric]]
        if step in state.shown:
            at, clip = state.shown.index(step), self.config.z_clip
            np.clip((own / spread)[:, : len(TIMINGS)], -clip, clip, out=self._shown[0, at])
            np.clip((apart / width)[:, : len(TIMINGS)], -clip, clip, out=self._shown[1, at])
        if slot is None and self._is_clean(told):
            self._learn(matrix, step, (own, spread), (apart, width))
        return Excesses(own, apart, unit, self.metric)

    def deviations(self, step: int, *, from_mates: bool = False) -> Singles | None:
        """rank × timing of one of the newest sixteen steps, in spreads of the peers (or from the node's mates, where
        there are enough, in spreads of such distances); NaN = not measured."""
        shown = self._state.shown
        return self._shown[int(from_mates), shown.index(step)].copy() if step in shown else None

    def beside_peers(self, column: int, steps: Sequence[int]) -> float:
        """Median excess of a rank's computation over all its peers', over those of these steps that are kept."""
        known = self._state.steps
        kept = [self._beside[self._row_beside(known.index(step)), column] for step in steps if step in known]
        return finite_median(np.array(kept, dtype=np.float32))

    def normals(self) -> tuple[Singles, Singles, Singles] | None:
        """For each rank: its normal computation over its peers' (1 = the same), its normal data wait over theirs in
        shares of the step, and how far the first may still be from the truth. None before offsets are learned."""
        if not self._state.rows or not len(self._statistics):
            return None
        column = AT[self.metric]
        spread = self._of_ranks(self._statistics[-1])[:, 3, column]
        error = spread / np.float32(math.sqrt(self._state.rows / CORRELATED_STEPS))
        return 1.0 + self._offset[:, column], self._offset[:, AT[DATA]], error

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        built: dict[str, Any] = msgspec.to_builtins(self._state)
        return {**built, "metric": self.metric}, {
            "offset": self._offset, "smooth": self._smooth, "shown": self._shown, "statistics": self._statistics,
            "group": self._group_of, "first": self._first,
            "beside": np.roll(self._beside, -self._oldest, axis=0),
        }  # fmt: skip

    def load_state(self, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        self.metric = state["metric"]
        group = arrays["group"]
        self._set_groups([np.flatnonzero(group == number) for number in range(int(group.max(initial=-1)) + 1)])
        self._state = msgspec.convert({k: v for k, v in state.items() if k != "metric"}, _State)
        self._offset, self._smooth = arrays["offset"].copy(), arrays["smooth"].copy()
        self._first, self._statistics = arrays["first"].copy(), arrays["statistics"].copy()
        if self.keeps:
            self._beside, self._oldest, self._shown = arrays["beside"].copy(), 0, arrays["shown"].copy()
        else:
            self._state.shown = []

    def _set_groups(self, groups: list[Ints]) -> None:
        self._groups = groups
        self._together = len(groups) == 1 and np.array_equal(groups[0], np.arange(self.count))
        self._group_of: Ints = np.full(self.count, -1, dtype=np.int64)
        for number, members in enumerate(groups):
            self._group_of[members] = number
        self._statistics = np.empty((0, len(groups), 4, len(COLUMNS)), dtype=np.float32)
        names = [f"{node}/{group}" for node, group in zip(self.nodes, self._group_of.tolist(), strict=True)]
        self._cells = NodeView(names)
        together = (self._cells.sizes >= self.config.mates_min)[self._cells.of_rank]
        self._mates: Bools = together & (self._group_of >= 0)

    def _make_room(self, step: int) -> None:
        """For what is kept of one step more."""
        if not self.keeps:
            return
        state = self._state
        state.newest_slot = (state.newest_slot + 1) % SHOWN
        state.shown = [*state.shown[: state.newest_slot], step, *state.shown[state.newest_slot + 1 :]]
        self._beside[self._oldest] = np.nan
        self._oldest = (self._oldest + 1) % KEPT

    def _row_beside(self, index: int) -> int:
        """Where in `_beside` one of `steps` stands."""
        return (self._oldest + index - len(self._state.steps)) % KEPT

    def _measure(self, rows: Singles) -> tuple[Singles, Singles | None]:
        """group × (median, unit, centre, spread) × column: everything that the peers tell of a step; and each rank's
        distance from them, where all are in one group."""
        config = self.config
        out: Singles = np.full((len(self._groups), 4, len(COLUMNS)), np.nan, dtype=np.float32)
        for number, members in enumerate(self._groups):
            block = np.ascontiguousarray((rows if self._together else rows[members]).T)
            middle = row_medians(block)
            length = middle[AT[STEP]] if middle[AT[STEP]] > 0.0 else middle[AT[WALL]]
            unit = np.where(IN_STEPS, length, middle)
            unit[~(unit > 0.0)] = np.nan
            own = block - middle[:, None]
            own /= unit[:, None]
            own -= (self._offset if self._together else self._offset[members]).T
            centre = row_medians(own)
            own -= centre[:, None]
            spread = 1.4826 * row_medians(np.abs(own))
            out[number] = middle, unit, centre, np.maximum(spread, config.floor_fraction)
        return out, np.ascontiguousarray(own.T) if self._together else None

    def _own(self, rows: Singles, known: Singles | None, slot: int) -> tuple[Singles, Singles, Singles]:
        """Distance from the peers less the own offset, and for each rank its peers' spread and unit."""
        statistics = self._of_ranks(self._statistics[slot])
        middle, unit, centre, spread = (statistics[:, index] for index in range(4))
        return (rows - middle) / unit - self._offset - centre if known is None else known, spread, unit

    def _of_ranks(self, statistics: Singles) -> Singles:
        """What `_measure` gave for each group, for each rank; NaN for who is in none. Not to be written to."""
        if self._together:
            return np.broadcast_to(statistics[0], (self.count, *statistics.shape[1:]))
        out: Singles = np.full((self.count, *statistics.shape[1:]), np.nan, dtype=np.float32)
        inside = self._group_of >= 0
        out[inside] = statistics[self._group_of[inside]]
        return out

    def _from_mates(self, own: Singles, spread: Singles) -> tuple[Singles, Singles]:
        """Distance from the middle of the mates on the node (from all peers for who has too few), and its spread."""
        if not self._mates.any():
            return own, spread
        apart = own - self._cells.others(own)
        everyone = bool(self._mates.all())
        some = apart if everyone else apart[self._mates]
        width = 1.4826 * row_medians(np.ascontiguousarray(np.abs(some).T))
        least = np.maximum(width, self.config.floor_fraction)
        if everyone:
            return apart, np.broadcast_to(least, spread.shape)
        mates = self._mates[:, None]
        return np.where(mates, apart, own), np.where(mates, least, spread)

    def _is_clean(self, told: StepRows) -> bool:
        """An ordinary step: most ranks have told of it, and it took about as long as the steps before it."""
        config, state, now = self.config, self._state, told.seconds
        usual = median(state.lengths) if state.lengths else None
        state.lengths = [*state.lengths[-31:], now] if now is not None else state.lengths
        if np.isnan(told.rows[:, AT[self.metric]]).mean() > config.missing_max:
            return False
        return usual is None or now is None or usual / config.length_max <= now <= usual * config.length_max

    def _learn(
        self, matrix: StepMatrix, step: int, among_peers: tuple[Singles, Singles], among_mates: tuple[Singles, Singles]
    ) -> None:
        """Offsets follow a rank's distance from its mates fast, and that of all mates from the peers slowly: a node's
        noise is larger and lasts."""
        config, state = self.config, self._state
        state.clean = [*state.clean[-(config.first_steps - 1) :], step]
        if state.rows == 0:
            self._begin(matrix)
            return
        (own, spread), (apart, width) = among_peers, among_mates
        fast = np.float32(1.25 / min(state.rows, config.offset_steps_max))
        still = np.float32(1.25 / min(state.rows, config.node_offset_steps_max))
        with np.errstate(invalid="ignore"):
            deviations = apart / width
            known = np.isfinite(deviations)
            towards = (deviations - self._smooth) / np.float32(config.smooth_steps)
            np.add(self._smooth, towards, out=self._smooth, where=known)
            slow = 1.0 - (np.abs(self._smooth) > config.smooth_slow) * np.float32(0.75)
            moved = fast * slow * width * np.sign(apart)
            near = known & (np.abs(deviations) <= config.z_freeze)
            np.add(self._offset, moved, out=self._offset, where=near)
            node = own - apart
            near = np.abs(node) <= config.z_freeze * spread
            np.add(self._offset, still * spread * np.sign(node), out=self._offset, where=near)
        state.rows += 1
        due = state.rows in config.odd_tests or (config.odd_every and state.rows % config.odd_every == 0)
        if due and state.rows > config.capped_steps:
            self._test_offsets(among_mates[1])

    def _begin(self, matrix: StepMatrix) -> None:
        """The first offsets: medians of the first clean steps, none beyond a cap, so that a bad rank stays visible."""
        config, state = self.config, self._state
        stack = [told.rows for step in state.clean if (told := rows_of(matrix, step)) is not None]
        if len(stack) < config.first_steps:
            return
        self._offset[:] = 0.0
        apart = np.full((len(stack), self.count, len(COLUMNS)), np.nan, dtype=np.float32)
        for index, rows in enumerate(stack):
            statistics = self._of_ranks(self._measure(rows)[0])
            apart[index] = (rows - statistics[:, 0]) / statistics[:, 1]
        flat = np.ascontiguousarray(apart.reshape(len(stack), -1).T)
        learned = row_medians(flat).reshape(self.count, len(COLUMNS))
        for members in self._groups:
            block = learned[members]
            spread = 1.4826 * row_medians(np.abs(block - row_medians(np.ascontiguousarray(block.T))).T)
            cap = np.maximum(config.cap_floors * config.floor_fraction, 3.0 * np.nan_to_num(spread))
            self._offset[members] = np.nan_to_num(np.clip(block, -cap, cap))
        self._first = np.nan_to_num(learned[:, AT[self.metric]])
        state.rows = config.first_steps

    def _test_offsets(self, width: Singles) -> None:
        """Who is always slow, by the first steps or by what its offset has become, and is so now: its distance (from
        its mates, where it has enough: roles may be unknown) against those of its peers. Such a rank loses its
        offset, and the evidence of the next steps names it."""
        config, column = self.config, AT[self.metric]
        now = self._offset[:, column] + self._smooth[:, column] * width[:, column]
        always = np.minimum(now, np.maximum(self._first, self._offset[:, column]))
        always = np.where(self._mates, always - self._cells.middles(always[:, None])[self._cells.of_rank, 0], always)
        limit = config.odd_stretch * NormalDist().inv_cdf(1.0 - config.odd_chance / max(1, self.count))
        for members in self._groups:
            apart = always[members] - finite_median(always[members])
            usual = max(1.4826 * finite_median(np.abs(apart)), config.floor_fraction)
            for rank in members[np.flatnonzero((apart > limit * usual) & (apart > config.odd_min))].tolist():
                self._offset[rank, column] = 0.0
                if self._first[rank] > config.odd_min / 2 and rank not in self._state.odd:
                    self._state.odd.append(rank)
