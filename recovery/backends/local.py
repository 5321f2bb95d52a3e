"""Launchers on this machine: nodes are virtual, found by their files, asked over their sockets, known by /proc."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from ingest.clock import Clock
from recovery.action import CheckResult
from recovery.allocation import LauncherAddress
from recovery.backend import (
    BackendError,
    Conflict,
    Observation,
    RankView,
    Rejected,
    StartRequest,
    Unavailable,
)
from recovery.launcher.client import LauncherSilent, LauncherUnreachable, ask
from recovery.launcher.job_files import BrokenJobFile, JobFiles
from recovery.launcher.ports import PORTS, first_free_port, port_candidates
from recovery.launcher.procfs import all_processes, is_alive, kill_exactly
from recovery.launcher.protocol import CheckName, JobEnd, NodeFile, Placement, Reply, Request

from .launchers import JobOutcome, Launchers
from .view import Answer

POLL_SECONDS = 0.05


class LocalBackend:
    """`Backend` over the launchers of `transom run` on this machine.

    A launcher that does not answer is lost; where its ranks must be gone it is killed, and they go with it.
    """

    name = "local"

    def __init__(self, jobs_folder: Path, clock: Clock, random: Random | None = None) -> None:
        self._jobs_folder = jobs_folder
        self._clock = clock
        self._random = random or Random(0)  # chooses ports; each is probed before it is used

    # Backend

    def observe(self, job: str) -> Observation:
        return self._launchers(job).observe()

    def start(self, request: StartRequest) -> Observation:
        launchers = self._launchers(request.job)
        written = launchers.written()
        launchers.refuse_ended(written)
        last = written.placement
        if last is not None and (last.attempt, last.token) == (request.attempt, request.token):
            placement = last  # asked again: the same ranks on the same nodes
        else:
            if last is not None and request.attempt <= last.attempt:
                raise Conflict(f"attempt {last.attempt} of {request.job} was here, {request.attempt} is not newer")
            answers = launchers.look(written)
            launchers.confirm_gone(request, answers)
            placement = launchers.place(request, written, answers)
        launchers.start_on(written, placement)
        return launchers.observe()

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        launchers = self._launchers(job)
        return launchers.stop(attempt, grace_seconds=grace_seconds, deadline_seconds=deadline_seconds)

    def finish(self, job: str, outcome: JobOutcome, reason: str) -> None:
        self._launchers(job).finish(outcome, reason)

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        return self._launchers(job).collect_evidence(attempt, deadline_seconds)

    def probe(
        self,
        job: str,
        attempt: int,
        checks: Sequence[CheckName],
        groups: Sequence[Sequence[str]],
        *,
        seconds: float,
    ) -> list[CheckResult]:
        return self._launchers(job).probe(attempt, checks, groups, seconds)

    # For the front and the command line

    def inject(self, job: str, rank: int, fault: str, parameters: dict[str, float]) -> str:
        """Break one rank on purpose; the sentence that says why nothing was done, empty where it was."""
        return self._launchers(job).inject(rank, fault, parameters)

    def wait_for_launchers(self, job: str, deadline_seconds: float) -> bool:
        """Whether enough launchers for the job answer in time."""
        return self._launchers(job).wait(deadline_seconds)

    def end(self, job: str) -> JobEnd | None:
        """How the job has ended; None: it has not."""
        return self._launchers(job).written().end

    def _launchers(self, job: str) -> Launchers:
        try:
            files = JobFiles(self._jobs_folder, job)
            spec = files.spec()
        except (ValueError, BrokenJobFile) as error:
            raise Rejected(str(error)) from error
        if spec is None:
            raise Rejected(f"there is no job {job} in {self._jobs_folder}; `transom run` makes one")
        return Launchers(job, files, ThisMachine(files, self._clock, self._random), self._clock)


class ThisMachine:
    """`Reach` of launchers on this machine: their files say where they and their ranks are, /proc whether they live."""

    poll_seconds = POLL_SECONDS

    def __init__(self, files: JobFiles, clock: Clock, random: Random) -> None:
        self._files = files
        self._clock = clock
        self._random = random
        self._nodes: dict[str, NodeFile] = {}

    def addresses(self) -> Sequence[LauncherAddress]:
        self._nodes = self._files.nodes()
        return [LauncherAddress(node.node, f"unix:{node.control_socket}", node.slots) for node in self._nodes.values()]

    def ask(self, launcher: LauncherAddress, request: Request, timeout_seconds: float) -> Answer:
        node, slots = self._nodes[launcher.node], launcher.slots
        if not is_alive(node.pid, node.start_time):
            return Answer(node.node, slots, trouble=f"the launcher of {node.node} is dead", over=True)
        try:
            reply = ask(launcher.address, request, timeout_seconds=timeout_seconds, clock=self._clock)
        except LauncherUnreachable as error:
            trouble, sent = str(error), False
        except LauncherSilent as error:
            trouble, sent = str(error), True
        else:
            return Answer(node.node, slots, reply, sent=True)
        return Answer(node.node, slots, trouble=trouble, sent=sent, over=not is_alive(node.pid, node.start_time))

    def last_ranks(self, node: str, placement: Placement) -> tuple[RankView, ...]:
        file = self._nodes.get(node)
        if file is None:  # its launcher has gone in good order, and took its file away when no rank lived
            return tuple(RankView(place.rank, node, 0, "exited") for place in placement.places if place.node == node)
        if file.attempt != placement.attempt:
            return ()
        return tuple(
            RankView(rank.rank, node, rank.pid, "running" if is_alive(rank.pid, rank.start_time) else "exited")
            for rank in file.ranks
        )

    def doubt(self, node: str, trouble: str) -> BackendError | None:
        file = self._nodes.get(node)
        if file is None:
            return None
        if is_alive(file.pid, file.start_time):
            return Unavailable(f"whether ranks live on {node} cannot be said: {trouble}")
        if ranks_of(file):
            return Conflict(f"ranks of {file.job} still live on {node}, whose launcher is dead; stop them first")
        return None

    def is_out(self, node: str) -> bool:
        return False  # a launcher that lives may answer yet; one that is dead has said so in its answer

    def see_gone(self, node: str, give_up_at: float) -> bool:
        """SIGKILL to a launcher that does not answer and to what it ran: only then is that certainly gone."""
        file = self._nodes.get(node)
        if file is None:
            return True
        ranks = ranks_of(file)
        if not ranks and not is_alive(file.pid, file.start_time):
            return True
        kill_exactly(file.pid, file.start_time)  # first, so that nobody starts another zygote
        if file.zygote is not None:
            kill_exactly(file.zygote.pid, file.zygote.start_time)
        for pid, start_time in ranks:
            kill_exactly(pid, start_time)
        while ranks_of(file) or any(is_alive(pid, start_time) for pid, start_time in ranks):
            if self._clock.monotonic() >= give_up_at:
                return False
            self._clock.sleep(POLL_SECONDS)
        return True

    def rendezvous(self, launcher: LauncherAddress, reply: Reply) -> tuple[str, int]:
        port = first_free_port(port_candidates(self._random), "127.0.0.1")
        if port == 0:
            raise Unavailable(f"of the ports between {PORTS[0]} and {PORTS[1]} none that was tried is free")
        return "", port


def ranks_of(node: NodeFile) -> list[tuple[int, int]]:
    """Process id and start time of living ranks: those written down, and what the zygote has forked."""
    ranks = [(rank.pid, rank.start_time) for rank in node.ranks if is_alive(rank.pid, rank.start_time)]
    zygote = node.zygote
    if zygote is not None:
        theirs = [
            stat
            for stat in all_processes()
            if zygote.pid in (stat.parent, stat.session) and stat.start_time >= zygote.start_time
        ]
        ranks += [(stat.pid, stat.start_time) for stat in theirs if stat.state not in "ZX"]
    return [rank for rank in ranks if zygote is None or rank != (zygote.pid, zygote.start_time)]


def start_first_attempt(
    backend: LocalBackend, job: str, token: str, *, launchers_seconds: float, resume_step: int | None = None
) -> Observation:
    """Wait for the job's launchers, then start the attempt after the last one there was (1 for a new job).

    Raises Unavailable where too few launchers answer in time, and what `start` raises.
    """
    if not backend.wait_for_launchers(job, launchers_seconds):
        raise Unavailable(f"too few launchers of {job} answered within {launchers_seconds:.0f} s; see their logs")
    attempt = backend.observe(job).attempt + 1
    return backend.start(StartRequest(job, attempt, token, resume_step=resume_step))
