"""A job as its launchers, its files and /proc tell it: one `Observation` of many answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ingest.events import RankPlace
from recovery.backend import NodeView, Observation, RankView
from recovery.launcher.job_files import JobFiles
from recovery.launcher.procfs import is_alive
from recovery.launcher.protocol import JobSpec, LauncherState, NodeFile, Placement, Reply

Phase = Literal["starting", "running", "failed", "stopped", "finished"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one launcher said: a reply, or why there is none.

    `sent`: the request was handed over. `dead`: the launcher's process is gone.
    """

    node: NodeFile
    reply: Reply | None = None
    trouble: str = ""
    sent: bool = False
    dead: bool = False

    @property
    def state(self) -> LauncherState | None:
        return self.reply.state if self.reply else None


def view_of(files: JobFiles, spec: JobSpec, answers: list[Answer]) -> Observation:
    """The newest attempt of a job, and all nodes there are."""
    placement = files.placement()
    excluded = files.excluded()
    end = files.end()
    attempt, token = (placement.attempt, placement.token) if placement else (0, "")
    ranks = [view for answer in answers for view in _rank_views(answer, placement)]
    nodes = tuple(
        NodeView(answer.node.node, _node_state(answer, placement, excluded), answer.node.slots) for answer in answers
    )
    states = [answer.state for answer in answers if answer.state and answer.state.attempt == attempt]
    stopping = any(state.stop_requested for state in states)
    phase: Phase = end.outcome if end else _phase(placement, ranks, stopping=stopping)
    in_order = tuple(sorted(ranks, key=lambda view: view.rank))
    return Observation(spec.job, attempt, token, phase, in_order, nodes)


def _rank_views(answer: Answer, placement: Placement | None) -> list[RankView]:
    """Ranks of the newest attempt on one node. Of a launcher that does not answer, what /proc tells."""
    node, state = answer.node, answer.state
    if placement is None:
        return []
    if state is not None:
        if state.attempt != placement.attempt:
            return []
        return [
            RankView(rank.rank, node.node, rank.pid, rank.state, rank.step, rank.exit_code, rank.signal)
            for rank in state.ranks
        ]
    if node.attempt != placement.attempt:
        return []
    return [
        RankView(rank.rank, node.node, rank.pid, "running" if is_alive(rank.pid, rank.start_time) else "exited")
        for rank in node.ranks
    ]


def places_on(nodes: Iterable[str], per_node: int) -> list[RankPlace]:
    """Ranks node by node, in group-rank order."""
    return [
        RankPlace(rank=group * per_node + local, local_rank=local, node=node)
        for group, node in enumerate(nodes)
        for local in range(per_node)
    ]


def _node_state(
    answer: Answer, placement: Placement | None, excluded: frozenset[str]
) -> Literal["active", "spare", "excluded", "lost"]:
    if answer.node.node in excluded:
        return "excluded"
    if answer.reply is None:
        return "lost"
    return "active" if placement and answer.node.node in placement.nodes else "spare"


def _phase(placement: Placement | None, ranks: list[RankView], *, stopping: bool) -> Phase:
    if placement is None:
        return "stopped"
    living = [rank for rank in ranks if rank.state != "exited"]
    if len(ranks) == len(placement.places) and all(rank.exit_code == 0 for rank in ranks):
        return "finished"
    if not living and (stopping or not ranks):
        return "stopped"
    if any(rank.state == "exited" and rank.exit_code != 0 for rank in ranks):
        return "failed"
    return "running" if len(living) == len(placement.places) else "starting"
