"""The first rung, the same for every backend: ranks started, stopped and observed through launchers.

    records (what is written)  ──┐
    reach (who can be asked)   ──┴─► Launchers ─► Observation, Placement, gone or not

A backend says by its `Reach` where launchers are, and what is certain of one that does not answer: on this machine
/proc knows, elsewhere only the scheduler may vouch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from ingest.clock import Clock
from recovery.action import CheckResult
from recovery.allocation import JobRecords
from recovery.backend import (
    Ambiguous,
    Conflict,
    Observation,
    Rejected,
    StartRequest,
    TooFewNodes,
    Unavailable,
)
from recovery.launcher.protocol import (
    AskEngine,
    CheckName,
    CollectStacks,
    Finish,
    InjectFault,
    JobEnd,
    Observe,
    Placement,
    Request,
    StartRanks,
    StopRanks,
)

from .asking import Reach, ask_all, ask_these
from .placing import choose_nodes, places_on
from .probing import probe
from .view import Answer, Written, view_of

OBSERVE_SECONDS_MAX = 2.0
START_SECONDS_MAX = 200.0  # a zygote that is still importing torch is waited for
FINISH_SECONDS_MAX = 20.0
ANSWER_SECONDS = 2.0  # on top of what a launcher was told to take
GONE_SECONDS_MAX = 2.0

JobOutcome = Literal["finished", "failed", "stopped"]


class Launchers:
    """One job through its launchers. Made for each call; it keeps nothing."""

    def __init__(self, job: str, records: JobRecords, reach: Reach, clock: Clock) -> None:
        self._job = job
        self._records = records
        self._reach = reach
        self._clock = clock

    # Observing

    def written(self) -> Written:
        """What is written of the job. Raises Rejected where there is none."""
        written = Written.of(self._records)
        if written is None:
            raise Rejected(f"there is no job {self._job}; `transom run` makes one")
        return written

    def observe(self) -> Observation:
        written = self.written()
        return view_of(written, self.look(written))

    def look(self, written: Written) -> list[Answer]:
        """Every launcher's answer to "what runs here", and what is known of nodes without one."""
        return ask_all(self._reach, written, Observe(), OBSERVE_SECONDS_MAX)

    # Starting

    def refuse_ended(self, written: Written) -> None:
        end = written.end
        if end is not None:
            raise Rejected(f"job {self._job} is over ({end.outcome}: {end.reason}); terminal stays terminal")

    def confirm_gone(self, request: StartRequest, answers: Iterable[Answer]) -> None:
        """Raise where a newer attempt was here, or a rank of an older one may live."""
        for answer in answers:
            if answer.state is None:
                doubt = self._reach.doubt(answer.node, answer.trouble)
                if doubt is not None:
                    raise doubt
                continue
            attempt, ranks = answer.state.attempt, answer.state.ranks
            if attempt >= request.attempt:
                raise Conflict(f"attempt {attempt} is on {answer.node}, {request.attempt} is not newer")
            if any(rank.state != "exited" for rank in ranks):
                raise Conflict(
                    f"ranks of attempt {attempt} of {request.job} still live on {answer.node}; stop them first"
                )

    def place(
        self, request: StartRequest, written: Written, answers: Sequence[Answer], *, generation: int = 0
    ) -> Placement:
        """Nodes for a new attempt, written down before anybody is told. Raises TooFewNodes or Conflict."""
        spec, last = written.spec, written.placement
        if last is not None and request.attempt <= last.attempt:
            raise Conflict(f"attempt {last.attempt} of {request.job} was here, {request.attempt} is not newer")
        excluded = excluded_with(request, written)
        wanted = request.nodes or spec.nodes
        usable = {
            answer.node: answer
            for answer in answers
            if answer.reply is not None
            and not (answer.state is not None and answer.state.leaving)
            and answer.node not in excluded
            and answer.slots >= spec.nproc_per_node
        }
        chosen = choose_nodes(last.nodes if last else (), list(usable), wanted)
        if chosen is None:
            raise TooFewNodes(
                f"job {request.job} needs {wanted} nodes of {spec.nproc_per_node} ranks and "
                f"{len(usable)} can be used ({len(excluded)} excluded); start another launcher",
                len(usable),
            )
        if excluded != written.excluded:
            self._records.write_excluded(excluded)
        first = usable[chosen[0]]
        assert first.reply is not None
        launcher = next(one for one in self._reach.addresses() if one.node == first.node)
        host, port = self._reach.rendezvous(launcher, first.reply)
        placement = Placement(
            attempt=request.attempt,
            token=request.token,
            places=places_on(chosen, spec.nproc_per_node),
            spares=tuple(node for node in usable if node not in chosen),
            master_addr=host,
            master_port=port,
            resume_step=request.resume_step,
            generation=generation,
        )
        self._records.write_placement(placement)
        return placement

    def start_on(self, written: Written, placement: Placement) -> None:
        """Tell the launchers of a placement that is written down; asked again, nothing is done twice."""
        request = StartRanks(
            attempt=placement.attempt,
            token=placement.token,
            places=placement.places,
            spares=placement.spares,
            master_addr=placement.master_addr or written.spec.master_addr,
            master_port=placement.master_port,
            resume_step=placement.resume_step,
        )
        known = {launcher.node: launcher for launcher in self._reach.addresses()}
        missing = [node for node in placement.nodes if node not in known]
        chosen = [known[node] for node in placement.nodes if node in known]
        answers = ask_these(self._reach, chosen, request, START_SECONDS_MAX)
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

    # Stopping

    def stop(self, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        """True when no rank of the attempt or an older one lives."""
        deadline = self._clock.monotonic() + deadline_seconds
        request = StopRanks(attempt=attempt, grace_seconds=grace_seconds, deadline_seconds=deadline_seconds)
        gone = True
        for answer in self._ask_until(deadline, request, deadline_seconds + ANSWER_SECONDS):
            if answer.reply is not None:
                gone = answer.reply.gone and gone
            else:
                give_up_at = max(deadline, self._clock.monotonic() + GONE_SECONDS_MAX)
                gone = self._reach.see_gone(answer.node, give_up_at) and gone
        return gone

    def finish(self, outcome: JobOutcome, reason: str) -> JobEnd:
        """Write that the job is over, unless that is written; its launchers stop what is left and go."""
        end = self.written().end
        if end is None:
            self._records.write_end(JobEnd(outcome=outcome, reason=reason, at=self._clock.now()))
            end = self.written().end
            assert end is not None
        deadline = self._clock.monotonic() + FINISH_SECONDS_MAX
        for answer in self._ask_until(deadline, Finish(outcome=outcome, reason=reason), FINISH_SECONDS_MAX):
            if answer.reply is None:
                self._reach.see_gone(answer.node, self._clock.monotonic() + GONE_SECONDS_MAX)
        return end

    # Asking

    def collect_evidence(self, attempt: int, deadline_seconds: float) -> dict[int, str]:
        """Python stacks by rank, of those that answer in time."""
        request = CollectStacks(attempt=attempt, deadline_seconds=deadline_seconds)
        stacks: dict[int, str] = {}
        for answer in ask_these(self._reach, self._reach.addresses(), request, deadline_seconds + ANSWER_SECONDS):
            if answer.reply is not None:
                stacks.update(answer.reply.stacks)
        return stacks

    def inject(self, rank: int, fault: str, parameters: dict[str, float]) -> str:
        """Break one rank on purpose; the sentence that says why nothing was done, empty where it was."""
        placement = self.written().placement
        place = next((place for place in placement.places if place.rank == rank), None) if placement else None
        launcher = next((one for one in self._reach.addresses() if place and one.node == place.node), None)
        if launcher is None:
            return f"job {self._job} has no rank {rank} that runs now"
        request = InjectFault(rank=rank, fault=fault, parameters=parameters)
        answer = self._reach.ask(launcher, request, OBSERVE_SECONDS_MAX)
        return answer.reply.text if answer.reply is not None else answer.trouble

    def probe(
        self, attempt: int, checks: Sequence[CheckName], groups: Sequence[Sequence[str]], seconds: float
    ) -> list[CheckResult]:
        """Pre-flight checks of nodes between two attempts. See `ProbingBackend`."""
        return probe(self._reach, self.written(), attempt, checks, groups, seconds)

    def ask_engine(self, node: str, packet: str, timeout_seconds: float) -> str:
        """The answer of a node's checkpoint engine, through its launcher. Raises Unavailable."""
        launcher = next((one for one in self._reach.addresses() if one.node == node), None)
        if launcher is None:
            raise Unavailable(f"{node} has no launcher that could ask its engine")
        request = AskEngine(packet=packet, timeout_seconds=timeout_seconds)
        answer = self._reach.ask(launcher, request, timeout_seconds + ANSWER_SECONDS)
        if answer.reply is None or answer.reply.refusal:
            raise Unavailable(answer.reply.text if answer.reply is not None else answer.trouble)
        return answer.reply.engine

    def wait(self, deadline_seconds: float) -> bool:
        """Whether enough launchers for the job answer in time."""
        wanted = self.written().spec.nodes
        deadline = self._clock.monotonic() + deadline_seconds
        while True:
            answers = ask_these(self._reach, self._reach.addresses(), Observe(), OBSERVE_SECONDS_MAX)
            if sum(answer.reply is not None for answer in answers) >= wanted:
                return True
            if self._clock.monotonic() >= deadline:
                return False
            self._clock.sleep(self._reach.poll_seconds)

    def _ask_until(self, deadline: float, request: Request, timeout_seconds: float) -> list[Answer]:
        """Ask all, and those that live and do not answer again: one that is busy or ending is not a lost one."""
        answers = {one.node: one for one in ask_all(self._reach, self.written(), request, timeout_seconds)}
        while self._clock.monotonic() < deadline:
            silent = {one.node for one in answers.values() if one.reply is None and not one.over}
            silent = {node for node in silent if not self._reach.is_out(node)}
            if not silent:
                break
            self._clock.sleep(self._reach.poll_seconds)
            launchers = [launcher for launcher in self._reach.addresses() if launcher.node in silent]
            left = silent - {launcher.node for launcher in launchers}  # in good order, while we waited
            answers |= {node: replace(answers[node], over=True) for node in left}
            answers |= {one.node: one for one in ask_these(self._reach, launchers, request, timeout_seconds)}
        return list(answers.values())


def excluded_with(request: StartRequest, written: Written) -> frozenset[str]:
    """Nodes that this attempt and later ones do not use."""
    return (written.excluded - frozenset(request.released_nodes)) | frozenset(request.excluded_nodes)
