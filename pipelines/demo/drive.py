"""The demo itself: services up, a real job in steady state, one fault after another, and a verdict on the verdicts."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from ingest.bus import Bus
from ingest.clock import Clock
from ingest.events import Topic
from pipelines.children import Child, Children
from pipelines.demo.faults import FAULTS, Fault, Outcome, judge
from pipelines.demo.show import Show
from pipelines.demo.story import AttemptStory, Story
from pipelines.figures import Figure
from pipelines.inject import Injector
from pipelines.open_bus import own_command
from pipelines.places import Places

JOB = "demo"
WATCHED: tuple[Topic, ...] = ("metrics", "events", "verdicts", "actions")
SAVE_EVERY = 5
STEADY_STEPS = 40  # the straggler rule learns a rank's own pace from steps 20 to 40
SETTLE_STEPS = 14  # new steps after a restart before the next fault: a save, and the detector's warm-up
START_SECONDS_MAX = 150.0
FAULT_SECONDS_MAX = 60.0
PROGRESS_SECONDS = 5.0
QUIET_SECONDS = 2.0  # after a fault was handled: whatever else would be said has been said


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the person asked for."""

    faults: tuple[Fault, ...] = FAULTS
    steps: int | None = None  # end when every rank has done so many
    device: str = "cpu"
    nproc_per_node: int = 2
    nodes: int = 2


@dataclass(slots=True)
class DemoResult:
    """What was measured."""

    outcomes: list[Outcome] = field(default_factory=list)
    false_verdicts: int = 0
    goodput: float | None = None
    fault_seconds: float = 0.0
    problem: str = ""

    @property
    def right(self) -> bool:
        return not self.problem and not self.false_verdicts and all(outcome.right for outcome in self.outcomes)


