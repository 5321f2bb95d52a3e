"""A month under the product's own policy: controller, incident machine, budgets, store, backend contract, virtual time.

Simulated are the cluster, the job's progress and what detection says: who is to blame and how soon, as the assumptions
have it. Everything after the verdict is the code that runs in production.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from detectors.verdict import Culprit, FaultClass, Verdict
from ingest.clock import ManualClock
from pipelines.month.assumptions import BAD_NODES, DAY_SECONDS, HANGS, Assumptions, Costs, FailureKind, Fleet
from pipelines.month.result import Month, reaction_seconds
from pipelines.month.simulated_cluster import SimulatedCheckpoints, SimulatedCluster
from recovery.action import Incident
from recovery.backend import StartRequest
from recovery.calls import Result
from recovery.controller import Controller
from recovery.policy_config import PolicyConfig
from recovery.store import RecoveryStore
from recovery.workers import InlineWorkers

IN_MEMORY = Path("/dev/shm")
TICKS_AT_ONCE_MAX = 40  # without the clock moving: a decision, a stop, a choice and a start are a few
LOOK_SECONDS = 120.0  # between two looks at a probation
ACT_SECONDS = 1.0  # between two looks at what is being done
ACTS_SECONDS_MAX = 60.0  # what is not done by then waits for something
WAIT_SECONDS = 60.0  # between two looks at what waits
PROBATION_WATCHED_SECONDS = 3_600.0
STANDS_SECONDS_MAX = 2 * DAY_SECONDS  # then somebody looks after it, whatever recovery waits for
FAILS_AGAIN_SECONDS = 10.0  # of training, on the same bad node or with the same bug
NEEDS_A_PERSON = ("held", "gave_up", "stopped")
NAMES_A_NODE: tuple[FaultClass, ...] = ("gpu_lost", "node_lost", "gpu_ecc")
CRASHES: tuple[tuple[FaultClass, float], ...] = (("gpu_lost", 0.5), ("node_lost", 0.3), ("gpu_ecc", 0.2))
TRANSIENT: tuple[tuple[FaultClass, float], ...] = (("network_error", 0.4), ("rank_lost", 0.4), ("cuda_error", 0.2))


def month_config(costs: Costs) -> PolicyConfig:
    """The defaults, but that what touches a node is done by itself, and that looks are as rare as a month allows."""
    config = replace(
        PolicyConfig(),
        probation_poll_seconds=LOOK_SECONDS,
        probation_seconds_max=max(1_800.0, 4 * costs.restart_seconds),
        watch_seconds=1e12,  # what breaks here is told by a verdict
        quarantine_mode="auto",
    )
    return config.with_modes(dict.fromkeys((*NAMES_A_NODE, "nvlink_error"), "auto"))


@dataclass(frozen=True, slots=True)
class Failure:
    """What is wrong now, until training has gone on for a while. `node` is who did it."""

    kind: FailureKind
    at: float
    useful_seconds: float  # of training, when it happened
    node: str
    fault_class: FaultClass


class RealMonth:
    """One month of one job; a job that a person submits again goes on under another name."""

    def __init__(
        self, name: str, fleet: Fleet, costs: Costs, given: Assumptions, seed: int, folder: Path, config: PolicyConfig
    ) -> None:
        self._fleet, self._costs, self._given = fleet, costs, given
        self._dice = Random(seed)
        self._clock = ManualClock(0.0)
        self._share = costs.checkpoint_seconds / (costs.checkpoint_seconds + costs.save_seconds)
        self.month = Month(name, fleet.name, given.month_seconds)
        nodes = {f"node-{number}": False for number in range(fleet.nodes + given.spares(fleet))}
        self._cluster = SimulatedCluster(nodes, self._step, self._started)
        self._every_steps = max(1, round(costs.checkpoint_seconds / given.step_seconds))
        self._checkpoints = SimulatedCheckpoints(self._every_steps, lambda job: self._steps(self._useful_now()))
        self._store = RecoveryStore(folder / "recovery.sqlite", durable=False)
        workers: InlineWorkers[Result] = InlineWorkers()
        self._controller = Controller(self._store, self._cluster, self._checkpoints, config, Random(seed + 1), workers)
        self._states: dict[str, str] = {}  # of the incidents of the present job
        self._failure: Failure | None = None
        self._stands = False
        self._trains_from = 0.0
        self._useful_before = 0.0  # seconds of training that count, when training goes on
        self._useful_frozen = 0.0  # the same, while it stands
        self._start_takes = 0.0
        self._broken: list[tuple[float, str]] = []  # until when a machine is away, and which
        self._verdicts = 0
        self._jobs = 0
        self._job = ""
        self._submit(0.0)
        self._next_failure_at = self._dice.expovariate(1.0 / fleet.mttf_seconds)

    def run(self) -> Month:
        """From midnight of the first day to the end of the last; a repair may end after it."""
        end = self._given.month_seconds
        while self._next_failure_at < end:
            self._train_until(self._next_failure_at)
            self._fail()
            self._repair()
        self._train_until(end)
        if self._trains_from <= end:
            self.month.useful_seconds = self._useful_before + (end - self._trains_from) * self._share
        else:
            self.month.useful_seconds = self._useful_before
        names = [f"month-{number}" for number in range(1, self._jobs + 1)]
        self.month.restarts = sum(len(self._store.attempts(name)) for name in names) + self._jobs - 1
        self._store.close()
        return self.month

    # The job

    def _useful_now(self) -> float:
        """Seconds of training that count so far."""
        if self._stands:
            return self._useful_frozen
        return self._useful_before + max(0.0, self._clock.now() - self._trains_from) * self._share

    def _steps(self, useful_seconds: float) -> int:
        return int(useful_seconds / self._given.step_seconds)

    def _step(self, job: str) -> int:
        """What its ranks report; -1 before the first step of an attempt."""
        if job != self._job or (not self._stands and self._clock.now() <= self._trains_from):
            return -1
        return self._steps(self._useful_now())

    def _train_until(self, at: float) -> None:
        """Let it train, and let recovery look at it as long as it is on probation."""
        watched_until = min(at, self._trains_from + PROBATION_WATCHED_SECONDS)
        while self._clock.now() < watched_until and not self._controller.idle():
            self._clock.advance_to(min(watched_until, self._clock.now() + LOOK_SECONDS))
            self._settle()
        self._clock.advance_to(at)
        self._return_machines()

    def _fail(self) -> None:
        """Something breaks."""
        (kind,) = self._dice.choices(list(self._given.shares), list(self._given.shares.values()))
        now, node = self._clock.now(), self._dice.choice(self._cluster.jobs[self._job].placed)
        if kind in BAD_NODES:
            self._cluster.nodes[node] = True
            self._broken.append((now + self._given.repair_seconds, node))
        self._failure = Failure(kind, now, self._useful_now(), node, self._class_of(kind))
        self.month.failures += 1

    def _repair(self) -> None:
        """Recovery's turn, as often as the same cause comes back, and where it must be a person's."""
        failure = self._failure
        assert failure is not None
        self._break(failure)
        stands_since = self._clock.now()
        while True:
            self._settle()
            late = self._clock.now() - stands_since > STANDS_SECONDS_MAX
            if late or any(state in NEEDS_A_PERSON for state in self._states.values()):
                self._page()
                break
            if self._stands:
                acts = self._clock.now() - stands_since < ACTS_SECONDS_MAX
                self._clock.advance(ACT_SECONDS if acts else WAIT_SECONDS)
                self._return_machines()
            elif self._comes_back(failure):
                self._clock.advance_to(self._trains_from + FAILS_AGAIN_SECONDS)
                self._break(failure)
                stands_since = self._clock.now()
            else:
                break
        self.month.down.append((failure.at, self._trains_from))
        self.month.lost_seconds += max(0.0, failure.useful_seconds - self._useful_before)
        self._failure = None
        self._next_failure_at = self._trains_from + self._dice.expovariate(1.0 / self._fleet.mttf_seconds)

    def _break(self, failure: Failure) -> None:
        """The job stands; a while later detection says so."""
        costs, kind = self._costs, failure.kind
        self._useful_frozen, self._stands = self._useful_now(), True
        node = next(iter(self._cluster.broken_nodes(self._job)), failure.node)
        if kind != "poison_ckpt":
            self._cluster.break_rank(self._job, node, "stopped" if kind in HANGS else "exited")
        crash = kind not in HANGS and kind != "poison_ckpt"
        self._clock.advance((costs.crash_seconds if crash else costs.hang_seconds) + costs.decide_seconds)
        self._start_takes = costs.restart_seconds * (1.5 if kind == "poison_ckpt" else 1.0)
        self._start_takes += 0.0 if kind == "transient_crash" else costs.preflight_seconds
        self._controller.accept(self._verdict(failure, node), self._clock.now())

    def _comes_back(self, failure: Failure) -> bool:
        """The cause is still there: a bad node is used, or the bug is not mended."""
        return failure.kind == "user_bug" or bool(self._cluster.broken_nodes(self._job))

    def _started(self, job: str, request: StartRequest) -> None:
        """The ranks are started: after a while they train, from the step that was asked for."""
        self._trains_from = self._clock.now() + self._start_takes
        self._useful_before = (request.resume_step or 0) * self._given.step_seconds
        self._stands = False
        self._checkpoints.rejected.pop(job, None)  # what is trained anew is good

    def _settle(self) -> None:
        """Ticks, until at this time nothing more moves."""
        for _ in range(TICKS_AT_ONCE_MAX):
            self._controller.tick(self._clock.now())
            waiting = self._controller.pending_messages()
            for entry in waiting:
                if isinstance(entry.message, Incident) and entry.message.job == self._job:
                    self._states[entry.message.incident_id] = entry.message.state
            self._controller.mark_published([entry.seq for entry in waiting])
            if not waiting:
                return

    # People and machines

    def _page(self) -> None:
        """A person comes, mends what no restart can mend, and submits the job again from its newest good checkpoint."""
        self.month.pages += 1
        self._clock.advance(reaction_seconds(self._given.human, self._clock.now(), self._dice))
        if not self._stands:
            self._useful_frozen, self._stands = self._useful_before, True
        self._cluster.finish(self._job, "stopped", "a person has stopped it")
        self._submit(self._costs.restart_seconds)

    def _submit(self, takes_seconds: float) -> None:
        self._jobs += 1
        self._job, self._states, self._start_takes = f"month-{self._jobs}", {}, takes_seconds
        step = self._steps(self._useful_now()) // self._every_steps * self._every_steps
        self._cluster.add_job(self._job, self._fleet.nodes)
        bad = tuple(node for node, broken in self._cluster.nodes.items() if broken)
        if len(self._cluster.nodes) - len(bad) < self._fleet.nodes:
            self._return_machines(everything=True)  # whoever submits it has found machines
            bad = ()
        self._cluster.start(StartRequest(self._job, 1, "by hand", excluded_nodes=bad, resume_step=step))

    def _return_machines(self, *, everything: bool = False) -> None:
        """Machines that broke long enough ago have been replaced by others, with other names."""
        due = [one for one in self._broken if everything or one[0] <= self._clock.now()]
        for _, node in due:
            self._cluster.take_node(node)
            self._cluster.add_node(f"{node}'")
        self._broken = [one for one in self._broken if one not in due]

    # What detection says

    def _class_of(self, kind: FailureKind) -> FaultClass:
        if kind in HANGS:
            return "hang"
        if kind == "poison_ckpt":
            return "nan"
        if kind == "user_bug":
            return "user_error" if self._dice.random() < self._given.user_bug_seen else "unknown"
        table = CRASHES if kind == "bad_node_crash" else TRANSIENT
        (chosen,) = self._dice.choices([name for name, _ in table], [share for _, share in table])
        return chosen

    def _verdict(self, failure: Failure, node: str) -> Verdict:
        state = self._cluster.jobs[self._job]
        if failure.kind in BAD_NODES and self._dice.random() < self._given.wrong_culprit:
            node = self._dice.choice(state.placed)
        names_node = failure.fault_class in NAMES_A_NODE
        bad = None
        if failure.kind == "poison_ckpt":
            bad = max(1, self._steps(failure.useful_seconds - self._given.poison_seconds))
        self._verdicts += 1
        return Verdict(
            verdict_id=f"{self._job}/{state.attempt}/{self._verdicts}", revision=1, job=self._job,
            attempt=state.attempt, fault_class=failure.fault_class, severity="critical", settled=True,
            culprits=(Culprit(rank=None if names_node else state.placed.index(node), node=node),),
            onset_at=self._clock.now(), at=self._clock.now(), onset_step=self._steps(self._useful_frozen),
            first_bad_step=bad, advice="restart_exclude_node" if names_node else "restart_in_place",
            summary=f"simulated {failure.kind} on {node}",
        )  # fmt: skip


def real_month(
    name: str, fleet: Fleet, costs: Costs, given: Assumptions, seed: int, config: PolicyConfig | None = None
) -> Month:
    """One month; its files are gone afterwards."""
    where = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="transom-month-", dir=where) as folder:
        return RealMonth(name, fleet, costs, given, seed, Path(folder), config or month_config(costs)).run()
