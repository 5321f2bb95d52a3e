"""Power cut at every commit and around every effect of a life with two restarts and a stop; and real kill -9."""

from pathlib import Path

import pytest

from pipelines.bench_recovery.replays import measure_replayed_restarts
from recovery.backends.memory import MemoryBackend
from tests.recovery_world import JOB, QUICK, Cuts, World, verdict

SLICES = 8


def tell_the_story(world: World) -> None:
    """A rank is lost, then a GPU, then the user's code raises; each once the job has come back from the one before."""

    def running(attempt: int) -> bool:
        view = MemoryBackend.observe(world.backend, JOB)
        return view.attempt == attempt and view.step >= 14 and not world.store.open_rejections()

    world.backend.end_rank(JOB, 1, signal=9)
    world.send(verdict("rank_lost", "first", onset_step=12))
    world.run(100, then=lambda: running(2))
    world.send(verdict("gpu_lost", "second", attempt=2, onset_step=14, onset_at=1100.0))
    world.run(100, then=lambda: running(3))
    world.send(verdict("nan", "stale", attempt=2, first_bad_step=13))
    world.send(verdict("user_error", "third", attempt=3, onset_step=20, onset_at=1200.0))
    world.run(100)


def check_the_end(world: World) -> None:
    assert world.attempts() == [1, 2, 3]
    assert MemoryBackend.observe(world.backend, JOB).phase == "failed"
    assert world.states() == {"first": "resolved", "second": "resolved", "stale": "ignored", "third": "stopped"}
    for action_id in ("job/1/restart", "job/2/exclude_and_restart", "job/3/stop"):
        assert world.receipts()[action_id].outcome == "done"
        assert len({one for one in world.published if one.message_id == action_id}) == 1
    for incident_id in world.states():
        told = [one.sequence for one in world.published if getattr(one, "incident_id", "") == incident_id]
        assert sorted(set(told)) == list(range(1, max(told) + 1)), "no transition is lost"
    assert not world.store.unfinished()
    assert all(intent.phase == "closed" for intent in world.store.intents())


def points(folder: Path) -> int:
    """How many places there are where power can be cut in this story."""
    world = World(folder, QUICK.with_modes({"gpu_lost": "auto"}))
    tell_the_story(world)
    check_the_end(world)
    world.store.close()
    return world.cuts.seen


@pytest.mark.parametrize("part", range(SLICES))
def test_a_power_cut_anywhere_changes_nothing_that_matters(tmp_path: Path, part: int) -> None:
    (tmp_path / "uncut").mkdir()
    total = points(tmp_path / "uncut")
    assert total > 60
    for point in range(1 + part, total + 1, SLICES):
        folder = tmp_path / str(point)
        folder.mkdir()
        world = World(folder, QUICK.with_modes({"gpu_lost": "auto"}), cuts=Cuts(frozenset({point, point + 7})))
        tell_the_story(world)
        check_the_end(world)
        world.store.close()


def test_one_verdict_replayed_over_kill_nine_is_one_restart(tmp_path: Path) -> None:
    assert measure_replayed_restarts(tmp_path, replays=200) == 1
