"""Seeded schedules of faults, lost and returning nodes, people's commands, power cuts and a lying backend together."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.backends.memory import MemoryBackend
from recovery.incident import TERMINAL
from recovery.policy_config import PolicyConfig
from tests.recovery_world import JOB, QUICK, Cuts, World, verdict
from tests.simulation.test_recovery_schedules import lying_backend

SEEDS = 20
GROUPS = 2
CONFIG: PolicyConfig = replace(
    QUICK.with_modes({"gpu_lost": "auto", "node_lost": "auto"}).with_budgets({"infra": 6, "hang": 6, "unknown": 6}),
    quarantine_mode="auto", quarantine_seconds=60.0, capacity_seconds=2.0, capacity_retry_seconds=20.0,
    breaker_nodes_max=3, exit_grace_seconds=5.0, stop_seconds_max=10.0,
)  # fmt: skip


class Watched(World):
    """Checks at every start what must hold whatever else happens."""

    def make_steps(self) -> None:
        super().make_steps()
        view = MemoryBackend.observe(self.backend, JOB)
        excluded = set(self.backend._jobs[JOB].excluded)
        assert not excluded & {rank.node for rank in view.ranks if rank.state != "exited"}


def disturb(world: Watched, dice: random.Random, number: int) -> None:
    view = MemoryBackend.observe(world.backend, JOB)
    living = [rank for rank in view.ranks if rank.state == "running"]
    match dice.randrange(9):
        case 0 | 1 | 2:
            fault = dice.choice(["rank_lost", "hang", "gpu_lost", "nan", "collective_timeout", "preempted", "unknown"])
            if living:
                world.backend.end_rank(JOB, dice.choice(living).rank, signal=9)
            at = world.clock.now()
            world.send(
                verdict(
                    fault, f"v{number}", attempt=view.attempt, onset_at=at, at=at, onset_step=view.step,
                    first_bad_step=max(0, view.step - 1), settled=dice.random() < 0.7,
                )
            )  # fmt: skip
        case 3:
            if living:  # and nobody says anything
                world.backend.end_rank(JOB, dice.choice(living).rank, exit_code=dice.choice([137, 139, 255]))
        case 4:
            world.backend.lose_node(JOB, dice.choice(["n0", "n1", "spare", "extra"]) if number % 2 else "spare")
        case 5:
            world.backend.give_node(JOB, dice.choice(["n0", "n1", "spare", "extra"]))
        case 6:
            world.order(dice.choice(["hold", "resume"]))
        case 7:
            world.order("unexclude", node=dice.choice(["n0", "n1", "spare", "extra"]))
        case _:
            waiting = [one for one in world.store.unfinished() if one.plan is not None and one.plan.plan_hash]
            if waiting:
                chosen = dice.choice(waiting)
                world.order("approve", chosen.incident_id, plan_hash=chosen.plan.plan_hash)  # type: ignore[union-attr]


@pytest.mark.parametrize("group", range(GROUPS))
def test_whatever_happens_there_is_one_set_of_ranks_and_a_whole_story(tmp_path: Path, group: int) -> None:
    for seed in range(group * SEEDS // GROUPS, (group + 1) * SEEDS // GROUPS):
        dice = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        cuts = Cuts(frozenset(dice.sample(range(1, 400), dice.randrange(8))))
        world = Watched(folder, CONFIG, seed=seed, cuts=cuts, watched=True)
        world.backend.may_shrink(JOB, dice.choice([0, 1]))
        for number in range(12):
            world.backend.fault = lying_backend(dice, dice.choice([0.0, 0.0, 0.2]))  # type: ignore[assignment]
            disturb(world, dice, number)
            for _ in range(dice.randrange(1, 12)):
                world.round(dice.choice([0.1, 1.0, 5.0]))
                world.make_steps()
            if dice.random() < 0.2:
                world.offset = world.commands_offset = 0  # the consumer group was reset to the earliest message
        attempts = world.attempts()
        assert attempts == sorted(set(attempts)), f"seed {seed}: each attempt has one set of ranks"
        end_well(world, seed)
        check_story(world)
        held_starts = [one for one in world.store.attempts(JOB) if one.budget == "planned" and one.cause]
        assert all("preempted" in one.cause or "planned" in one.cause for one in held_starts), f"seed {seed}"
        world.store.close()


def check_story(world: World) -> None:
    """Every transition is told, in order; what was published twice is the same twice."""
    told: dict[str, list[int]] = {}
    copies: dict[tuple[str, float], set[object]] = {}
    for one in world.published:
        if hasattr(one, "sequence") and one.sequence not in told.setdefault(one.incident_id, []):
            told[one.incident_id].append(one.sequence)
        copies.setdefault((one.message_id, one.at), set()).add(one)
    assert all(seen == list(range(1, len(seen) + 1)) for seen in told.values())
    assert all(len(versions) == 1 for versions in copies.values())


def end_well(world: Watched, seed: int) -> None:
    """With nodes, a backend that answers and a person who resumes, nothing stays under way for ever."""
    world.backend.fault = lambda method: None
    for node in ("n0", "n1", "spare", "extra"):
        world.backend.give_node(JOB, node)
    world.order("resume")
    quiet = 0
    for _ in range(400):
        world.round(5.0)
        world.make_steps()
        quiet = quiet + 1 if world.controller.idle() else 0
        if quiet > 8:  # longer than the grace after which an end without a verdict is looked into
            break
    left = {one.incident_id: one.state for one in world.store.unfinished()}
    assert set(left.values()) <= {"held", "notified"}, f"seed {seed}: {left}"
    for incident_id, state in world.states().items():
        row = world.store.incident(incident_id)
        assert row is not None
        assert row.state == state
        assert (state in TERMINAL) == (incident_id not in left), f"seed {seed}: {incident_id} is {state}"
