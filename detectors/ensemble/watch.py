"""The ensemble over one attempt: scores each closed step, supports the rules, and speaks where they have not.

What is scored is a running mean of a rank's deviations: one step of a weak slowdown shows little, and one step of a
burst proves nothing. A rank's level is the k-th largest of its last n decades. What the rank channel says itself is
never said twice: while anything is open about a rank or its node, the ensemble only supports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.channel import Ended, Told
from detectors.ensemble.committee import Opinion, cold_decades, columns_of, level
from detectors.ensemble.ensemble import Ensemble, Singles
from detectors.ensemble.few_rows import FewRows
from detectors.ensemble.says import Named, Who, attribute, cold_support, condition_alone, support_of
from detectors.medians import finite_median
from detectors.ranks.channel import RankChannel
from detectors.ranks.few_peers import FEW_MAX
from detectors.ranks.finding import Finding
from detectors.ranks.findings import Support, condition_of
from detectors.roster import Roster
from detectors.steps import Floats, StepMatrix

LOOKED_AT_MAX = 8  # ranks of one step that are looked at closely


class _Open(msgspec.Struct):
    column: int
    calm: int = 0


class _State(msgspec.Struct):
    steps: list[int] = []  # the newest scored ones, oldest first
    scored: int = 0
    calm: int = 0  # quiet steps in a row
    open: dict[str, _Open] = {}
    held: dict[str, Finding] = {}  # of rules, which people's feedback keeps back until they are odder


class Seen(NamedTuple):
    """One closed step and what else is known then. `busy`: keys of the conditions that are open."""

    step: int
    matrix: StepMatrix
    channel: RankChannel
    roster: Roster
    busy: Sequence[str]
    quiet: bool  # nothing of this attempt is odd


class Watch:
    """Beside the rank channel of one attempt; `take` hands out what began and what ended."""

    def __init__(self, ensemble: Ensemble, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        self.ensemble = ensemble
        self._ranks, self._nodes = list(ranks), list(nodes)
        self._few = FewRows(len(ranks)) if len(ranks) <= FEW_MAX else None
        self._columns = columns_of(ensemble.config.features)
        self._state = _State()
        shape = (ensemble.config.persistence[1], len(ranks), len(self._columns))
        self._decades: Singles = np.full(shape[:2], np.nan, dtype=np.float32)  # the newest steps, in a ring
        self._rows: Singles = np.full(shape, np.nan, dtype=np.float32)  # of the same steps: running means
        self._mean: Singles = np.zeros(shape[1:], dtype=np.float32)
        self._told: list[Told] = []
        ensemble.begin("many" if self._few is None else "few")

    def closed(self, seen: Seen) -> None:
        """A step was scored by the rank channel: score it, decide, and learn from it if it was quiet."""
        if self.ensemble.reason:
            return
        rows = seen.matrix.rows(seen.step)
        if self._few is not None and rows is not None:
            self._few.show(seen.step, rows)
            if seen.quiet:
                self._few.learn(rows)
        state, config = self._state, self.ensemble.config
        z = self._deviations(seen.channel, seen.step)
        if z is not None:
            state.steps = [*state.steps[-(config.persistence[1] - 1) :], seen.step]
            self._push(z)
            self._end(seen)
            self._silence(seen.busy)
            if state.scored > config.restart_steps and len(state.steps) >= config.persistence[1]:
                self._decide(seen)
            self._release(seen)
        if not seen.quiet:
            state.calm = 0
            self.ensemble.doubt()
        elif z is not None:
            state.calm += 1
            self._learn(seen)

    def level_of(self, rank: int, fault_class: str) -> tuple[float, float] | None:
        """The rank's level now, and the threshold for this class; None before the ensemble is fitted."""
        width = self.ensemble.config.persistence[1]
        if self.ensemble.committee is None or rank not in self._ranks or len(self._state.steps) < width:
            return None
        decades = np.nan_to_num(self._decades[:, self._ranks.index(rank)]).astype(np.float64)
        found = float(level(decades, self.ensemble.config.persistence[0]))
        return found, self.ensemble.threshold(len(self._ranks), fault_class)

    def take(self) -> list[Told]:
        """What began and ended since the last call."""
        told, self._told = self._told, []
        return told

    def support(self, finding: Finding, matrix: StepMatrix, channel: RankChannel) -> Support | None:
        """What the ensemble thinks of a rank that a rule has found; a finding of a node has none."""
        if finding.rank is None or self.ensemble.reason:
            return None
        column = self._ranks.index(finding.rank)
        steps = [step for step in finding.steps if step in self._state.steps]
        if self.ensemble.committee is None:
            rows = self._rows[[self._slot(step) for step in steps], column].astype(np.float64)
            rows = rows[np.isfinite(rows).any(axis=1)]
            return cold_support(float(cold_decades(rows)[-1]), finding, matrix) if len(rows) else None
        opinions = self._opinions(column, steps)
        return support_of(opinions, self._subject(finding.rank, column, channel), matrix, steps) if opinions else None

    def begins(self, finding: Finding, support: Support | None) -> bool:
        """A rule has found this. False: people called such findings wrong, it waits until it is odder."""
        key = f"{finding.kind}/{finding.subject}"
        self._state.open.pop(key, None)  # it is the rule's from now on, and ends when the rule says so
        if finding.rank is None:
            self._hand_over(finding)
        least = self.ensemble.least(finding.kind)
        if finding.rank is None or support is None or support.decades >= least:
            return True
        self._state.held[key] = finding
        return False

    def _hand_over(self, finding: Finding) -> None:
        """A rule has found the whole node: what was said of its ranks is over."""
        for key, one in list(self._state.open.items()):
            if key.startswith(f"{finding.kind}/") and self._nodes[one.column] == finding.node:
                del self._state.open[key]
                self._told.append(Ended(key))

    def ends(self, finding: Finding) -> None:
        """A rule's finding is over: what it was found by is not to be found again."""
        self._state.held.pop(f"{finding.kind}/{finding.subject}", None)
        self._state.open.pop(f"{finding.kind}/{finding.subject}", None)
        if finding.rank is not None:
            self._forget(self._ranks.index(finding.rank))

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Between two calls of `take`: JSON-able fields, and arrays for an npz file."""
        assert not self._told
        state: dict[str, Any] = {"watch": msgspec.to_builtins(self._state)}
        arrays: dict[str, npt.NDArray[Any]] = {"decades": self._decades, "rows": self._rows, "mean": self._mean}
        if self._few is not None:
            state["few"], mine = self._few.to_state()
            arrays |= {f"few.{name}": array for name, array in mine.items()}
        return state, arrays

    def load_state(self, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        self._state = msgspec.convert(state["watch"], _State)
        self._decades, self._rows, self._mean = (arrays[name].copy() for name in ("decades", "rows", "mean"))
        if self._few is not None:
            few = {name.removeprefix("few."): array for name, array in arrays.items() if name.startswith("few.")}
            self._few.load_state(state["few"], few)

    def _deviations(self, channel: RankChannel, step: int) -> Singles | None:
        """rank × feature of one of the newest steps."""
        few = self._few
        found = few.deviations(step) if few is not None else channel.deviations(step, from_mates=True)
        return None if found is None else found[:, self._columns]

    def _push(self, z: Singles) -> None:
        """One more scored step: its running means and their decades."""
        told = np.isfinite(z)
        towards = np.float32(self.ensemble.config.smooth) * (z - self._mean)
        np.add(self._mean, towards, out=self._mean, where=told)
        slot = self._state.scored % len(self._rows)
        self._state.scored += 1
        self._rows[slot] = np.nan
        np.copyto(self._rows[slot], self._mean, where=told)
        self._decades[slot] = self._scored(self._rows[slot])

    def _slot(self, step: int) -> int:
        """Where one of the newest steps stands in the rings."""
        state = self._state
        return (state.scored - len(state.steps) + state.steps.index(step)) % len(self._rows)

    def _forget(self, column: int) -> None:
        """What was odd of this rank is told; it begins anew."""
        self._decades[:, column], self._rows[:, column], self._mean[column] = np.nan, np.nan, 0.0

    def _scored(self, z: Singles) -> Singles:
        """Decades of each rank; NaN where it has told nothing yet."""
        committee = self.ensemble.committee
        if committee is None:
            return np.full(len(z), np.nan, dtype=np.float32)
        rows = z.astype(np.float64)
        decades = committee.decades(rows, self.ensemble.config.suspects_max)
        return np.where(np.isfinite(rows).any(axis=1), decades, np.nan).astype(np.float32)

    def _silence(self, busy: Sequence[str]) -> None:
        """What is open about a rank or its node counts for nothing more here."""
        named = {part for key in busy if key not in self._state.open for part in [key.rpartition("/")[2]]}
        if named:
            gone = [
                column for column, (rank, node) in enumerate(zip(self._ranks, self._nodes, strict=True))
                if str(rank) in named or node in named
            ]  # fmt: skip
            self._decades[:, gone] = np.nan
            self._mean[gone] = 0.0

    def _decide(self, seen: Seen) -> None:
        ensemble, state, config = self.ensemble, self._state, self.ensemble.config
        if ensemble.committee is None:
            return
        count = len(self._ranks)
        levels = level(np.nan_to_num(self._decades).astype(np.float64), config.persistence[0])
        least = min(ensemble.threshold(count, kind) for kind in ("straggler", "data_stall"))
        over = np.flatnonzero(levels >= least)
        opened = {one.column for one in state.open.values()}
        over = over[~np.isin(over, list(opened))] if opened else over
        if not len(over) or len(over) > max(4, int(config.ranks_at_once * count)):
            return
        over = over[np.argsort(-levels[over], kind="stable")][:LOOKED_AT_MAX]
        crowded = {node for node in self._nodes if sum(self._nodes[int(one)] == node for one in over) > 1}
        for column in map(int, over):
            alone = self._nodes[column] not in crowded or len(set(self._nodes)) == 1
            found = self._named(seen, column, float(levels[column])) if alone else None
            if found is None:
                continue
            if not ensemble.decides:
                ensemble.alarmed_alone()
                continue
            told = condition_alone(found, seen.matrix, seen.roster)
            if told.key in state.held:
                continue  # a rule has found it too, and is heard below
            state.open[told.key] = _Open(column)
            self._told.append(told)

    def _named(self, seen: Seen, column: int, reached: float) -> Named | None:
        """Whom and what to blame for a level that was reached; None where it is too small to care about."""
        config, state = self.ensemble.config, self._state
        least = min(self.ensemble.threshold(len(self._ranks), kind) for kind in ("straggler", "data_stall"))
        steps = [step for step in state.steps if self._decades[self._slot(step), column] >= least]
        opinions = self._opinions(column, steps)
        if not opinions:
            return None
        subject = self._subject(self._ranks[column], column, seen.channel)
        found = attribute(
            opinions, subject, seen.matrix, (state.steps, steps), reached, config,
            lambda kind: self.ensemble.threshold(len(self._ranks), kind),
        )  # fmt: skip
        return found if found is not None and self._beyond_the_others(seen.matrix, found.finding, column) else None

    def _beyond_the_others(self, matrix: StepMatrix, finding: Finding, column: int) -> bool:
        """In a small job a rank must be beyond the largest of the others, each against its own normal: what hits a core
        or the host hits more than one."""
        if self._few is None:
            return True
        apart = []
        for step in finding.steps:
            rows = matrix.rows(step)
            if rows is not None:
                ratios = self._few.ratios(rows, finding.metric)
                others = np.delete(ratios, column)
                others = others[np.isfinite(others)]
                apart += [float(ratios[column] / others.max())] if len(others) else []
        if finding.kind == "data_stall":
            return bool(apart) and finding.value >= 2.0 * finding.peers_median
        return bool(apart) and float(np.median(apart)) >= 1.0 + self.ensemble.config.few_excess_min

    def _opinions(self, column: int, steps: Sequence[int]) -> list[tuple[Opinion, Floats]]:
        committee = self.ensemble.committee
        assert committee is not None
        rows = [self._rows[self._slot(step), column].astype(np.float64) for step in steps]
        return [(committee.opinion(row), row) for row in rows if np.isfinite(row).any()]

    def _subject(self, rank: int, column: int, channel: RankChannel) -> Who:
        roles = channel.roles
        peers = np.setdiff1d(np.flatnonzero(roles == roles[column]), [column])
        mates = np.array([at for at, node in enumerate(self._nodes) if node == self._nodes[column]], dtype=np.int64)
        return rank, self._nodes[column], column, peers, mates

    def _end(self, seen: Seen) -> None:
        """Over when the decades have stayed below half the threshold for some steps."""
        state, config = self._state, self.ensemble.config
        if self.ensemble.committee is None:  # what was fitted could not be loaded again: nobody watches them
            self._told += [Ended(key) for key in state.open]
            state.open = {}
        for key, one in list(state.open.items()):
            value = self._decades[self._slot(seen.step), one.column]
            half = self.ensemble.threshold(len(self._ranks), key.partition("/")[0]) / 2
            one.calm = one.calm + 1 if value < half else 0 if np.isfinite(value) else one.calm
            if one.calm >= config.close_steps:
                del state.open[key]
                self._forget(one.column)
                self._told.append(Ended(key))

    def _release(self, seen: Seen) -> None:
        """Rules' findings that feedback keeps back and that are odd enough by now."""
        for key, finding in list(self._state.held.items()):
            newest = msgspec.structs.replace(finding, steps=tuple(self._state.steps))
            support = self.support(newest, seen.matrix, seen.channel)
            if support is not None and support.decades >= self.ensemble.least(finding.kind):
                del self._state.held[key]
                self._told.append(condition_of(finding, seen.matrix, seen.roster, support))

    def _learn(self, seen: Seen) -> None:
        """Sample whole windows of quiet steps; each rank's do not overlap."""
        state, config = self._state, self.ensemble.config
        width = config.persistence[1]
        empty: Singles = np.empty((0, width, len(config.features)), dtype=np.float32)
        durations = seen.matrix.values(seen.step, "train.step.duration")
        common = finite_median(durations) if durations is not None else 0.0
        step_seconds = common if np.isfinite(common) else 0.0
        windows = empty
        if state.scored > config.restart_steps and state.calm >= width:
            stride = max(width, -(-len(self._ranks) // config.windows_each_step))
            columns = np.arange(state.scored % stride, len(self._ranks), stride)
            order = np.array([self._slot(step) for step in state.steps])
            windows = self._rows[np.ix_(order, columns)].transpose(1, 0, 2)
            windows = windows[np.all(np.isfinite(windows).any(axis=2), axis=1)]
        self.ensemble.learn(windows, step_seconds)
