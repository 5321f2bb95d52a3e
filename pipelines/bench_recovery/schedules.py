"""Random schedules, ten thousand of them: whatever happens when, each incident brings about exactly one restart.

Real are the controller, its store, policy and incident machine; simulated are time, the job, and what goes wrong around
recovery: redelivered and reordered verdicts, storms, power cuts around every commit and every effect, a backend that
lies before and after its effects, calls that are late, and a second controller that takes over while the first goes on.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from detectors.verdict import Culprit, FaultClass, Verdict
from pipelines.bench_recovery.outcome import Outcome, Task, Tell
from pipelines.bench_recovery.schedule_world import FIRST_STEP, JOB, RANKS, Cuts, ScheduleWorld
from pipelines.figures import Figure
from recovery.action import Action
from recovery.policy_config import PolicyConfig

IN_MEMORY = Path("/dev/shm")  # stores that are not synced anyway need no disk
BATCH = 50  # schedules of one message between processes
FAULTS_MAX = 3
ROUNDS_MAX = 400  # until an incident has to be over
FAILURES_SHOWN_MAX = 5
CUTS_MAX = 5
CUT_POINTS_MAX = 90
RESTARTING: tuple[FaultClass, ...] = ("rank_lost", "hang", "gpu_lost", "nan", "collective_timeout", "network_error")
# Three lost GPUs on three of five nodes would rightly be held for a person: the breaker has tests of its own.
CONFIG = PolicyConfig(
    probation_steps=3, probation_seconds=1.0, retry_seconds=0.2, retry_seconds_max=1.0, backoff_seconds=1.0,
    stop_seconds_max=1e6, probation_seconds_max=1e6, breaker_nodes_max=FAULTS_MAX, breaker_share=1.0,
).with_modes({"gpu_lost": "auto"})  # fmt: skip


@dataclass(slots=True)
class Counted:
    """What schedules have shown."""

    schedules: int = 0
    incidents: int = 0
    restarts: int = 0
    duplicates: int = 0
    lost: int = 0
    lives: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Counted) -> None:
        self.schedules += other.schedules
        self.incidents += other.incidents
        self.restarts += other.restarts
        self.duplicates += other.duplicates
        self.lost += other.lost
        self.lives += other.lives
        self.failures = [*self.failures, *other.failures][:FAILURES_SHOWN_MAX]


def measure_schedules(task: Task, tell: Tell) -> Outcome:
    """All schedules, over several processes."""
    whole = Counted()
    seeds = range(task.seed, task.seed + task.schedules)
    batches = [seeds[begin : begin + BATCH] for begin in range(0, len(seeds), BATCH)]
    if task.processes == 1:
        for batch in batches:
            whole.add(run_schedules(batch))
            tell(f"{whole.schedules:,} of {task.schedules:,} schedules")
    else:
        with ProcessPoolExecutor(task.processes, get_context("spawn")) as pool:
            for done in as_completed([pool.submit(run_schedules, batch) for batch in batches]):
                whole.add(done.result())
                tell(f"{whole.schedules:,} of {task.schedules:,} schedules")
    figures = [
        Figure("recovery.schedules", whole.schedules, "schedules", n=whole.schedules),
        Figure("recovery.duplicates", whole.duplicates, "restarts", n=whole.restarts),
        Figure("recovery.lost", whole.lost, "incidents", n=whole.incidents),
    ]
    notes = [
        f"[schedules] {whole.incidents:,} incidents, {whole.restarts:,} restarts, {whole.lives:,} lives of recovery",
        *(f"[schedules] {failure}" for failure in whole.failures),
    ]
    return Outcome(figures, notes=notes)


def run_schedules(seeds: range) -> Counted:
    """These schedules, one after another."""
    counted = Counted()
    with _quick_folder() as folder:
        for seed in seeds:
            place = folder / str(seed)
            place.mkdir()
            counted.add(run_schedule(seed, place))
            shutil.rmtree(place)
    return counted


@contextmanager
def _quick_folder() -> Iterator[Path]:
    where = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="transom-schedules-", dir=where) as name:
        yield Path(name)


def run_schedule(seed: int, folder: Path) -> Counted:
    """One to three faults, one after another, each with its verdicts and everything that may go wrong meanwhile."""
    dice = random.Random(seed)
    world = ScheduleWorld(folder, CONFIG, dice, lateness=dice.choice([0.0, 0.2, 0.6]))
    cuts = Cuts(frozenset(dice.sample(range(1, CUT_POINTS_MAX), dice.randrange(CUTS_MAX))))
    world.arm(cuts, dice.choice([0.0, 0.1, 0.4]))
    counted = Counted(schedules=1)
    try:
        for number in range(dice.randrange(1, FAULTS_MAX + 1)):
            _let_train(world)
            _one_incident(world, dice, number, counted)
        if dice.random() < 0.2:
            _end_of_the_job(world, dice, counted)
        counted.restarts = len(world.backend.starts) - 1
        for failure in told_wrong(world):
            counted.lost += 1
            counted.failures.append(f"schedule {seed}: {failure}")
    except AssertionError as error:
        counted.lost += 1
        counted.failures.append(f"schedule {seed}: {type(error).__name__} {error}")
    finally:
        counted.lives = world.lives
        world.close()
    if counted.duplicates or counted.lost:
        counted.failures = counted.failures or [f"schedule {seed}: {counted}"]
    return counted


def _let_train(world: ScheduleWorld) -> None:
    """New steps since the last fault, or budgets would rightly call the next one a repetition."""
    for _ in range(6):
        world.make_steps()
        world.round(0.5)


def _one_incident(world: ScheduleWorld, dice: random.Random, number: int, counted: Counted) -> None:
    """A fault, its storm, and rounds until all is quiet: exactly one more attempt."""
    attempt = world.view().attempt
    fault: FaultClass = dice.choice(RESTARTING)
    rank = dice.randrange(RANKS)
    if fault == "hang":
        world.backend.stall_rank(JOB, rank)
    else:
        world.backend.end_rank(JOB, rank, signal=9)
    before = len(world.backend.starts)
    counted.incidents += 1
    _deliver(world, dice, _storm(world, dice, fault, rank, number))
    _run_until(world, lambda: world.view().attempt > attempt and _steady(world), steps=True)
    world.offset = 0  # the consumer group is reset: all of it comes again
    _run_until(world, lambda: _steady(world), steps=True)
    starts = len(world.backend.starts) - before
    counted.duplicates += max(0, starts - 1)
    counted.lost += int(starts == 0 or not _steady(world))


def _end_of_the_job(world: ScheduleWorld, dice: random.Random, counted: Counted) -> None:
    """The job finishes, or its script raises: whatever verdicts say then, nothing is started."""
    attempt, before = world.view().attempt, len(world.backend.starts)
    counted.incidents += 1
    if dice.random() < 0.5:
        for rank in range(RANKS):
            world.backend.end_rank(JOB, rank, exit_code=0)
        verdicts = [_verdict(world, "hang", "late", 0, attempt)]
    else:
        world.backend.end_rank(JOB, 0, exit_code=1)
        verdicts = [_verdict(world, "user_error", "raised", 0, attempt, summary="ValueError: bad label")]
    verdicts += [_verdict(world, "rank_lost", "later", 1, attempt, at=5.0)]
    _deliver(world, dice, verdicts, keep_order=True)
    _run_until(world, world.quiet, steps=False)
    counted.duplicates += len(world.backend.starts) - before
    counted.lost += int(world.view().phase not in ("finished", "failed"))


def _storm(world: ScheduleWorld, dice: random.Random, fault: FaultClass, rank: int, number: int) -> list[Verdict]:
    """The root with its revision, its echoes, and some of them again, in any order."""
    attempt = world.view().attempt
    step = world.view().step
    step = step if step >= 0 else FIRST_STEP
    bad = max(6, step - 2) if fault == "nan" else None
    root = partial(_verdict, world, fault, f"root{number}", rank, attempt, first_bad_step=bad, onset_step=step)
    settled = dice.random() < 0.5
    storm = [root(settled=settled), root(revision=2)]
    for echo in range(dice.randrange(4)):
        victim = (rank + 1 + echo) % RANKS
        storm.append(_verdict(world, "collective_timeout", f"echo{number}-{echo}", victim, attempt, at=1.0))
    storm += [dice.choice(storm) for _ in range(dice.randrange(6))]
    storm += [dice.choice(world.topic) for _ in range(dice.randrange(3)) if world.topic]  # of attempts that are over
    dice.shuffle(storm)
    return storm


def _deliver(world: ScheduleWorld, dice: random.Random, verdicts: list[Verdict], *, keep_order: bool = False) -> None:
    for verdict in verdicts:
        world.topic.append(verdict)
        for _ in range(dice.randrange(3)):
            world.round(dice.choice([0.0, 0.1, 1.0]))
        if dice.random() < 0.1 and not keep_order:
            world.offset = 0
        if dice.random() < 0.08:
            world.take_over()


def _run_until(world: ScheduleWorld, done: object, *, steps: bool) -> None:
    """Rounds until it holds, at most so many."""
    assert callable(done)
    for _ in range(ROUNDS_MAX):
        world.round(0.3)
        if steps:
            world.make_steps()
        if done():
            return


def _steady(world: ScheduleWorld) -> bool:
    return world.quiet() and not world.store.unfinished() and world.view().phase == "running"


def _verdict(
    world: ScheduleWorld, fault: FaultClass, name: str, rank: int, attempt: int, *, at: float = 0.0, revision: int = 1,
    settled: bool = True, summary: str = "", first_bad_step: int | None = None, onset_step: int | None = None,
) -> Verdict:  # fmt: skip
    now = world.clock.now()
    return Verdict(
        verdict_id=name, revision=revision, job=JOB, attempt=attempt, fault_class=fault, severity="critical",
        settled=settled, culprits=(Culprit(rank=rank, node=world.view().ranks[rank].node),), onset_at=now + at, at=now,
        advice="restart_in_place", summary=summary or f"{fault} of rank {rank}", first_bad_step=first_bad_step,
        onset_step=onset_step,
    )  # fmt: skip


def told_wrong(world: ScheduleWorld) -> list[str]:
    """What is wrong with the story that was published: gaps in it, two versions of a message, a restart without one."""
    wrong = []
    sequences: dict[str, set[int]] = {}
    versions: dict[str, set[object]] = {}
    restarts: Counter[str] = Counter()
    for one in world.published:
        sequence = getattr(one, "sequence", None)
        if sequence is not None:
            sequences.setdefault(getattr(one, "incident_id", ""), set()).add(sequence)
        versions.setdefault(one.message_id, set()).add(one)
        if isinstance(one, Action) and one.next_attempt is not None and one.verb != "ignore":
            restarts[one.action_id] |= 1
    for incident_id, seen in sequences.items():
        if seen != set(range(1, len(seen) + 1)):
            wrong.append(f"transitions {sorted(seen)} of {incident_id}")
    wrong += [f"two versions of {key}" for key, seen in versions.items() if len(seen) > 1 and "/ambiguous" not in key]
    effective = len(world.backend.starts) - 1
    if sum(restarts.values()) != effective:
        wrong.append(f"{effective} restarts, told of {sum(restarts.values())}")
    return wrong
