"""Launchers on other machines: only they, and their scheduler, can say what lives there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

from ingest.clock import Clock
from recovery.allocation import Allocation, JobRecords, LauncherAddress
from recovery.backend import BackendError, RankView, Unavailable
from recovery.launcher.address import TcpAddress, parse_address
from recovery.launcher.client import LauncherSilent, LauncherUnreachable, ask
from recovery.launcher.ports import port_candidates
from recovery.launcher.proof import JobKey
from recovery.launcher.protocol import FindPort, NodeFile, Placement, Reply, Request

from .launchers import OBSERVE_SECONDS_MAX
from .view import Answer

POLL_SECONDS = 0.2
VOUCH_EVERY_SECONDS = 0.5  # the scheduler is asked about a silent node no more often

KeyOf = Callable[[str], JobKey | None]  # the key of a job's launchers; None: its launchers are on this machine


class InAllocation:
    """`Reach` of launchers in a scheduler's allocation. Made for each call."""

    poll_seconds = POLL_SECONDS

    def __init__(
        self,
        job: str,
        allocation: Allocation,
        records: JobRecords | None,
        key: JobKey | None,
        clock: Clock,
        random: Random,
    ) -> None:
        self._job = job
        self._allocation = allocation
        self._records = records
        self._key = key
        self._clock = clock
        self._random = random
        self._remembered: tuple[LauncherAddress, ...] | None = None
        self._vouched: dict[str, tuple[float, bool]] = {}  # by node: when the scheduler was asked, what it said

    def remember(self, launchers: tuple[LauncherAddress, ...]) -> None:
        """These are all there are, and the scheduler cannot be asked."""
        self._remembered = launchers

    def addresses(self) -> Sequence[LauncherAddress]:
        if self._remembered is not None:
            return self._remembered
        return sorted(self._allocation.launchers(self._job), key=lambda launcher: launcher.node)

    def ask(self, launcher: LauncherAddress, request: Request, timeout_seconds: float) -> Answer:
        node, slots = launcher.node, launcher.slots
        try:
            reply = ask(
                launcher.address, request, timeout_seconds=timeout_seconds, clock=self._clock, key=self._key, node=node
            )
        except LauncherUnreachable as error:
            trouble, sent = str(error), False
        except LauncherSilent as error:
            trouble, sent = str(error), True
        else:
            return Answer(node, slots, reply, sent=True)
        return Answer(node, slots, trouble=trouble, sent=sent, over=self._is_vouched(node))

    def last_ranks(self, node: str, placement: Placement) -> tuple[RankView, ...]:
        """Ranks whose launcher is silent may live, until the scheduler vouches that they do not."""
        state: Literal["exited", "running"] = "exited" if self._is_vouched(node) else "running"
        return tuple(RankView(place.rank, node, 0, state) for place in placement.places if place.node == node)

    def doubt(self, node: str, trouble: str) -> BackendError | None:
        if self._is_vouched(node):
            return None
        return Unavailable(
            f"whether ranks live on {node} cannot be said, and {self._allocation.name} does not vouch for it: {trouble}"
        )

    def is_out(self, node: str) -> bool:
        """A node that the scheduler has given up is excluded, so that nothing is started beside what may live there."""
        if self._is_vouched(node):
            return True
        if self._records is None or node not in self._allocation.look(self._job).down_nodes:
            return False
        excluded = self._records.excluded()
        if node not in excluded:
            self._records.write_excluded(excluded | {node})
        return self._allocation.nothing_runs_on(self._job, node)

    def see_gone(self, node: str, give_up_at: float) -> bool:
        return self.is_out(node)

    def rendezvous(self, launcher: LauncherAddress, reply: Reply) -> tuple[str, int]:
        answer = self.ask(launcher, FindPort(candidates=port_candidates(self._random)), OBSERVE_SECONDS_MAX)
        if answer.reply is None or answer.reply.port == 0:
            why = answer.reply.text if answer.reply is not None else answer.trouble
            raise Unavailable(f"no port for the ranks' rendezvous on {launcher.node}: {why}")
        told = reply.state.host if reply.state is not None else ""
        return told or host_of(launcher.address), answer.reply.port

    def _is_vouched(self, node: str) -> bool:
        """What the scheduler says of a silent node; False where it does not answer, for that proves nothing."""
        if self._remembered is not None:
            return False
        now = self._clock.monotonic()
        asked_at, said = self._vouched.get(node, (float("-inf"), False))
        if said or now - asked_at < VOUCH_EVERY_SECONDS:
            return said
        try:
            said = self._allocation.nothing_runs_on(self._job, node)
        except BackendError:
            said = False
        self._vouched[node] = (now, said)
        return said


def host_of(address: str) -> str:
    """The host in a launcher's address; empty where it is a socket of this machine."""
    where = parse_address(address)
    return where.host if isinstance(where, TcpAddress) else ""


def told_by(files: Sequence[NodeFile], nodes: Sequence[str]) -> tuple[LauncherAddress, ...]:
    """Where the launchers of these nodes listen, as their files in a shared folder tell it."""
    return tuple(
        LauncherAddress(file.node, file.address or f"unix:{file.control_socket}", file.slots)
        for file in files
        if file.node in nodes
    )
