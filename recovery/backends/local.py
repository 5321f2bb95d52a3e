"""Launchers on this machine: nodes are virtual, found by their files and asked over their sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Literal

from ingest.clock import Clock
from recovery.backend import (
    Ambiguous,
    Conflict,
    Observation,
    Rejected,
    StartRequest,
    Unavailable,
)
from recovery.launcher.client import LauncherSilent, LauncherUnreachable, ask
from recovery.launcher.job_files import BrokenJobFile, JobFiles
from recovery.launcher.procfs import all_processes, is_alive, kill_exactly
from recovery.launcher.protocol import (
    CollectStacks,
    Finish,
    InjectFault,
    JobEnd,
    JobSpec,
    NodeFile,
    Observe,
    Placement,
    Request,
    StartRanks,
    StopRanks,
)

from .local_view import Answer, places_on, view_of
from .placing import choose_nodes

OBSERVE_SECONDS_MAX = 2.0
START_SECONDS_MAX = 200.0  # a zygote that is still importing torch is waited for
FINISH_SECONDS_MAX = 20.0
ANSWER_SECONDS = 2.0  # on top of what a launcher was told to take
KILL_SECONDS_MAX = 2.0
POLL_SECONDS = 0.05
NODES_AT_ONCE_MAX = 32
PORTS = (20_000, 30_000)  # below the ports that Linux gives to outgoing connections
PORT_TRIES_MAX = 100

JobOutcome = Literal["finished", "failed", "stopped"]


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
        files, spec = self._job(job)
        return view_of(files, spec, self._ask_all(files, Observe(), OBSERVE_SECONDS_MAX))

    def start(self, request: StartRequest) -> Observation:
        files, spec = self._job(request.job)
        end = files.end()
        if end is not None:
            raise Rejected(f"job {request.job} is over ({end.outcome}: {end.reason}); terminal stays terminal")
        last = files.placement()
        if last is not None and (last.attempt, last.token) == (request.attempt, request.token):
            placement = last  # asked again: the same ranks on the same nodes
        else:
            placement = self._place(files, spec, request, last)
        self._start_on(files, spec, placement)
        return self.observe(request.job)

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        files, _ = self._job(job)
        deadline = self._clock.monotonic() + deadline_seconds
        request = StopRanks(attempt=attempt, grace_seconds=grace_seconds, deadline_seconds=deadline_seconds)
        gone = True
        for answer in self._ask_until(deadline, files, request, deadline_seconds + ANSWER_SECONDS):
            if answer.reply is not None:
                gone = gone and answer.reply.gone
            elif not answer.dead or self._ranks_of(answer.node):
                give_up_at = max(deadline, self._clock.monotonic() + KILL_SECONDS_MAX)
                gone = self._kill(answer.node, give_up_at) and gone
        return gone

    def finish(self, job: str, outcome: JobOutcome, reason: str) -> None:
        files, _ = self._job(job)
        if files.end() is None:
            files.write_end(JobEnd(outcome=outcome, reason=reason, at=self._clock.now()))
        request = Finish(outcome=outcome, reason=reason)
        deadline = self._clock.monotonic() + FINISH_SECONDS_MAX
        for answer in self._ask_until(deadline, files, request, FINISH_SECONDS_MAX):
            if answer.reply is None:
                self._kill(answer.node, self._clock.monotonic() + KILL_SECONDS_MAX)

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        files, _ = self._job(job)
        request = CollectStacks(attempt=attempt, deadline_seconds=deadline_seconds)
        stacks: dict[int, str] = {}
        for answer in self._ask_all(files, request, deadline_seconds + ANSWER_SECONDS):
            if answer.reply is not None:
                stacks.update(answer.reply.stacks)
        return stacks

    # For the front and the command line

    def inject(self, job: str, rank: int, fault: str, parameters: dict[str, float]) -> str:
        """Break one rank on purpose; the sentence that says why nothing was done, empty where it was."""
        files, _ = self._job(job)
        placement = files.placement()
        place = next((place for place in placement.places if place.rank == rank), None) if placement else None
        node = files.nodes().get(place.node) if place else None
        if node is None:
            return f"job {job} has no rank {rank} that runs now"
        answer = self._ask_one(node, InjectFault(rank=rank, fault=fault, parameters=parameters), OBSERVE_SECONDS_MAX)
        return answer.reply.text if answer.reply is not None else answer.trouble

    def wait_for_launchers(self, job: str, deadline_seconds: float) -> bool:
        """Whether enough launchers for the job answer in time."""
        files, spec = self._job(job)
        deadline = self._clock.monotonic() + deadline_seconds
        while True:
            answers = self._ask_all(files, Observe(), OBSERVE_SECONDS_MAX)
            if sum(answer.reply is not None for answer in answers) >= spec.nodes:
                return True
            if self._clock.monotonic() >= deadline:
                return False
            self._clock.sleep(POLL_SECONDS)

    # Starting

    def _place(self, files: JobFiles, spec: JobSpec, request: StartRequest, last: Placement | None) -> Placement:
        """Nodes for a new attempt, written down before anybody is told; older ranks are confirmed gone."""
        if last is not None and request.attempt <= last.attempt:
            raise Conflict(f"attempt {last.attempt} of {request.job} was here, {request.attempt} is not newer")
        excluded = files.excluded() | frozenset(request.excluded_nodes)
        answers = self._ask_all(files, Observe(), OBSERVE_SECONDS_MAX)
        self._confirm_gone(request, answers)
        usable = [
            answer.node.node
            for answer in answers
            if answer.reply is not None
            and answer.node.node not in excluded
            and answer.node.slots >= spec.nproc_per_node
        ]
        chosen = choose_nodes(last.nodes if last else (), usable, spec.nodes)
        if chosen is None:
            raise Rejected(
                f"job {request.job} needs {spec.nodes} nodes of {spec.nproc_per_node} ranks and "
                f"{len(usable)} can be used ({len(excluded)} excluded); start another launcher"
            )
        if excluded != files.excluded():
            files.write_excluded(excluded)
        placement = Placement(
            attempt=request.attempt,
            token=request.token,
            places=tuple(places_on(chosen, spec.nproc_per_node)),
            spares=tuple(node for node in usable if node not in chosen),
            master_port=self._free_port(),
            resume_step=request.resume_step,
        )
        files.write_placement(placement)
        return placement

    def _confirm_gone(self, request: StartRequest, answers: Iterable[Answer]) -> None:
        for answer in answers:
            node = answer.node.node
            if answer.state is not None:
                attempt, ranks = answer.state.attempt, answer.state.ranks
                if attempt >= request.attempt:
                    raise Conflict(f"attempt {attempt} is on {node}, {request.attempt} is not newer")
                if any(rank.state != "exited" for rank in ranks):
                    raise Conflict(f"ranks of attempt {attempt} of {request.job} still live on {node}; stop them first")
            elif not answer.dead:
                raise Unavailable(f"whether ranks live on {node} cannot be said: {answer.trouble}")
            elif self._ranks_of(answer.node):
                raise Conflict(f"ranks of {request.job} still live on {node}, whose launcher is dead; stop them first")

    def _start_on(self, files: JobFiles, spec: JobSpec, placement: Placement) -> None:
        request = StartRanks(
            attempt=placement.attempt,
            token=placement.token,
            places=placement.places,
            spares=placement.spares,
            master_addr=spec.master_addr,
            master_port=placement.master_port,
            resume_step=placement.resume_step,
        )
        nodes = files.nodes()
        missing = [node for node in placement.nodes if node not in nodes]
        chosen = [nodes[node] for node in placement.nodes if node in nodes]
        answers = self._ask_these(chosen, request, START_SECONDS_MAX)
        troubles = [f"{node} has no launcher any more" for node in missing]
        troubles += [answer.trouble for answer in answers if answer.reply is None]
        refused = [answer.reply for answer in answers if answer.reply is not None and answer.reply.refusal]
        if not troubles and not refused:
            return
        sentence = "; ".join(troubles + [reply.text for reply in refused])
        untouched = all(
            not answer.sent or (answer.reply and answer.reply.refusal in ("conflict", "rejected")) for answer in answers
        )
        if not untouched:
            raise Ambiguous(f"attempt {placement.attempt} may have started in part ({sentence}); observe, then stop it")
        if any(reply.refusal == "rejected" for reply in refused):
            raise Rejected(sentence)
        if refused:
            raise Conflict(sentence)
        raise Unavailable(sentence)

    def _free_port(self) -> int:
        for _ in range(PORT_TRIES_MAX):
            port = self._random.randrange(*PORTS)
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
            return port
        raise Unavailable(f"{PORT_TRIES_MAX} ports between {PORTS[0]} and {PORTS[1]} were tried and none is free")

    # Asking

    def _job(self, job: str) -> tuple[JobFiles, JobSpec]:
        try:
            files = JobFiles(self._jobs_folder, job)
            spec = files.spec()
        except (ValueError, BrokenJobFile) as error:
            raise Rejected(str(error)) from error
        if spec is None:
            raise Rejected(f"there is no job {job} in {self._jobs_folder}; `transom run` makes one")
        return files, spec

    def _ask_all(self, files: JobFiles, request: Request, timeout_seconds: float) -> list[Answer]:
        return self._ask_these(list(files.nodes().values()), request, timeout_seconds)

    def _ask_until(self, deadline: float, files: JobFiles, request: Request, timeout_seconds: float) -> list[Answer]:
        """Ask all, and those that live and do not answer again: one that is busy or ending is not a lost one."""
        answers = {answer.node.node: answer for answer in self._ask_all(files, request, timeout_seconds)}
        while self._clock.monotonic() < deadline:
            silent = [answer.node for answer in answers.values() if answer.reply is None and not answer.dead]
            if not silent:
                break
            self._clock.sleep(POLL_SECONDS)
            answers |= {answer.node.node: answer for answer in self._ask_these(silent, request, timeout_seconds)}
        return list(answers.values())

    def _ask_these(self, nodes: list[NodeFile], request: Request, timeout_seconds: float) -> list[Answer]:
        if not nodes:
            return []
        with ThreadPoolExecutor(min(NODES_AT_ONCE_MAX, len(nodes))) as pool:
            return list(pool.map(lambda node: self._ask_one(node, request, timeout_seconds), nodes))

    def _ask_one(self, node: NodeFile, request: Request, timeout_seconds: float) -> Answer:
        if not is_alive(node.pid, node.start_time):
            return Answer(node, trouble=f"the launcher of {node.node} is dead", dead=True)
        try:
            return Answer(node, ask(Path(node.control_socket), request, timeout_seconds=timeout_seconds), sent=True)
        except LauncherUnreachable as error:
            trouble, sent = str(error), False
        except LauncherSilent as error:
            trouble, sent = str(error), True
        return Answer(node, trouble=trouble, sent=sent, dead=not is_alive(node.pid, node.start_time))

    # Looking at processes

    def _ranks_of(self, node: NodeFile) -> list[tuple[int, int]]:
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

    def _kill(self, node: NodeFile, deadline: float) -> bool:
        """SIGKILL to a launcher that does not answer and to what it ran: only then is that certainly gone."""
        ranks = self._ranks_of(node)
        kill_exactly(node.pid, node.start_time)  # first, so that nobody starts another zygote
        if node.zygote is not None:
            kill_exactly(node.zygote.pid, node.zygote.start_time)
        for pid, start_time in ranks:
            kill_exactly(pid, start_time)
        while self._ranks_of(node) or any(is_alive(pid, start_time) for pid, start_time in ranks):
            if self._clock.monotonic() >= deadline:
                return False
            self._clock.sleep(POLL_SECONDS)
        return True


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
