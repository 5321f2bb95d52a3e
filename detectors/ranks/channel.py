"""The rank channel: compares every rank with its peers, step by step, and names the odd one.

Peers are the ranks of one role. Few of them (2 to 7): `few_peers`; many (8 and more): `many_peers`, with evidence on
several time scales (`hysteresis`). What most ranks of a node share is the node's (`node_view`). A rank without peers
is not compared with anything: its own history cannot tell a fault from a longer sequence or a busy neighbour, and
what hits the whole job is the job channel's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.ranks.config import RankChannelConfig
from detectors.ranks.excess import OWN, WALL, far_out, rows_of
from detectors.ranks.few_peers import FEW_MAX, FewPeers
from detectors.ranks.finding import Finding
from detectors.ranks.hysteresis import SCALES, Evidence, Singles, since_shift
from detectors.ranks.many_peers import ManyPeers
from detectors.ranks.node_view import NodeView
from detectors.ranks.open_findings import KIND_OF, Opened, OpenFindings, Seen
from detectors.ranks.roles import given_roles, learned_roles
from detectors.steps import Floats, Ints, StepMatrix

KEPT_STEPS = 64  # scored steps remembered
ELEVATED = 0.6  # a mate that is so far towards the same finding shares it
KNOWN_STEPS = 40  # what is open for less may yet be a burst, and tells thresholds what bursts are
NODE_SHARE = 0.75  # so many of a node's ranks make it the node


class _State(msgspec.Struct):
    metric: str = ""
    scored: list[int] = []  # the newest scored steps, oldest first
    count: int = 0
    roles: list[int] = []  # group number of each rank
    given: list[str] = []
    taken: bool = False  # the roles given are in use
    told: int = 0
    warm: bool = False  # offsets of many peers are learned


class RankChannel:
    """Scores closed steps; `score` returns what began and what ended."""

    def __init__(
        self, ranks: list[int], nodes: list[str], config: RankChannelConfig | None = None, roles: Sequence[str] = ()
    ) -> None:
        """`roles`: a word for each rank where the job gives them; equal words are peers."""
        self.config = config or RankChannelConfig()
        self.ranks, self.nodes = list(ranks), list(nodes)
        count = len(ranks)
        self._state = _State(roles=[0] * count)
        self._roles: tuple[list[int], Ints] = ([], np.empty(0, dtype=np.int64))  # the same, as an array
        self._view = NodeView(nodes)
        self._open = OpenFindings(self.ranks, self.nodes, self._view, self.config.open_max)
        self._few = FewPeers([], self._view, count, self.config.few)
        self._many = ManyPeers(nodes, self.config.many) if count > FEW_MAX else None
        # nodes are held against the whole job: a role may live on two of them, of which neither is the odd one
        everyone = replace(self.config.many, cap_floors=math.inf, odd_tests=(), odd_every=0)
        self._everyone = ManyPeers(nodes, everyone, keeps=False)
        self._evidence, self._node_evidence = self._make_evidence()
        self.give_roles(roles)
        self._take_roles(None)

    @property
    def learned(self) -> int:
        """Clean steps in the ranks' bases."""
        return self._few.learned if self._many is None else min(self._many.learned, self.config.few.base_steps_max)

    @property
    def anomalous(self) -> bool:
        """Something is odd in the newest step or open: models must not learn from it."""
        return len(self._open) > 0 or (self._many is None and bool(self._few.out[-1].any()))

    @property
    def roles(self) -> Ints:
        """Group number of each rank, in the order of `ranks`."""
        if self._roles[0] is not self._state.roles:
            self._roles = (self._state.roles, np.array(self._state.roles, dtype=np.int64))
        return self._roles[1]

    @property
    def peerless(self) -> list[int]:
        """Ranks that nobody else's role is the same as: they are not compared."""
        alone = np.bincount(self.roles, minlength=1)[self.roles] == 1
        return [rank for rank, single in zip(self.ranks, alone, strict=True) if single]

    def warm(self, step: int) -> bool:
        """`step` was the last one scored, with all bases learned."""
        return self.learned >= self.config.few.base_steps_max and self._state.scored[-1:] == [step]

    def base(self, index: int) -> Floats:
        """Each rank's own learned normal in a small job: 0 compute, 1 data, 2 run-queue delay; NaN before."""
        return self._few.base(index)

    def deviations(self, step: int, *, from_mates: bool = False) -> Singles | None:
        """rank × TIMINGS: distance from the peers in their spreads, clipped at 20, NaN = masked. Only with eight and
        more ranks, and for the newest sixteen scored steps; None otherwise. `from_mates`: from the middle of the
        node's ranks instead, in spreads of such distances: sharper for one rank, blind for a whole node."""
        return None if self._many is None else self._many.deviations(step, from_mates=from_mates)

    @property
    def roles_told(self) -> int:
        """`told` of the last `give_roles`."""
        return self._state.told

    def give_roles(self, roles: Sequence[str], told: int = 0) -> None:
        """Roles the job gives, one word for each rank (empty: not given). Used from the next quiet step on."""
        self._state.told = told
        if any(roles) and list(roles) != self._state.given:
            self._state.given, self._state.taken = list(roles), False

    def score(self, matrix: StepMatrix, step: int) -> list[Finding]:
        """Score one closed step. Steps of the warm-up, and steps a rank marked as no plain training, say nothing."""
        first = matrix.first_step
        if len(self.ranks) < 2 or first is None or step < first + self.config.warmup_steps or matrix.is_apart(step):
            return []
        if not self._choose_metric(matrix, step):
            return []
        state = self._state
        self._take_roles(matrix)
        state.scored = [*state.scored[-(KEPT_STEPS - 1) :], step]
        state.count += 1
        if self._few_needed:
            self._few.score(matrix, step, state.metric)
            if not self.anomalous:
                self._few.learn(matrix, step, state.metric)
        if self._many is not None:
            self._score_many(matrix, step)
        return self._judge(matrix)

    def rescore(self, matrix: StepMatrix, step: int) -> list[Finding]:
        """A late message changed a closed step: score it again if it is still in the window."""
        state = self._state
        if step not in state.scored or matrix.values(step, state.metric) is None:
            return []
        if step in self._few.scored:
            self._few.score(matrix, step, state.metric)
        if self._many is not None:
            self._push(matrix, step, len(state.scored) - 1 - state.scored.index(step))
        return self._judge(matrix, count_calm=False)

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        parts: dict[str, Any] = {"few": self._few, **self._parts()}
        states: dict[str, Any] = {"channel": msgspec.to_builtins(self._state), "open": self._open.to_state()}
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, part in parts.items():
            states[name], mine = part.to_state()
            arrays |= {f"{name}.{array}": values for array, values in mine.items()}
        return states, arrays

    @classmethod
    def from_state(
        cls,
        ranks: list[int],
        nodes: list[str],
        state: dict[str, Any],
        arrays: dict[str, npt.NDArray[Any]],
        config: RankChannelConfig | None = None,
    ) -> RankChannel:
        channel = cls(ranks, nodes, config)
        channel._state = msgspec.convert(state["channel"], _State)
        channel._open.load_state(state["open"])
        channel._few.set_groups(channel._groups(few=True))
        for name, part in {"few": channel._few, **channel._parts()}.items():
            mine = {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}
            part.load_state(state[name], mine)
        return channel

    def _parts(self) -> dict[str, Any]:
        """Everything of many peers that has a state of its own."""
        if self._many is None:
            return {}
        ranks = {f"rank-{name}": evidence for name, evidence in self._evidence.items()}
        nodes: dict[str, Any] = {f"node-{name}": one for name, one in self._node_evidence.items()}
        return {"many": self._many, "everyone": self._everyone, **ranks, **nodes}

    def _make_evidence(self) -> tuple[dict[str, Evidence], dict[str, Evidence]]:
        if self._many is None:
            return {}, {}
        config, view = self.config, self._view
        floors = {"link": config.link_floors, "delay": config.delay_floors}
        count, usual = len(self.ranks), config.floors_for(len(self.ranks))
        ranks = {
            name: Evidence(count, floors.get(name, usual), config.evidence, calibrated=True)
            for name in ("compute", "optimizer", "data", "link")
        }
        nodes: dict[str, Evidence] = {}
        if len(view) > 1:
            kinds = ("compute", "optimizer", "data", "link", "delay") if view.many else ("compute", "data")
            for name in kinds:
                least = floors.get(name, config.node_floors) if view.many else config.few_node_floors
                nodes[name] = Evidence(len(view), least, config.evidence, calibrated=view.many)
        return ranks, nodes

    def _choose_metric(self, matrix: StepMatrix, step: int) -> bool:
        """Compute time: own time where ranks can tell it, wall time otherwise; the choice is made once."""
        state = self._state
        if not state.metric:
            own = matrix.values(step, OWN)
            if own is None:
                return False
            state.metric = OWN if np.isfinite(own).sum() * 2 >= len(own) else WALL
            for many in (self._many, self._everyone):
                if many is not None:
                    many.metric = state.metric
        return matrix.values(step, state.metric) is not None

    def _groups(self, *, few: bool) -> list[Ints]:
        """Columns of each group of peers of that size; ranks without a peer are in none."""
        roles = self.roles
        found = [np.flatnonzero(roles == number) for number in np.unique(roles)]
        return [mine for mine in found if (2 <= len(mine) <= FEW_MAX if few else len(mine) > FEW_MAX)]

    @property
    def _few_needed(self) -> bool:
        """There are small groups, or too few nodes to be compared with each other."""
        return self._few.grouped or not self._view.many

    def _take_roles(self, matrix: StepMatrix | None) -> None:
        """At fixed steps, and never while something is open: who is compared with whom."""
        state, config = self._state, self.config
        if matrix is None:
            groups = self.roles
        elif len(self._open):
            return
        elif state.given:
            if state.taken:
                return
            groups, state.taken = given_roles(state.given), True
        else:
            due = state.count in config.roles_at or (state.count and state.count % config.roles_every == 0)
            normals = self._everyone.normals() if due else None
            if normals is None:
                return
            groups = learned_roles(*normals, self.nodes)
        if matrix is not None and np.array_equal(groups, self.roles):
            return
        state.roles = groups.tolist()
        self._few.set_groups(self._groups(few=True))
        if self._many is not None and matrix is not None:
            self._many.set_groups(self._groups(few=False), self._everyone)

    def _forget_evidence(self) -> None:
        for evidence in (*self._evidence.values(), *self._node_evidence.values()):
            evidence.forget()

    def _score_many(self, matrix: StepMatrix, step: int) -> None:
        many, state = self._many, self._state
        assert many is not None
        self._push(matrix, step, None)
        if bool(many.learned) != state.warm:
            state.warm = bool(many.learned)
            self._forget_evidence()
        before = state.count - KNOWN_STEPS
        ranks = self._open.columns(whole_node=False, before=before)
        nodes = self._open.columns(whole_node=True, before=before)
        inside = [column for node in nodes for column in self._view.members(node).tolist()]
        for evidence in self._evidence.values():
            evidence.calibrate(ranks + inside)
        for evidence in self._node_evidence.values():
            evidence.calibrate(nodes)

    def _push(self, matrix: StepMatrix, step: int, age: int | None) -> None:
        """Hand a step's excess to the evidence of ranks and nodes; `age`: it is not the newest one."""
        assert self._many is not None
        warm = self._state.warm
        rows = rows_of(matrix, step)
        mine = self._many.score(matrix, step, rows, again=age is not None)
        if mine is not None:
            told = mine.mates() if warm else far_out(mine.mates(), self.config.cold_z, self.config.cold_excess)
            for name, evidence in self._evidence.items():
                evidence.push(told[name]) if age is None else evidence.replace(age, told[name])
        whole = self._everyone.score(matrix, step, rows, again=age is not None)
        if whole is not None and self._node_evidence:
            told = whole.peers() if warm else far_out(whole.peers(), self.config.cold_z, self.config.cold_excess)
            for name, evidence in self._node_evidence.items():
                values = self._view.excess(told[name])
                evidence.push(values) if age is None else evidence.replace(age, values)

    def _judge(self, matrix: StepMatrix, *, count_calm: bool = True) -> list[Finding]:
        found = self._close(count_calm=count_calm)
        odd = [] if self._many is None else self._many.odd
        state, many = self._state, self._many is not None
        seen = Seen(matrix, self.roles, state.scored, state.metric, state.count, odd, waits=many)
        if self._few_needed:
            found += self._judge_few(seen)
        if self._many is not None:
            found += self._judge_many(seen)
        return found

    def _close(self, *, count_calm: bool) -> list[Finding]:
        """What is over."""
        found = []
        for key, opened in self._open.items():
            if opened.counted:
                among = (self._node_evidence if opened.whole_node else self._evidence)[opened.name]
                over = among.calm(opened.column, opened.scale, opened.threshold)
            else:
                if count_calm:
                    opened.calm = opened.calm + 1 if self._few.calm(opened) else 0
                over = opened.calm >= self.config.close_steps
            if over:
                self._clear(opened)
                found += self._open.end(key)
        return found

    def _clear(self, opened: Opened) -> None:
        """What a finding was found by is not to open another one."""
        if not opened.counted:
            self._few.clear(opened.column, whole_node=opened.whole_node)
            return
        among = self._node_evidence if opened.whole_node else self._evidence
        among[opened.name].clear(opened.column)
        if opened.whole_node and opened.name in self._evidence:
            for column in self._view.members(opened.column).tolist():
                self._evidence[opened.name].clear(column)

    def _judge_few(self, seen: Seen) -> list[Finding]:
        """The measured rule, the long window for weak slowdowns, and whole nodes."""
        few, config, found = self._few, self.config, []
        recent = slice(-config.few.of_steps, None)
        calm_below = config.few.slow_from_start_excess / 2 if few.cold else config.few.excess_close
        slow = few.slow()
        for node in np.flatnonzero(few.slow_nodes()).tolist():
            over = few.node_excess[-config.few.node_of_steps :, node] > config.few.node_excess
            found += self._open.open_node(Opened("compute", node, True), over, seen)
        for column in np.flatnonzero(slow).tolist():
            if not self._open.covers("straggler", column):
                opened = Opened("compute", column, threshold=calm_below)
                found += self._open.open_rank(opened, few.out[recent, column], seen)
        for column in np.flatnonzero(few.weak() & ~slow).tolist():
            if not self._open.covers("straggler", column):
                limit = config.few.long_excess_alone if few.alone[column] else config.few.long_excess
                opened = Opened("compute", column, threshold=limit / 2)
                found += self._open.open_rank(opened, since_shift(few.excess[:, column], limit), seen)
        for column in np.flatnonzero(few.late()).tolist():
            found += self._open.open_rank(Opened("data", column), few.data[recent, column] > 1.0, seen)
        if not self._view.many:
            span = slice(-config.contended_of_steps, None)
            for node in range(len(self._view)):
                members = self._view.members(node)
                busy = np.all(few.delay[span, members] > config.few.contended_delay_fraction, axis=1)
                if int(busy.sum()) >= config.contended_steps:
                    found += self._open.open_node(Opened("delay", node, True), busy, seen)
        return found

    def _judge_many(self, seen: Seen) -> list[Finding]:
        """Nodes first; then ranks whose node-mates do not share it."""
        config, found = self.config, []
        for name, evidence in self._node_evidence.items():
            hits = evidence.hits()
            if len(hits) > max(1, config.nodes_at_once * len(self._view)):
                continue
            for node, scale in hits:
                found += self._open_counted_node(name, node, scale, seen)
        for name, evidence in self._evidence.items():
            hits = [hit for hit in evidence.hits() if not self._open.covers(KIND_OF[name], hit[0])]
            homes = {int(self._view.of_rank[column]) for column, _ in hits}
            if len(hits) > max(4, config.ranks_at_once * len(self.ranks)) and len(homes) > 1:
                continue
            for column, scale in hits:
                node = int(self._view.of_rank[column])
                if self._shared(evidence, node, scale):
                    found += self._open_counted_node(name, node, scale, seen)
                elif self._stands_out(name, column, evidence, scale):
                    opened = Opened(name, column, False, True, scale, evidence.thresholds[scale])
                    found += self._open.open_rank(opened, evidence.onset(column, scale), seen)
        return found

    def _stands_out(self, name: str, column: int, evidence: Evidence, scale: int) -> bool:
        """Who is slow among its mates is slow among all its peers too; else its mates are fast."""
        if name != "compute" or self._many is None:
            return True
        mask = evidence.onset(column, scale)
        scored = self._state.scored[-len(mask) :]
        steps = [step for step, over in zip(scored, mask, strict=True) if over]
        return not self._many.beside_peers(column, steps) < evidence.thresholds[scale] / 2

    def _shared(self, evidence: Evidence, node: int, scale: int) -> bool:
        """Most ranks of the node are well on their way to the same finding."""
        members = self._view.members(node)
        if len(members) < 2 or len(self._view) < 2:
            return False
        return bool((evidence.share(members, scale) >= ELEVATED).mean() >= NODE_SHARE)

    def _open_counted_node(self, name: str, node: int, scale: int, seen: Seen) -> list[Finding]:
        evidence = self._node_evidence.get(name)
        if evidence is None:
            return []
        mask = evidence.onset(node, scale)
        if not mask.any():  # the node's middle is not there yet, though its ranks are: the newest steps will do
            mask = np.ones(min(SCALES[scale].steps, len(seen.scored)), dtype=np.bool_)
        return self._open.open_node(Opened(name, node, True, True, scale, evidence.thresholds[scale]), mask, seen)
