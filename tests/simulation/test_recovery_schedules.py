"""Seeded schedules: redelivery, disorder, power cuts and a lying backend together, and still exactly one restart."""

import random
from collections import defaultdict
from pathlib import Path

import pytest

from recovery.backend import Ambiguous, BackendError, Conflict, Unavailable
from tests.recovery_world import JOB, QUICK, Cuts, World, verdict

SEEDS = 300
GROUPS = 10


def lying_backend(dice: random.Random, share: float) -> object:
    """Faults before the effect, and after it: the second kind is what makes a naive retry start twice."""

    def fault(method: str) -> tuple[BackendError, bool] | None:
        if dice.random() >= share:
            return None
        return dice.choice(
            [
                (Unavailable("connection refused"), False),
                (Ambiguous("timed out"), False),
                (Ambiguous("timed out"), True),
                (Conflict("somebody was here"), False),
                (BackendError("?"), True),
            ]
        )

    return fault


def check_story(world: World) -> None:
    """What was published tells the whole story, in order, without a gap, whatever was published twice."""
    sequences = defaultdict(list)
    for one in world.published:
        if hasattr(one, "sequence") and one.sequence not in sequences[one.incident_id]:
            sequences[one.incident_id].append(one.sequence)
    for incident_id, seen in sequences.items():
        assert seen == list(range(1, len(seen) + 1)), incident_id
    contents = defaultdict(set)
    for one in world.published:
        contents[one.message_id].add(one)
    assert all(len(versions) == 1 for key, versions in contents.items() if not key.endswith("/ambiguous"))


@pytest.mark.parametrize("group", range(GROUPS))
def test_exactly_one_restart_per_incident_under_any_schedule(tmp_path: Path, group: int) -> None:
    for seed in range(group * SEEDS // GROUPS, (group + 1) * SEEDS // GROUPS):
        dice = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        cuts = Cuts(frozenset(dice.sample(range(1, 80), dice.randrange(5))))
        world = World(folder, QUICK.with_modes({"gpu_lost": "auto"}), seed=seed, cuts=cuts)
        world.backend.fault = lying_backend(dice, dice.choice([0.0, 0.1, 0.4]))  # type: ignore[assignment]
        world.backend.end_rank(JOB, 1, signal=9)
        first = dice.choice(["rank_lost", "hang", "gpu_lost", "nan", "collective_timeout"])
        topic = [verdict(first, "root", first_bad_step=9, settled=dice.random() < 0.5)]
        topic += [verdict(first, "root", first_bad_step=9, revision=2)]
        topic += [verdict("collective_timeout", f"echo{number}") for number in range(dice.randrange(4))]
        topic += [dice.choice(topic) for _ in range(dice.randrange(6))]
        dice.shuffle(topic)
        for one in topic:
            world.send(one)
            for _ in range(dice.randrange(3)):
                world.round(dice.choice([0.0, 0.1, 1.0]))
            if dice.random() < 0.1:
                world.offset = 0  # the consumer group was reset to the earliest message
        world.run(150)
        world.offset = 0
        world.run(150)
        assert world.attempts() == [1, 2], f"seed {seed}"
        assert world.store.unfinished() == [], f"seed {seed}"
        restarts = [one for one in world.actions().values() if one.verb in ("restart", "exclude_and_restart")]
        assert len(restarts) == 1, f"seed {seed}"
        assert world.receipts()[restarts[0].action_id].outcome == "done", f"seed {seed}"
        check_story(world)
        world.store.close()
