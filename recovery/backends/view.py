"""A job as its launchers and its records tell it: one `Observation` of many answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from recovery.allocation import JobRecords
from recovery.backend import NodeView, Observation, RankView, Unavailable
from recovery.launcher.job_files import BrokenJobFile
from recovery.launcher.protocol import JobEnd, JobSpec, LauncherState, Placement, Reply

Phase = Literal["starting", "running", "failed", "stopped", "finished"]


@dataclass(frozen=True, slots=True)
class Written:
    """What the records of a job say."""

    spec: JobSpec
    placement: Placement | None
    excluded: frozenset[str]
    end: JobEnd | None

    @classmethod
    def of(cls, records: JobRecords) -> Written | None:
        """None where there is no such job. Raises Unavailable where they cannot be read."""
        try:
            spec = records.spec()
            if spec is None:
                return None
            return cls(spec, records.placement(), records.excluded(), records.end())
        except BrokenJobFile as error:
            raise Unavailable(str(error)) from error


@dataclass(frozen=True, slots=True)
class Answer:
    """What one launcher said: a reply, or why there is none.

    `sent`: the request was handed over. `over`: asking again would be in vain. `last_ranks`: where there is no reply,
    what is known of its ranks otherwise.
    """

    node: str
    slots: int
    reply: Reply | None = None
    trouble: str = ""
    sent: bool = False
    over: bool = False
    last_ranks: tuple[RankView, ...] = ()

    @property
    def state(self) -> LauncherState | None:
        return self.reply.state if self.reply else None


def view_of(written: Written, answers: Sequence[Answer], *, generation: int = 0) -> Observation:
    """The newest attempt of a job, and all nodes there are. `generation`: of the nodes that the job has now."""
    placement, end = written.placement, written.end
    attempt, token = (placement.attempt, placement.token) if placement else (0, "")
    ranks = [view for answer in answers for view in _rank_views(answer, attempt)]
    nodes = tuple(NodeView(answer.node, _node_state(answer, written), answer.slots) for answer in answers)
    states = [answer.state for answer in answers if answer.state and answer.state.attempt == attempt]
    stopping = any(state.stop_requested for state in states)
    unheard = _unheard(placement, answers) if placement and placement.generation == generation else 0
    phase: Phase = end.outcome if end else _phase(placement, ranks, stopping=stopping, unheard=unheard)
    return Observation(
        written.spec.job,
        attempt,
        token,
        phase,
        tuple(sorted(ranks, key=lambda view: view.rank)),
        nodes,
        nodes_wanted=written.spec.nodes,
        nodes_min=written.spec.min_nodes,
        ended=end is not None,
    )


def _rank_views(answer: Answer, attempt: int) -> list[RankView]:
    """Ranks of the newest attempt on one node."""
    if attempt == 0:
        return []
    state = answer.state
    if state is None:
        return list(answer.last_ranks)
    if state.attempt != attempt:
        return []
    return [
        RankView(
            rank.rank, answer.node, rank.pid, rank.state, rank.step, rank.exit_code, rank.signal,
            stopped_by_us=rank.stopped_by_launcher, error=rank.error, ended_at=rank.ended_at,
        )
        for rank in state.ranks
    ]  # fmt: skip


def _node_state(answer: Answer, written: Written) -> Literal["active", "spare", "excluded", "lost", "leaving"]:
    if answer.node in written.excluded:
        return "excluded"
    if answer.reply is None:
        return "lost"
    if answer.state is not None and answer.state.leaving:
        return "leaving"
    return "active" if written.placement and answer.node in written.placement.nodes else "spare"


def _unheard(placement: Placement, answers: Sequence[Answer]) -> int:
    """Launchers that have not been told of the attempt and may be: whoever placed it went no further."""
    states = [answer.state for answer in answers if answer.state and answer.node in placement.nodes]
    return sum(max(state.attempt, state.fenced_attempt) < placement.attempt for state in states)


def _phase(placement: Placement | None, ranks: Sequence[RankView], *, stopping: bool, unheard: int) -> Phase:
    """Starting is what some launcher has not heard of yet; whose ranks are all known, runs or has run."""
    if placement is None:
        return "stopped"
    living = [rank for rank in ranks if rank.state != "exited"]
    complete = len(ranks) == len(placement.places)
    if complete and all(rank.exit_code == 0 for rank in ranks):
        return "finished"
    if not living and stopping:
        return "stopped"
    if any(rank.state == "exited" and rank.exit_code != 0 for rank in ranks):
        return "failed"
    if unheard:
        return "starting"
    if not living and not ranks:
        return "stopped"
    return "running" if complete else "starting"
