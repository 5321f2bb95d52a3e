"""Which step all ranks of a job can load, from what engines and disk say."""

from __future__ import annotations

from dataclasses import replace

from ckpt_engine.manifest import StepRecord
from ckpt_engine.status import AgreedStep, EngineStatus, ShardStatus, newest_agreed

PLACES = ((0, "a"), (1, "a"), (2, "b"))


def engine(node: str, *shards: tuple[int, int, int], world_size: int = 3) -> EngineStatus:
    """(rank, step, attempt) of each."""
    sealed = tuple(
        ShardStatus(rank, step, attempt, world_size, "sealed", 1, True, False) for rank, step, attempt in shards
    )
    return EngineStatus("job", node, 1, sealed, (), 0, 0)


def disk(*steps: tuple[int, int]) -> list[StepRecord]:
    return [StepRecord(step, attempt, 3, (0, 1, 2)) for step, attempt in steps]


def test_nothing_is_nothing() -> None:
    assert newest_agreed([], [], PLACES) is None


def test_the_newest_step_that_all_have_in_memory() -> None:
    a, b = engine("a", (0, 20, 1), (0, 10, 1), (1, 20, 1), (1, 10, 1)), engine("b", (2, 10, 1))
    assert newest_agreed([a, b], [], PLACES) == AgreedStep(10, 1, "memory")


def test_a_step_complete_on_disk_counts_for_those_who_lost_it() -> None:
    a = engine("a", (0, 20, 1), (1, 20, 1))
    assert newest_agreed([a], disk((10, 1), (20, 1)), PLACES) == AgreedStep(20, 1, "memory+disk")
    assert newest_agreed([], disk((10, 1), (20, 1)), PLACES) == AgreedStep(20, 1, "disk")


def test_memory_of_a_node_where_the_rank_no_longer_runs_does_not_count() -> None:
    a, b = engine("a", (0, 20, 1), (1, 20, 1), (2, 20, 1)), engine("b")
    assert newest_agreed([a, b], disk((10, 1)), PLACES) == AgreedStep(10, 1, "disk")


def test_only_steps_before_the_bad_one() -> None:
    a, b = engine("a", (0, 20, 1), (1, 20, 1)), engine("b", (2, 20, 1))
    assert newest_agreed([a, b], disk((10, 1)), PLACES, before_step=20) == AgreedStep(10, 1, "disk")


def test_one_step_of_two_attempts_is_not_one_checkpoint() -> None:
    """Rank 2 came back to a node that remembers its first try at step 20."""
    a, b = engine("a", (0, 20, 2), (1, 20, 2)), engine("b", (2, 20, 1))
    assert newest_agreed([a, b], disk((10, 1)), PLACES) == AgreedStep(10, 1, "disk")


def test_a_later_attempt_is_newer_than_a_higher_step() -> None:
    a, b = engine("a", (0, 15, 2), (1, 15, 2)), engine("b", (2, 15, 2))
    assert newest_agreed([a, b], disk((20, 1)), PLACES) == AgreedStep(15, 2, "memory")


def test_what_another_number_of_ranks_saved_counts_where_each_node_can_have_all_of_it() -> None:
    saved = [(0, 20, 1), (1, 20, 1), (2, 20, 1), (3, 20, 1)]
    a, b = engine("a", *saved[:2], world_size=4), engine("b", *saved[2:], world_size=4)
    on_disk = [StepRecord(10, 1, 4, (0, 1, 2, 3))]
    assert newest_agreed([a, b], on_disk, PLACES) == AgreedStep(10, 1, "disk"), "no node has all, nor can get it"
    assert newest_agreed([a, b], [], PLACES) is None
    ring = [replace(one, ring_on=True) for one in (a, b)]
    assert newest_agreed(ring, on_disk, PLACES) == AgreedStep(20, 1, "peer")
    assert newest_agreed(ring[:1], on_disk, PLACES) == AgreedStep(10, 1, "disk"), "half of it is lost"
    kept = [replace(ring[0], peer_shards=ring[1].shards), replace(ring[1], shards=())]
    assert newest_agreed(kept, on_disk, PLACES) == AgreedStep(20, 1, "peer")
    both = [engine(node, *saved, world_size=4) for node in "ab"]
    assert newest_agreed(both, on_disk, PLACES) == AgreedStep(20, 1, "memory")
    assert newest_agreed(both, on_disk, PLACES, before_step=20) == AgreedStep(10, 1, "disk")
    assert newest_agreed(both, on_disk, ()) is None


def test_what_only_the_object_store_has_is_the_last_resort_and_for_as_many_ranks_as_saved_it() -> None:
    stored = [StepRecord(10, 1, 3, (0, 1, 2)), StepRecord(20, 1, 4, (0, 1, 2, 3))]
    assert newest_agreed([], [], PLACES, objects=stored) == AgreedStep(10, 1, "object")
    assert newest_agreed([], disk((10, 1)), PLACES, objects=stored) == AgreedStep(10, 1, "disk")
    assert newest_agreed([], [], PLACES, before_step=10, objects=stored) is None
