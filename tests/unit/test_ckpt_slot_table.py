"""The slot table: whose segment is taken, what a save may cost, what goes when memory is short, what is lent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_engine.adoption import Adopted, prove, take_back
from ckpt_engine.budget import ROOM_MARGIN_BYTES, MemoryBudget
from ckpt_engine.clock import HostClock
from ckpt_engine.errors import EngineRefused
from ckpt_engine.keeping import KeptSlot
from ckpt_engine.memfd import Segment, create_segment
from ckpt_engine.memory_room import MemoryRoom
from ckpt_engine.segment import SlotHeader, SlotState, read_state
from ckpt_engine.shardfile import Identity
from ckpt_engine.slots import SlotTable
from tests.ckpt_lab import fill_segment, put_step, raw_header
from tests.keeper_lab import half_written, sealed_memory, with_checksum

SLOT = 8 * 4096
Told = list[tuple[str, int, int]]


class Keeper:
    """What the table tells its keeper."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], tuple[int, int]] = {}

    def keep(self, shard: str, index: int, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self.kept[(shard, index)] = (found.st_dev, found.st_ino)

    def drop(self, shard: str, index: int) -> None:
        del self.kept[(shard, index)]


def table_of(cap_bytes: int = 1 << 30, room: MemoryRoom | None = None) -> tuple[SlotTable, Told, Keeper]:
    told: Told = []

    def tell(state: str, header: SlotHeader, reason: str) -> None:
        told.append((state, header.rank, header.step))

    table = SlotTable("job", MemoryBudget(cap_bytes, lambda: room), HostClock(), tell)
    keeper = Keeper()
    table.set_keeper(keeper)
    return table, told, keeper


def rank(number: int = 0, attempt: int = 1, world_size: int = 2) -> Identity:
    return Identity("job", attempt, number, world_size, -1)


def save(table: SlotTable, session: int, identity: Identity, step: int, size_bytes: int = SLOT) -> SlotHeader:
    """Register if need be, acquire, write and seal one step of four bytes in a slot of `size_bytes`."""
    grant = table.acquire(session, identity, step, size_bytes, [], 1.0)
    slot = table._shards[identity.rank].slots[grant.index]
    assert slot.segment is not None
    if grant.descriptor >= 0:
        os.close(grant.descriptor)
    fill_segment(slot.segment.view, *raw_header(step, 4, identity), b"%4d" % step)
    return table.seal(session, identity, grant.index, grant.generation)


def steps(table: SlotTable) -> list[tuple[int, int]]:
    return [(header.rank, header.step) for _, _, header in table.sealed()]


def kept_slots(*slots: tuple[str, int, Segment]) -> list[KeptSlot]:
    found = [KeptSlot(shard, index, segment.duplicate()) for shard, index, segment in slots]
    for _, _, segment in slots:
        segment.close()
    return found


def test_what_a_keeper_brings_is_adopted_as_far_as_it_is_whole(tmp_path: Path) -> None:
    table, _, keeper = table_of()
    adopted = take_back(
        table,
        kept_slots(
            ("0", 0, sealed_memory(7, b"good")),
            ("0", 1, half_written(sealed_memory(8, b"half"))),
            ("1", 0, sealed_memory(8, b"good", rank=1)),
            ("2", 0, sealed_memory(9, b"else", rank=3)),
            ("3", 1, sealed_memory(9, b"else", rank=3, job="other")),
        ),
        "job",
        tmp_path,
    )
    assert [(header.rank, header.step) for _, header in adopted.sealed] == [(1, 8), (0, 7)]
    assert (adopted.empty, adopted.refused) == (3, ())
    assert steps(table) == [(1, 8), (0, 7)]
    assert set(keeper.kept) == {("0", 0), ("0", 1), ("1", 0), ("2", 0), ("3", 1)}
    assert table.attempt == 1, "an older attempt stays fenced off"


def test_what_is_no_slot_is_refused_and_closed(tmp_path: Path) -> None:
    table, _, _ = table_of()
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    segment = sealed_memory(1, b"good")
    kept = kept_slots(("x", 0, segment), ("00", 0, sealed_memory(1, b"good")), ("0", 7, sealed_memory(1, b"good")))
    adopted = take_back(table, [*kept, KeptSlot("0", 0, plain)], "job", tmp_path)
    assert len(adopted.refused) == 4
    for entry in [*kept, KeptSlot("0", 0, plain)]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(entry.descriptor)
    assert table.memory_bytes == 0


def test_memory_that_the_cap_forbids_is_not_kept_and_the_newest_comes_first(tmp_path: Path) -> None:
    size = sealed_memory(1, b"good").size_bytes
    table, _, _ = table_of(size)
    adopted = take_back(
        table, kept_slots(("0", 0, sealed_memory(7, b"old.")), ("0", 1, sealed_memory(8, b"new."))), "job", tmp_path
    )
    assert steps(table) == [(0, 8)]
    assert "memory_bytes_max is too small" in adopted.refused[0]


def test_what_stands_on_disk_already_is_not_written_again(tmp_path: Path) -> None:
    import zlib

    put_step(tmp_path, 7, payload=b"good")
    table, _, _ = table_of()
    segments = with_checksum(sealed_memory(7, b"good"), zlib.crc32(b"good")), sealed_memory(8, b"newer")
    adopted = take_back(table, kept_slots(("0", 0, segments[0]), ("0", 1, segments[1])), "job", tmp_path)
    assert [(header.step, slot.durable) for slot, header in adopted.sealed] == [(8, False), (7, True)]


def test_the_newest_of_each_rank_is_compared_with_its_checksum(tmp_path: Path) -> None:
    table, _, _ = table_of()
    kept = kept_slots(
        ("0", 0, with_checksum(sealed_memory(7, b"fine"), 12345)),  # the older: compared when it is used
        ("0", 1, sealed_memory(8, b"good")),
        ("1", 0, with_checksum(sealed_memory(8, b"evil", rank=1), 12345)),
    )
    adopted = take_back(table, kept, "job", tmp_path)
    damaged: list[tuple[int, str]] = []
    prove(table, adopted.sealed, lambda header, reason: damaged.append((header.rank, reason)))
    assert [number for number, _ in damaged] == [1]
    assert "changed after step 8 was sealed" in damaged[0][1]
    assert steps(table) == [(0, 8), (0, 7)]
    assert adopted.sealed[0][0].checksum is not None
    again, _, _ = table_of()
    void = table._shards[1].slots[0].segment
    assert void is not None
    assert take_back(again, kept_slots(("1", 0, void)), "job", tmp_path) == Adopted((), 1, ())


def test_the_keepers_and_the_ranks_descriptors_are_told_to_be_one_memfd(tmp_path: Path) -> None:
    table, _, _ = table_of()
    mine = sealed_memory(7, b"good")
    take_back(table, [KeptSlot("0", 0, mine.duplicate())], "job", tmp_path)
    before = table.memory_bytes
    table.register(1, rank(world_size=1))
    assert table.offer(1, rank(world_size=1), 0, mine.descriptor) == table._shards[0].slots[0].generation
    assert table.offer(1, rank(world_size=1), 1, mine.descriptor) == 0, "it is the other slot's"
    assert table.memory_bytes == before
    os.fstat(mine.descriptor)  # still ours to close
    mine.close()


@pytest.mark.parametrize(("step", "taken"), [(9, True), (5, False)])
def test_a_rank_with_another_segment_is_believed_where_it_is_newer(tmp_path: Path, step: int, taken: bool) -> None:
    """The engine died after it had made a new segment and before its keeper had heard of it."""
    table, _, keeper = table_of()
    take_back(table, kept_slots(("0", 0, sealed_memory(7, b"good"))), "job", tmp_path)
    mine = sealed_memory(step, b"mine")
    table.register(1, rank(world_size=1))
    assert bool(table.offer(1, rank(world_size=1), 0, mine.descriptor)) == taken
    assert steps(table) == [(0, step if taken else 7)]
    assert (keeper.kept[("0", 0)] == mine.identity) == taken
    assert table.memory_bytes == mine.size_bytes, "one of the two is given back"
    mine.close()


def test_a_slot_finished_while_no_engine_was_there_counts_even_if_nobody_says_so(tmp_path: Path) -> None:
    table, told, _ = table_of()
    segment = half_written(sealed_memory(7, b"last"))
    rank_view = segment.duplicate()
    take_back(table, kept_slots(("0", 0, segment)), "job", tmp_path)
    assert steps(table) == []
    os.pwrite(rank_view, SlotState.SEALED.value.to_bytes(8, "little"), 1024)
    os.close(rank_view)
    assert steps(table) == [(0, 7)]
    assert told == [("sealed", 0, 7)]


def test_a_slot_that_was_found_damaged_is_never_adopted_again(tmp_path: Path) -> None:
    table, _, _ = table_of()
    table.register(1, rank())
    header = save(table, 1, rank(), 1)
    _, slot, _ = table.sealed()[0]
    table.void(slot, header)
    assert slot.segment is not None
    assert read_state(slot.segment.view) is SlotState.EMPTY
    table.hang_up(1, rank())
    assert steps(table) == []


def test_both_slots_must_fit_before_anything_is_touched() -> None:
    table, _, _ = table_of(2 * SLOT)
    table.register(1, rank())
    save(table, 1, rank(), 1)
    save(table, 1, rank(), 2)
    with pytest.raises(EngineRefused, match=rf"two slots of {2 * SLOT} bytes, {4 * SLOT} in all, .* hold {2 * SLOT}"):
        table.acquire(1, rank(), 3, 2 * SLOT, [], 1.0)
    assert steps(table) == [(0, 2), (0, 1)], "neither is given up for a save that cannot be"


def test_the_cap_counts_all_ranks_and_the_refusal_names_what_would_do() -> None:
    table, _, _ = table_of(3 * SLOT)
    table.register(1, rank(0))
    save(table, 1, rank(0), 1)
    save(table, 1, rank(0), 2)
    table.register(2, rank(1))
    with pytest.raises(EngineRefused, match=rf"slots use {2 * SLOT}; raise memory_bytes_max to {4 * SLOT} or more"):
        table.acquire(2, rank(1), 1, SLOT, [], 1.0)
    assert table.memory_bytes == 2 * SLOT


def test_a_tight_cgroup_is_named_with_its_numbers() -> None:
    room = MemoryRoom("the memory cgroup /job (v2)", 100 << 20, 80 << 20)
    table, _, _ = table_of(1 << 40, room)
    table.register(1, rank())
    with pytest.raises(EngineRefused) as refusal:
        table.acquire(1, rank(), 1, 4 << 20, [], 1.0)
    for part in (
        f"two slots of {4 << 20} bytes", f"{8 << 20} in all", "the memory cgroup /job (v2)",
        f"allows {100 << 20} bytes", f"{80 << 20} of them are in use", f"{20 << 20} are left",
        f"{ROOM_MARGIN_BYTES} stay free",
    ):  # fmt: skip
        assert part in str(refusal.value)
    save(table, 1, rank(), 1, 1 << 20)


def test_a_larger_layout_takes_the_slot_that_is_not_the_newest_and_frees_it_at_once() -> None:
    table, _, _ = table_of()
    table.register(1, rank())
    save(table, 1, rank(), 1)
    save(table, 1, rank(), 2)
    old = next(slot for _, slot, header in table.sealed() if header.step == 1).segment
    assert old is not None
    still_mapped = old.duplicate()
    save(table, 1, rank(), 3, 100 * SLOT)
    assert steps(table) == [(0, 3), (0, 2)]
    assert os.fstat(still_mapped).st_blocks == 0, "the memory is free although somebody holds a descriptor"
    assert table.memory_bytes == 101 * SLOT
    os.close(still_mapped)


def test_only_what_is_on_disk_and_of_ranks_that_left_is_evicted_the_oldest_first_and_never_what_is_trusted() -> None:
    table, told, keeper = table_of(8 * SLOT)
    for number, first in ((0, 10), (1, 20), (2, 30)):
        table.register(number + 1, rank(number, world_size=4))
        for step in (first, first + 1):
            header = save(table, number + 1, rank(number, world_size=4), step)
            _, slot, _ = next(entry for entry in table.sealed() if entry[2] == header)
            table.mark(slot, header, durable=step != 20)
        table.hang_up(number + 1, rank(number, world_size=4))
    table.set_trusted((1, 11))
    later = rank(3, attempt=2, world_size=4)
    table.register(9, later)
    save(table, 9, later, 50, 2 * SLOT)
    assert told == [("evicted", 0, 10), ("evicted", 1, 21)], "20 is not on disk, 11 is trusted"
    assert table.memory_bytes <= 8 * SLOT
    assert ("0", 0) not in keeper.kept or ("0", 1) not in keeper.kept
    save(table, 9, later, 51, 2 * SLOT)
    assert {step for _, step in steps(table)} >= {11, 20, 50, 51}


def test_a_segment_with_views_in_use_stays_and_the_slot_gets_another() -> None:
    table, _, _ = table_of()
    table.register(1, rank())
    save(table, 1, rank(), 1)
    _, slot, _ = table.sealed()[0]
    lent = slot.segment
    assert lent is not None
    view = lent.duplicate()
    loan = table.lend(0, lent.identity)
    assert loan is not None
    assert table.lend(1, lent.identity) is None, "it is not that rank's"
    for step in (2, 3, 4):
        save(table, 1, rank(), step)
    assert os.fstat(view).st_blocks > 0
    assert table.memory_bytes == 3 * SLOT, "and counts for as long"
    again = table.lend(0, lent.identity)
    assert again is not None
    table.give_back(loan)
    assert os.fstat(view).st_blocks > 0
    table.give_back(again)
    assert table.memory_bytes == 2 * SLOT
    assert os.fstat(view).st_blocks > 0, "a rank that only lost its connection still looks at it"
    os.close(view)


def test_a_kept_segment_is_told_to_the_keeper_before_it_is_granted() -> None:
    table, _, keeper = table_of()
    table.register(1, rank())
    grant = table.acquire(1, rank(), 1, SLOT, [], 1.0)
    found = os.fstat(grant.descriptor)
    assert keeper.kept == {("0", grant.index): (found.st_dev, found.st_ino)}
    os.close(grant.descriptor)


def test_a_segment_is_memory_without_a_name() -> None:
    segment = create_segment(4096)
    assert os.readlink(f"/proc/self/fd/{segment.descriptor}").startswith("/memfd:")  # noqa: PTH115 - it has no path
    segment.close()
