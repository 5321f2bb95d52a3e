"""What the rank channel needs to see before it speaks: one frozen value, measured as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from detectors.ranks.few_peers import FewPeersConfig
from detectors.ranks.hysteresis import EvidenceConfig
from detectors.ranks.many_peers import ManyPeersConfig


@dataclass(frozen=True, slots=True)
class RankChannelConfig:
    """When steps count, when peers are chosen, and how much each kind of evidence needs at least."""

    few: FewPeersConfig = field(default_factory=FewPeersConfig)
    many: ManyPeersConfig = field(default_factory=ManyPeersConfig)
    evidence: EvidenceConfig = field(default_factory=EvidenceConfig)
    warmup_steps: int = 5  # after every (re)start
    close_steps: int = 8
    contended_steps: int = 12
    contended_of_steps: int = 16
    cold_z: float = 8.0  # with many peers, while offsets are learned
    cold_excess: float = 0.30
    roles_at: tuple[int, ...] = (25, 200)  # scored steps after which roles are learned, then every `roles_every`
    roles_every: int = 1000
    open_max: int = 64
    ranks_at_once: float = 0.03  # of the ranks; more than these (and four) odd at once are a part of the job
    nodes_at_once: float = 0.25
    rank_floors: tuple[float, ...] = (0.08, 0.06, 0.05, 0.04)  # least threshold of each scale, with 64 ranks
    floors_grow: float = 0.20  # by this much of themselves with each doubling of the ranks: one in thousands wanders
    link_floors: tuple[float, ...] = (0.15, 0.10, 0.06, 0.04)
    delay_floors: tuple[float, ...] = (0.15, 0.08, 0.05, 0.03)
    node_floors: tuple[float, ...] = (0.30, 0.18, 0.125, 0.07)  # bursts last for half a minute
    few_node_floors: tuple[float, ...] = (0.40, 0.25, 0.12, 0.06)  # nodes too few to calibrate on

    def floors_for(self, ranks: int) -> tuple[float, ...]:
        """The least thresholds in a job of so many ranks."""
        grown = 1.0 + self.floors_grow * max(0.0, math.log2(max(1, ranks) / 64.0))
        return tuple(grown * floor for floor in self.rank_floors)

    def with_ratio(self, ratio: float) -> RankChannelConfig:
        """The same with another excess at which a rank is a straggler; what depends on it goes along."""
        by = ratio / self.few.excess_open
        few = replace(
            self.few, excess_open=ratio, excess_close=ratio / 2, excess_open_alone=by * self.few.excess_open_alone,
            long_excess=by * self.few.long_excess, long_excess_alone=by * self.few.long_excess_alone,
            node_excess=by * self.few.node_excess,
        )  # fmt: skip
        return replace(self, few=few, rank_floors=tuple(by * floor for floor in self.rank_floors))
