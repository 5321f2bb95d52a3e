"""Whom a backend can ask about a job, and what is certain of who does not answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from recovery.allocation import LauncherAddress
from recovery.backend import BackendError, RankView
from recovery.launcher.protocol import Placement, Reply, Request

from .view import Answer, Written

NODES_AT_ONCE_MAX = 32


class Reach(Protocol):
    """The launchers of one job, as far as a backend can reach them. Whatever cannot be asked is lost; gone is what
    is certain."""

    poll_seconds: float  # between two looks at something that may change by itself

    def addresses(self) -> Sequence[LauncherAddress]:
        """Every launcher that is known, by name in order."""
        ...

    def ask(self, launcher: LauncherAddress, request: Request, timeout_seconds: float) -> Answer:
        """Ask one; `over` in the answer where its launcher is certainly gone."""
        ...

    def last_ranks(self, node: str, placement: Placement) -> tuple[RankView, ...]:
        """The ranks of an attempt on a node that does not answer; "exited" only what is certainly gone."""
        ...

    def doubt(self, node: str, trouble: str) -> BackendError | None:
        """Why ranks may live on a node that does not answer; None: certainly none does."""
        ...

    def is_out(self, node: str) -> bool:
        """While a stop waits for a silent node: nothing lives there, or it is out of this job for good."""
        ...

    def see_gone(self, node: str, give_up_at: float) -> bool:
        """The wait is over: do what can be done so that no rank lives on a silent node; True: none does."""
        ...

    def rendezvous(self, launcher: LauncherAddress, reply: Reply) -> tuple[str, int]:
        """Host and free port for the ranks' rendezvous on the node of group rank 0, which has given this reply.

        Raises Unavailable.
        """
        ...


def ask_these(
    reach: Reach, launchers: Sequence[LauncherAddress], request: Request, timeout_seconds: float
) -> list[Answer]:
    """All at once."""
    if not launchers:
        return []
    with ThreadPoolExecutor(min(NODES_AT_ONCE_MAX, len(launchers))) as pool:
        return list(pool.map(lambda one: reach.ask(one, request, timeout_seconds), launchers))


def ask_all(reach: Reach, written: Written, request: Request, timeout_seconds: float) -> list[Answer]:
    """Every launcher; a node of the newest attempt that has none any more is a silent one, unless the job is over."""
    answers = ask_these(reach, reach.addresses(), request, timeout_seconds)
    placement = written.placement
    if placement is None or written.end is not None:
        return answers
    here = {answer.node for answer in answers}
    slots = written.spec.nproc_per_node
    answers += [
        Answer(node, slots, trouble=f"{node} has no launcher any more", over=True)
        for node in placement.nodes
        if node not in here
    ]
    return [
        answer if answer.reply is not None else replace(answer, last_ranks=reach.last_ranks(answer.node, placement))
        for answer in answers
    ]
