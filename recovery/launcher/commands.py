"""Obeys what comes over the control socket: each command is answered at once, or by `tick` when done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ingest.events import FaultInjected
from ingest.rank_socket import Inject

from .control import Respond
from .engine_question import EngineQuestion, EngineSilent
from .outside_faults import PARAMETERS
from .ports import PORT_TRIES_MAX, first_free_port
from .protocol import (
    AskEngine,
    CollectStacks,
    FindPort,
    Finish,
    InjectFault,
    LauncherState,
    Observe,
    Preflight,
    Refusal,
    Reply,
    Request,
    StartRanks,
    StopRanks,
)
from .rank import LocalRank

if TYPE_CHECKING:
    from .launcher import Launcher


class Commands:
    """The commands in progress; each is a function that returns its reply when it has one."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._clock = launcher.clock
        self._open: list[tuple[Callable[[], Reply | None], Respond]] = []

    @property
    def waiting(self) -> bool:
        return bool(self._open)

    def answer(self, request: Request, respond: Respond) -> None:
        """Begin a command; its reply may come now or later."""
        match request:
            case StartRanks():
                step = self._start(request)
            case StopRanks():
                step = self._stop(request)
            case Observe():
                step = self._done(Reply(state=self.state()))
            case FindPort():
                step = self._done(self._find_port(request))
            case AskEngine():
                step = self._ask_engine(request)
            case CollectStacks():
                step = self._stacks(request)
            case Preflight():
                step = self._preflight(request)
            case InjectFault():
                step = self._done(self._inject(request))
            case Finish():
                step = self._finish()
        reply = step()
        if reply is not None:
            respond(reply)
        else:
            self._open.append((step, respond))

    def tick(self) -> None:
        """Answer what is done by now."""
        still_open = []
        for step, respond in self._open:
            reply = step()
            if reply is None:
                still_open.append((step, respond))
            else:
                respond(reply)
        self._open = still_open

    def state(self) -> LauncherState:
        config, share = self._launcher.config, self._launcher.share
        return LauncherState(
            job=config.job,
            node=config.node,
            slots=config.slots,
            host=config.host,
            fenced_attempt=self._launcher.fenced_attempt,
            attempt=share.attempt if share else 0,
            token=share.order.token if share else "",
            stop_requested=share.stop_requested if share else False,
            leaving=self._launcher.leaving,
            ranks=share.views() if share else (),
        )

    def _find_port(self, request: FindPort) -> Reply:
        port = first_free_port(request.candidates[:PORT_TRIES_MAX])
        if port == 0:
            return Reply(refusal="failed", text=f"no port that was asked for is free on {self._launcher.config.node}")
        return Reply(port=port)

    def _ask_engine(self, order: AskEngine) -> Callable[[], Reply | None]:
        path = self._launcher.config.env.get("TRANSOM_CKPT_SOCKET", "")
        try:
            question = EngineQuestion(path, order.packet, order.timeout_seconds, self._clock)
        except EngineSilent as error:
            return self._done(Reply(refusal="failed", text=str(error)))

        def step() -> Reply | None:
            try:
                answer = question.look()
            except EngineSilent as error:
                return Reply(refusal="failed", text=str(error))
            return None if answer is None else Reply(engine=answer)

        return step

    def _done(self, reply: Reply) -> Callable[[], Reply | None]:
        return lambda: reply

    def _refuse(self, refusal: Refusal, text: str) -> Callable[[], Reply | None]:
        return self._done(Reply(refusal=refusal, text=text, state=self.state()))

    def _start(self, order: StartRanks) -> Callable[[], Reply | None]:
        launcher = self._launcher
        share, node = launcher.share, launcher.config.node
        here = sum(place.node == node for place in order.places)
        if launcher.leaving:
            return self._refuse("rejected", f"the launcher of {node} is ending: the job is over")
        if share is not None and (share.attempt, share.order.token) == (order.attempt, order.token):
            pass  # asked again: the same ranks
        elif order.attempt <= launcher.fenced_attempt:
            return self._refuse(
                "conflict", f"attempt {launcher.fenced_attempt} was on {node}, {order.attempt} is not newer"
            )
        elif share is not None and not share.gone:
            return self._refuse("conflict", f"ranks of attempt {share.attempt} still live on {node}; stop them first")
        elif not 0 < here <= launcher.config.slots:
            return self._refuse("rejected", f"{here} ranks for {node}, which has {launcher.config.slots} slots")
        else:
            launcher.begin(launcher.make_share(order))

        def step() -> Reply | None:
            current = launcher.share
            if current is None or current.attempt != order.attempt:
                return Reply(refusal="conflict", text=f"{node} went on to another attempt", state=self.state())
            if current.pending:
                return None
            refused = [rank.refusal for rank in current.ranks.values() if rank.refusal]
            return Reply(refusal="failed" if refused else "", text=refused[0] if refused else "", state=self.state())

        return step

    def _stop(self, order: StopRanks) -> Callable[[], Reply | None]:
        launcher = self._launcher
        launcher.fenced_attempt = max(launcher.fenced_attempt, order.attempt)  # a start that is late is refused
        share = launcher.share
        if share is None or share.attempt > order.attempt:
            return self._done(Reply(gone=True, state=self.state()))
        share.stop(order.grace_seconds)
        deadline = self._clock.monotonic() + order.deadline_seconds

        def step() -> Reply | None:
            if share.gone or self._clock.monotonic() >= deadline:
                return Reply(gone=share.gone, state=self.state())
            return None

        return step

    def _finish(self) -> Callable[[], Reply | None]:
        launcher = self._launcher
        launcher.leave(launcher.config.grace_seconds)
        share = launcher.share

        def step() -> Reply | None:
            if share is None or share.gone:
                return Reply(gone=True, state=self.state())
            return None

        return step

    def _stacks(self, order: CollectStacks) -> Callable[[], Reply | None]:
        share = self._launcher.share
        if share is None or share.attempt != order.attempt:
            return self._refuse("conflict", f"attempt {order.attempt} does not run on {self._launcher.config.node}")
        asking = self._launcher.ask_stacks(share, order.deadline_seconds)

        def step() -> Reply | None:
            stacks = asking.look()
            return None if stacks is None else Reply(stacks=stacks)

        return step

    def _preflight(self, order: Preflight) -> Callable[[], Reply | None]:
        launcher, share = self._launcher, self._launcher.share
        if launcher.leaving:
            return self._refuse("rejected", f"the launcher of {launcher.config.node} is ending")
        if share is not None and (share.attempt > order.attempt or not share.gone):
            return self._refuse("conflict", f"attempt {share.attempt} has ranks on {launcher.config.node}")
        look = launcher.checks.begin(order.checks, order.seconds)

        def step() -> Reply | None:
            outcomes = look()
            return None if outcomes is None else Reply(checks=outcomes)

        return step

    def _inject(self, order: InjectFault) -> Reply:
        launcher, share = self._launcher, self._launcher.share
        if not launcher.config.allow_inject:
            return Reply(refusal="rejected", text="this job does not allow faults; start it with --allow-inject")
        rank = share.ranks.get(order.rank) if share else None
        if share is None or rank is None or not rank.alive:
            return Reply(refusal="rejected", text=f"rank {order.rank} does not run on {launcher.config.node}")
        if order.fault not in PARAMETERS:
            return self._forward(order, rank)
        problem = launcher.faults.problem(order.fault, rank, order.parameters)
        if problem:
            return Reply(refusal="rejected", text=problem)
        parameters = {"step": float(rank.step), **PARAMETERS[order.fault], **order.parameters}
        label = FaultInjected(fault=order.fault, parameters=parameters, **share.stamp(order.rank, "events"))
        launcher.publish(label)  # before it is done: the label comes first
        launcher.faults.do(order.fault, rank, order.parameters)
        return Reply(state=self.state())

    def _forward(self, order: InjectFault, rank: LocalRank) -> Reply:
        known = set(Inject.__struct_fields__) - {"fault"}
        unknown = set(order.parameters) - known
        if unknown:
            return Reply(refusal="rejected", text=f"parameters are {', '.join(sorted(known))}, not {min(unknown)}")
        wanted = {**order.parameters, "at_step": int(order.parameters.get("at_step", -1))}
        inject = msgspec.convert({"fault": order.fault, **wanted}, Inject)
        if self._launcher.telemetry.send_inject(rank.rank, inject):
            return Reply(state=self.state())
        return Reply(refusal="failed", text=f"rank {rank.rank} does not listen; does its script call transom.init()?")