class Demo:
    """Drives one demo over services that are already up."""

    def __init__(
        self,
        options: DemoOptions,
        places: Places,
        bus: Bus,
        children: Children,
        show: Show,
        clock: Clock,
        bus_arguments: Sequence[str],
    ) -> None:
        self._options = options
        self._places = places
        self._children = children
        self._show = show
        self._clock = clock
        self._bus_arguments = list(bus_arguments)
        self._story = Story(bus.consumer(f"demo-{os.getpid()}", WATCHED, start="latest"), JOB, clock)
        self._injector = Injector(places, clock)
        self._result = DemoResult()
        self._job: Child | None = None
        self._told_attempt = 0
        self._progress_at = clock.monotonic()

    def run(self) -> DemoResult:
        """Start the job, do the faults, judge each."""
        self._job = self._children.start("demo-job", self._job_command(), environ={"OMP_NUM_THREADS": "1"})
        if not self._wait_steps(STEADY_STEPS, START_SECONDS_MAX):
            self._result.problem = (
                f"the job did not reach step {STEADY_STEPS} in {START_SECONDS_MAX:.0f} s; see {self._places.logs}"
            )
            return self._result
        self._show.say("job", f"steady: step {self._step()}, {self._step_seconds() * 1000:.0f} ms a step")
        began = self._clock.monotonic()
        for fault in self._options.faults:
            outcome = self._one(fault)
            self._result.outcomes.append(outcome)
            if not outcome.right and fault.restarts and outcome.step_seconds is None:
                self._result.problem = f"the job did not come back after {fault.name}; see {self._places.logs}"
                break
        self._result.fault_seconds = self._clock.monotonic() - began
        if self._options.steps is not None:
            self._wait_steps(self._options.steps, 10.0 + self._options.steps)
        self._result.false_verdicts = self._false_verdicts()
        self._result.goodput = self._goodput()
        return self._result

    def _job_command(self) -> list[str]:
        options = self._options
        script = Path(__file__).parents[1] / "demo_job" / "train.py"
        return own_command(
            "run", "--job", JOB, "--nproc-per-node", str(options.nproc_per_node),
            "--virtual-nodes", str(options.nodes), "--spares", "1", "--pin-cpus", "--allow-inject",
            *self._bus_arguments,
            str(script), "--save-every", str(SAVE_EVERY), "--device", options.device,
        )  # fmt: skip

    def _one(self, fault: Fault) -> Outcome:
        """Do one fault and wait until it has been handled, or for a bounded time."""
        self._show.rule(fault.title)
        before = self._story.current
        assert before is not None
        known = set(self._story.verdicts)
        node = next(place.node for place in before.started.places if place.rank == fault.rank)
        parameters = dict(fault.parameters)
        outcome = Outcome(fault, 0.0, before.step, node=node)
        if fault.at_step:
            parameters["at_step"] = float(max(before.highest_step.values()) + 4)  # the rank tells where it really fired
        outcome.injected_at = self._clock.now()
        self._injector.inject(JOB, fault.rank, fault.inject, parameters)
        self._story.wait_for(lambda: self._handled(fault, before, known), FAULT_SECONDS_MAX, self._each)
        until = self._clock.monotonic() + QUIET_SECONDS
        self._story.wait_for(lambda: self._clock.monotonic() > until, QUIET_SECONDS * 2, self._each)
        done = next((done for done in reversed(self._story.faults) if done.rank == fault.rank), None)
        if done is not None:
            outcome.injected_at = done.at
            outcome.bad_step = int(done.parameters["step"]) if fault.fault_class == "nan" else None
        judge(outcome, self._story, before, known)
        self._show.say(
            "demo",
            "right" if outcome.right else "wrong: " + "; ".join(outcome.why),
            "green" if outcome.right else "red",
        )
        return outcome

    def _each(self, messages: list[object]) -> None:
        self._tell(messages)
        self._children.check(but=self._job)

    def _tell(self, messages: list[object]) -> None:
        """What has come, that the job is back, and now and then how far it is."""
        self._show.messages(messages)
        current, now = self._story.current, self._clock.monotonic()
        if current is None:
            return
        attempt = current.started.attempt
        if current.first_step_at is not None and attempt > self._told_attempt:
            self._told_attempt, self._progress_at = attempt, now
            after = current.first_step_at - current.started.at
            back = "trains" if attempt == 1 else "trains again"
            self._show.say("job", f"{back}: step {current.step}, {after:.1f} s after the attempt was started", "green")
        elif current.step >= 0 and now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            self._show.say("job", f"step {current.step}, {self._step_seconds() * 1000:.0f} ms a step", "dim")

    def _handled(self, fault: Fault, before: AttemptStory, known: set[str]) -> bool:
        story = self._story
        fresh = [revisions[-1] for verdict_id, revisions in story.verdicts.items() if verdict_id not in known]
        if fault.verb == "stop":
            return self._job is not None and self._job.process.poll() is not None
        if not fault.restarts:
            closed = any(verdict.fault_class == fault.fault_class and verdict.status == "closed" for verdict in fresh)
            return closed and before.step >= 0
        now = story.current
        if now is None or now is before or now.first_step_at is None:
            return False
        resolved = any(
            story.incidents[v.verdict_id].state == "resolved" for v in fresh if v.verdict_id in story.incidents
        )
        origin = now.started.resume_step or 0
        return resolved and now.step >= origin + SETTLE_STEPS

    def _wait_steps(self, steps: int, seconds_max: float) -> bool:
        return self._story.wait_for(lambda: self._step() >= steps, seconds_max, self._each_while_the_job_lives)

    def _each_while_the_job_lives(self, messages: list[object]) -> None:
        self._tell(messages)
        self._children.check()

    def _step(self) -> int:
        current = self._story.current
        return -1 if current is None else current.step

    def _step_seconds(self) -> float:
        current = self._story.current
        ended = [] if current is None else [at for _, at in sorted(current.step_ended_at.items())][-50:]
        gaps = [later - earlier for earlier, later in pairwise(ended)]
        return statistics.median(gaps) if gaps else 0.0

    def _false_verdicts(self) -> int:
        unexpected = sum(len(outcome.unexpected) for outcome in self._result.outcomes)
        return unexpected if self._options.faults else len(self._story.verdicts)

    def _goodput(self) -> float | None:
        """Distinct steps × median step time ÷ time from the first attempt's start to the last step."""
        attempts = self._story.attempts
        if not attempts:
            return None
        ended = {step: at for _, attempt in sorted(attempts.items()) for step, at in attempt.step_ended_at.items()}
        gaps: list[float] = []
        for attempt in attempts.values():
            times = [at for _, at in sorted(attempt.step_ended_at.items())]
            gaps += [later - earlier for earlier, later in pairwise(times)]
        elapsed = max(ended.values(), default=0.0) - attempts[min(attempts)].started.at
        return min(1.0, len(ended) * statistics.median(gaps) / elapsed) if gaps and elapsed > 0 else None


def figures(result: DemoResult, wall_seconds: float) -> list[Figure]:
    """The demo's figures under their public names."""
    by_name = {outcome.fault.name: outcome for outcome in result.outcomes}
    rows = [
        Figure("demo.wall_seconds", round(wall_seconds, 1), "s"),
        Figure("demo.fault_seconds", round(result.fault_seconds, 1), "s", n=len(result.outcomes)),
        Figure(
            "demo.faults_right", sum(outcome.right for outcome in result.outcomes), "faults", n=len(result.outcomes)
        ),
        Figure("demo.false_verdicts", result.false_verdicts, "verdicts"),
    ]
    kill, stop = by_name.get("kill"), by_name.get("stop")
    if kill is not None and kill.step_seconds is not None:
        rows.append(Figure("demo.kill_to_step_seconds", round(kill.step_seconds, 3), "s"))
    if kill is not None and kill.steps_lost is not None:
        rows.append(Figure("demo.steps_lost", kill.steps_lost, "steps"))
    if stop is not None and stop.verdict_seconds is not None:
        rows.append(Figure("demo.hang_verdict_seconds", round(stop.verdict_seconds, 3), "s"))
    if result.goodput is not None:
        rows.append(Figure("demo.goodput", round(result.goodput, 4), "ratio"))
    return rows
