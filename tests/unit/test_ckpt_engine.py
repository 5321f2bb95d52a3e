"""The engine as ranks and tools meet it on its socket; the ranks here are without torch."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_engine import engine as engine_module
from ckpt_engine import wire
from ckpt_engine.admin import EngineAdmin
from ckpt_engine.engine import Engine, EngineConfig
from ckpt_engine.errors import EngineRefused, EngineUnavailable
from ckpt_engine.manifest import complete_steps
from ckpt_engine.priority import NICENESS
from ckpt_engine.segment import SlotState, publish_state, read_state
from ckpt_engine.storage import OutputFile, Storage
from tests.ckpt_lab import (
    Lab,
    RawRank,
    engine_in_thread,
    eventually,
    fill_segment,
    put_step,
    raw_header,
    step_on_disk,
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


class GatedStorage(Storage):
    """Shards wait at `gate`; while `error` is set, writing one fails."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: OSError | None = None
        self.reached = threading.Event()
        self.at_sync = False

    def create(self, path: Path) -> OutputFile:
        return GatedFile(path, self) if "safetensors" in path.name else super().create(path)


class GatedFile(OutputFile):
    def __init__(self, path: Path, storage: GatedStorage) -> None:
        super().__init__(path)
        self._storage = storage

    def _wait(self, at_sync: bool) -> None:
        if self._storage.at_sync == at_sync:
            self._storage.reached.set()
            assert self._storage.gate.wait(20)
        if self._storage.error is not None:
            raise self._storage.error

    def write(self, piece: bytes | memoryview) -> None:
        self._wait(False)
        super().write(piece)

    def sync(self) -> None:
        self._wait(True)
        super().sync()


def test_a_save_is_sealed_then_durable_then_complete(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    rank.save(1, b"weights")
    assert rank.durable(1) == ""
    eventually(lambda: lab.told("complete", 1))
    assert [event.state for event in lab.events] == ["registered", "sealed", "durable", "complete"]
    assert [event.rank for event in lab.events] == [0, 0, 0, -1]
    assert lab.events[1].size_bytes == len(b"weights")
    assert [record.step for record in complete_steps(lab.directory)] == [1]
    rank.close()


def test_what_a_rank_saved_outlives_its_connection(lab: Lab) -> None:
    first = RawRank(lab.socket)
    first.save(5, b"from memory")
    first.close()
    second = RawRank(lab.socket, attempt=2)
    answer = second.load(5)
    assert (answer["tier"], answer["attempt"], answer["payload"]) == ("memory", 1, b"from memory")
    second.close()


def test_two_steps_are_held_and_the_third_takes_the_place_of_the_older(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    for step in (1, 2, 3):
        rank.save(step, b"%d" % step)
        assert rank.durable(step) == ""
    assert [shard.step for shard in lab.admin.status().shards] == [3, 2]
    assert rank.load(1)["tier"] == "disk"
    rank.close()


def test_a_rank_that_dies_while_writing_voids_that_slot_and_no_other(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    rank.save(1, b"good")
    _, _, view = rank.acquire(2, 4)
    view[-4:] = b"torn"
    rank.close()
    eventually(lambda: not lab.engine._sessions)
    reborn = RawRank(lab.socket, attempt=2)
    assert reborn.load(2)["tier"] == ""
    assert reborn.load(None)["payload"] == b"good"
    reborn.close()


def test_a_slot_that_a_dead_rank_had_published_counts(lab: Lab) -> None:
    """The last store came after all others: dying before saying so loses nothing."""
    rank = RawRank(lab.socket)
    _, _, view = rank.acquire(2, 4)
    fill_segment(view, *raw_header(2, 4, rank.identity), b"last")
    rank.close()
    eventually(lambda: lab.told("sealed", 2))
    reborn = RawRank(lab.socket, attempt=2)
    assert reborn.load(2)["payload"] == b"last"
    reborn.close()


def test_a_seal_of_a_slot_that_is_not_whole_is_refused(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    index, generation, view = rank.acquire(1, 4)
    assert read_state(view) is SlotState.WRITING
    publish_state(view, SlotState.SEALED)  # but no header
    with pytest.raises(EngineRefused, match="not whole"):
        rank.seal(index, generation)
    assert lab.admin.status().shards == ()
    rank.close()


@pytest.mark.parametrize("other", [{"job": "other"}, {"rank": 1}, {"attempt": 9}])
def test_a_slot_that_says_it_is_somebody_elses_is_refused(lab: Lab, other: dict[str, object]) -> None:
    rank = RawRank(lab.socket, world_size=2)
    index, generation, view = rank.acquire(1, 4)
    identity = RawRank(lab.socket, **{"world_size": 2, **other}).identity  # type: ignore[arg-type]
    fill_segment(view, *raw_header(1, 4, identity), b"lies")
    with pytest.raises(EngineRefused, match="not whole"):
        rank.seal(index, generation)
    rank.close()


def test_only_the_connection_a_slot_was_granted_to_may_seal_it(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    index, generation, _ = rank.acquire(1, 4)
    for slot, number in ((index, generation + 1), (1 - index, generation)):
        with pytest.raises(EngineRefused, match="not granted"):
            rank.seal(slot, number)
    rank.close()


def test_a_slot_that_is_being_persisted_is_not_overwritten(tmp_path: Path) -> None:
    storage = GatedStorage()
    with engine_in_thread(tmp_path, storage=storage) as lab:
        rank = RawRank(lab.socket)
        storage.gate.clear()
        rank.save(1, b"one")
        assert storage.reached.wait(20)
        rank.save(2, b"two")
        with pytest.raises(TimeoutError, match="still being read"):
            rank.acquire(3, 3, wait_seconds=0.05)
        assert [shard.step for shard in lab.admin.status().shards] == [2, 1]
        threading.Timer(0.05, storage.gate.set).start()
        rank.save(3, b"new")  # waits for the slot and gets it
        assert rank.durable(1) == ""
        rank.close()


def test_a_slot_is_free_again_while_its_file_is_still_being_synced(tmp_path: Path) -> None:
    storage = GatedStorage()
    storage.at_sync = True
    with engine_in_thread(tmp_path, storage=storage) as lab:
        rank = RawRank(lab.socket)
        storage.gate.clear()
        rank.save(1, b"one")
        assert storage.reached.wait(20)
        rank.save(2, b"two")
        rank.save(3, b"new")
        assert rank.durable(1, 0.0) is None, "it may still become durable"
        storage.gate.set()
        assert rank.durable(1) == ""
        rank.close()


def test_when_the_disk_is_slower_than_training_the_newest_wins(tmp_path: Path) -> None:
    storage = GatedStorage()
    with engine_in_thread(tmp_path, storage=storage) as lab:
        rank = RawRank(lab.socket)
        storage.at_sync = True
        storage.gate.clear()
        rank.save(1, b"1")
        assert storage.reached.wait(20)
        for step in (2, 3, 4):
            rank.save(step, b"%d" % step)
        storage.gate.set()
        assert rank.durable(4) == ""
        assert rank.durable(2) == "overtaken by step 4 before it was written"
        assert [record.step for record in complete_steps(lab.directory)] == [1, 4]
        rank.close()


def test_a_step_that_other_ranks_have_written_goes_before_a_newer_one(tmp_path: Path) -> None:
    """Else ranks that skip different steps would never complete one."""
    storage = GatedStorage()
    with engine_in_thread(tmp_path, storage=storage) as lab:
        rank = RawRank(lab.socket, world_size=2)
        storage.at_sync = True
        storage.gate.clear()
        rank.save(1, b"1")
        assert storage.reached.wait(20)
        rank.save(2, b"2")
        rank.save(3, b"3")
        put_step(lab.directory, 2, ranks=[1], world_size=2)
        storage.gate.set()
        assert rank.durable(2) == ""
        eventually(lambda: lab.told("complete", 2))
        rank.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_costs_no_save_and_is_tried_again(tmp_path: Path, number: int) -> None:
    storage = GatedStorage()
    with engine_in_thread(tmp_path, storage=storage) as lab:
        rank = RawRank(lab.socket)
        rank.save(1, b"one")
        assert rank.durable(1) == ""
        storage.error = OSError(number, os.strerror(number))
        rank.save(2, b"two")
        failed = eventually(lambda: lab.told("failed", 2))
        assert os.strerror(number) in failed[0].reason
        assert os.strerror(number) in lab.admin.status().persist_error
        assert rank.load(2)["payload"] == b"two", "memory keeps it"
        assert [record.step for record in complete_steps(lab.directory)] == [1]
        eventually(lambda: not list(lab.directory.rglob("*.tmp")), "giving a full disk its space back")
        storage.error = None
        assert rank.durable(2) == ""
        assert lab.admin.status().persist_error == ""
        rank.close()


def test_persist_now_does_not_wait_out_a_back_off(tmp_path: Path) -> None:
    storage = GatedStorage()
    storage.error = OSError(errno.ENOSPC, "full")
    with engine_in_thread(tmp_path, storage=storage, retry_seconds_min=600.0, retry_seconds_max=600.0) as lab:
        rank = RawRank(lab.socket)
        rank.save(1, b"one")
        eventually(lambda: lab.told("failed", 1))
        storage.error = None
        assert not lab.told("durable", 1)
        assert lab.admin.persist_now(10.0)
        eventually(lambda: lab.told("durable", 1))
        rank.close()


def test_stopping_brings_to_disk_what_memory_holds(tmp_path: Path) -> None:
    storage = GatedStorage()
    storage.error = OSError(errno.EIO, "broken")
    with engine_in_thread(tmp_path, storage=storage, retry_seconds_min=600.0, retry_seconds_max=600.0) as lab:
        rank = RawRank(lab.socket)
        rank.save(7, b"seven")
        eventually(lambda: lab.told("failed", 7))
        storage.error = None
        rank.close()
    assert [record.step for record in complete_steps(lab.directory)] == [7]
    assert lab.told("complete", 7)
    assert not lab.socket.exists()


def test_memory_that_decayed_is_neither_written_nor_handed_out(tmp_path: Path) -> None:
    storage = GatedStorage()
    with engine_in_thread(tmp_path, storage=storage) as lab:
        rank = RawRank(lab.socket)
        storage.error = OSError(errno.EIO, "not yet")
        rank.save(1, b"good")
        assert rank.load(1)["crc32"] > 0  # the checksum is known from here on
        (_, memory) = next(iter(rank.segments.values()))
        where = memory.find(b"good")
        memory[where : where + 4] = b"evil"
        storage.error = None
        eventually(
            lambda: [event for event in lab.told("failed", 1) if "changed after" in event.reason], str(lab.events)
        )
        assert rank.load(1)["tier"] == ""
        assert complete_steps(lab.directory) == []
        assert "changed after" in (rank.durable(1) or "")
        rank.close()


def test_the_newest_good_slot_is_kept_and_rejected_ones_are_written_over_first(lab: Lab) -> None:
    rank = RawRank(lab.socket, attempt=4)
    rank.save(110, b"good")
    rank.save(120, b"nans")
    assert lab.admin.reject_from(120, None, "loss is NaN") == 4
    assert [shard.step for shard in lab.admin.status().shards] == [110]
    rank.close()
    reborn = RawRank(lab.socket, attempt=5)
    assert reborn.load(120)["tier"] == ""
    assert reborn.load(None)["step"] == 110
    reborn.save(120, b"anew")
    assert [(shard.step, shard.attempt) for shard in lab.admin.status().shards] == [(120, 5), (110, 4)]
    assert reborn.load(120)["payload"] == b"anew"
    assert eventually(lambda: lab.told("rejected", 120))[0].reason == "loss is NaN"
    reborn.close()


def test_a_rejection_by_another_engine_is_obeyed(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path) as lab, engine_in_thread(tmp_path, node="n1") as other:
        rank = RawRank(lab.socket)
        rank.save(1, b"good")
        rank.save(2, b"nans")
        other.admin.reject_from(2, 1)
        assert rank.load(None)["step"] == 1
        assert [shard.step for shard in lab.admin.status().shards] == [1]
        rank.close()


def test_rejecting_is_idempotent_and_told_once(lab: Lab) -> None:
    for _ in range(3):
        assert lab.admin.reject_from(5, 2, "spike") == 2
    eventually(lambda: lab.told("rejected", 5))
    assert len(lab.told("rejected")) == 1


def test_after_a_restart_the_newest_attempt_is_read_from_disk(tmp_path: Path) -> None:
    put_step(tmp_path / "ck", 10, attempt=7)
    with engine_in_thread(tmp_path) as lab:
        assert lab.admin.reject_from(10) == 7
        assert complete_steps(lab.directory) == []


def test_unreadable_rejections_hand_nothing_out(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    rank.save(1, b"good")
    (lab.directory / "rejected.json").write_text("{")
    with pytest.raises(EngineRefused, match=r"rejected\.json is not readable"):
        rank.load(1)
    rank.close()


def test_a_slot_that_is_being_read_is_not_overwritten(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    rank.save(1, b"one")
    rank.save(2, b"two")
    assert rank.load(1)["tier"] == "memory"  # and has not said yet that it is done with it
    with pytest.raises(TimeoutError, match="still being read"):
        rank.acquire(3, 3, wait_seconds=0.05)
    rank.link.ask({"op": "return"})
    rank.acquire(3, 3)
    rank.close()


def test_a_rank_that_dies_while_reading_leaves_the_slot_free(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    rank.save(1, b"one")
    rank.save(2, b"two")
    assert rank.load(1)["tier"] == "memory"
    rank.close()
    reborn = RawRank(lab.socket, attempt=2)
    reborn.save(3, b"new")
    assert reborn.load(3)["payload"] == b"new"
    reborn.close()


def test_what_is_rejected_before_it_is_written_is_not_written(tmp_path: Path) -> None:
    storage = GatedStorage()
    with engine_in_thread(tmp_path, storage=storage) as lab:
        storage.error = OSError(errno.EIO, "not now")
        rank = RawRank(lab.socket)
        rank.save(1, b"nans")
        eventually(lambda: lab.told("failed", 1))
        lab.admin.reject_from(1, 1)
        storage.error = None
        assert rank.durable(1) == "no longer in memory, and not on disk"
        assert lab.admin.persist_now(10.0)
        assert complete_steps(lab.directory) == []
        rank.close()
    assert not lab.told("durable")


def test_a_step_rejected_while_it_is_written_is_not_completed(tmp_path: Path) -> None:
    storage = GatedStorage()
    with engine_in_thread(tmp_path, storage=storage) as lab:
        rank = RawRank(lab.socket)
        storage.gate.clear()
        rank.save(1, b"nans")
        assert storage.reached.wait(20)
        lab.admin.reject_from(1, 1)
        storage.gate.set()
        assert rank.durable(1) == ""
        rank.close()
    assert not lab.told("complete")


def test_writing_to_disk_gives_way_to_training(lab: Lab) -> None:
    (persist,) = (thread for thread in threading.enumerate() if thread.name == "persist")
    assert persist.native_id is not None
    eventually(lambda: os.getpriority(os.PRIO_PROCESS, persist.native_id or 0) == NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, 0) < NICENESS, "and nothing else does"


def test_the_slot_that_was_resumed_from_is_protected_from_what_came_after_it(lab: Lab) -> None:
    """Attempt 2 went back to 110 although 120 is in memory: the first save must not take 110 away."""
    rank = RawRank(lab.socket)
    rank.save(110, b"base")
    rank.save(120, b"past")
    rank.close()
    reborn = RawRank(lab.socket, attempt=2)
    assert reborn.load(110)["tier"] == "memory"
    report = {"op": "loaded", "tier": "memory", "step": 110, "attempt": 1, "seconds": 0.1, "size_bytes": 4}
    reborn.link.ask(report)
    reborn.acquire(115, 4)
    assert reborn.load(110)["payload"] == b"base"
    eventually(lambda: lab.told("loaded", 110, "memory"))
    reborn.close()


def test_within_an_attempt_steps_only_grow(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    rank.save(5, b"five")
    for step in (5, 4):
        with pytest.raises(EngineRefused, match="needs a new attempt number"):
            rank.acquire(step, 4)
    rank.close()
    reborn = RawRank(lab.socket, attempt=2)
    reborn.save(4, b"four")
    reborn.close()


def test_an_older_attempt_is_fenced_off(lab: Lab) -> None:
    running = RawRank(lab.socket, attempt=3)
    running.acquire(1, 4)
    late = RawRank(lab.socket, attempt=2)
    with pytest.raises(EngineRefused, match="attempt 2 is over; attempt 3 runs"):
        late.acquire(1, 4)
    running.close()


def test_a_superseded_rank_that_still_writes_can_hurt_nobody(lab: Lab) -> None:
    old = RawRank(lab.socket)
    old.save(1, b"good")
    index, generation, view = old.acquire(2, 4)
    new = RawRank(lab.socket, attempt=2)
    assert new.load(1)["payload"] == b"good"
    new.save(2, b"mine")
    fill_segment(view, *raw_header(2, 4, old.identity), b"late")
    with pytest.raises((EngineRefused, EngineUnavailable)):
        old.seal(index, generation)
    assert new.load(2)["payload"] == b"mine"
    new.close()
    old.close()


def test_another_job_is_refused(lab: Lab) -> None:
    with pytest.raises(EngineRefused, match="serves job 'job', not 'other'"):
        RawRank(lab.socket, job="other").acquire(1, 4)


def test_memory_is_bounded_and_the_refusal_names_the_numbers(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path, memory_bytes_max=64 << 10) as lab:
        rank = RawRank(lab.socket)
        rank.save(1, bytes(10 << 10))
        with pytest.raises(EngineRefused, match=r"may hold 65536 bytes, of which other slots use 0; raise"):
            rank.acquire(2, 60 << 10)
        assert lab.admin.status().memory_bytes <= 64 << 10
        assert rank.load(1)["tier"] == "memory", "the good slot is not given up for it"
        rank.close()


def test_shards_of_ranks_that_moved_away_make_room(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path, memory_bytes_max=150 << 10) as lab:
        moved = RawRank(lab.socket, rank=0, world_size=2)
        moved.save(1, bytes(20 << 10))
        assert moved.durable(1) == ""
        eventually(lambda: lab.admin.status().memory_bytes > 50 << 10, "the second slot")
        moved.close()
        eventually(lambda: not lab.engine._sessions)
        stays = RawRank(lab.socket, rank=1, world_size=2, attempt=2)
        stays.save(2, bytes(60 << 10))
        eventually(lambda: lab.told("evicted", 1))
        stays.close()


def test_a_grown_shard_gets_a_new_segment_and_the_other_slot_stays(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    rank.save(1, b"small")
    rank.save(2, bytes(5 << 20))
    assert rank.load(1)["payload"] == b"small"
    assert len(rank.load(2)["payload"]) == 5 << 20
    rank.close()


def test_the_second_slot_is_made_before_the_second_save_needs_it(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    index, _, view = rank.acquire(1, 100)
    other = lab.engine._table._shards[0].slots[1 - index]
    eventually(lambda: other.segment is not None and other.leases == 0)
    assert lab.admin.status().memory_bytes == 2 * len(view)
    rank.close()


def test_memory_does_not_grow_with_the_number_of_saves(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    rank.save(1, bytes(1000))
    rank.save(2, bytes(1000))
    before = lab.admin.status().memory_bytes
    for step in range(3, 60):
        rank.save(step, bytes(1000))
    assert lab.admin.status().memory_bytes == before
    rank.close()


def test_asked_for_the_newest_all_ranks_of_a_node_get_the_same(lab: Lab) -> None:
    """Rank 1 had not saved step 2 when the job died: nobody may resume from it."""
    ranks = [RawRank(lab.socket, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.save(1, b"both")
    ranks[0].save(2, b"solo")
    assert [rank.load(None)["step"] for rank in ranks] == [1, 1]
    for rank in ranks:
        rank.close()


def test_a_shard_of_another_world_size_is_not_handed_out(lab: Lab) -> None:
    rank = RawRank(lab.socket)
    rank.save(1, b"1of1")
    assert rank.durable(1) == ""
    rank.close()
    wider = RawRank(lab.socket, attempt=2, world_size=2)
    assert wider.load(1)["tier"] == ""
    wider.close()


def test_where_the_disk_has_a_newer_attempt_of_a_step_memory_is_stale(lab: Lab) -> None:
    """The rank went elsewhere, trained on, and came back to a node that remembers its first try."""
    rank = RawRank(lab.socket)
    rank.save(1, b"first")
    rank.close()
    put_step(lab.directory, 1, attempt=2, payload=b"second")
    back = RawRank(lab.socket, attempt=3)
    assert (back.load(1)["tier"], back.load(1)["attempt"]) == ("disk", 2)
    back.close()


def test_a_step_of_two_nodes_is_completed_by_the_last_of_them(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path) as lab, engine_in_thread(tmp_path, node="n1") as other:
        ranks = [RawRank(lab.socket, rank=0, world_size=2), RawRank(other.socket, rank=1, world_size=2)]
        ranks[0].save(1, b"zero")
        assert ranks[0].durable(1) == ""
        assert complete_steps(lab.directory) == []
        ranks[1].save(1, b"one")
        eventually(lambda: lab.told("complete", 1) or other.told("complete", 1))
        assert complete_steps(lab.directory)[0].ranks == (0, 1)
        for rank in ranks:
            rank.close()


def test_old_steps_are_removed_and_that_is_told(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path, retention_steps=2) as lab:
        rank = RawRank(lab.socket)
        for step in (1, 2, 3):
            rank.save(step, b"x")
            assert rank.durable(step) == ""
            eventually(lambda step=step: lab.told("complete", step))  # type: ignore[misc]
        eventually(lambda: lab.told("evicted", 1, "disk"))
        assert [record.step for record in complete_steps(lab.directory)] == [2, 3]
        rank.close()


def test_the_socket_is_private(lab: Lab) -> None:
    assert stat.S_IMODE(lab.socket.stat().st_mode) == 0o600


def test_another_user_is_turned_away(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module.wire, "peer_uid", lambda sock: os.getuid() + 4242)
    monkeypatch.setattr(wire, "connect", _connect_unchecked)
    with pytest.raises(EngineUnavailable, match=r"closed the connection|Broken pipe|reset"):
        lab.admin.status()


def _connect_unchecked(path: str | Path, timeout_seconds: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout_seconds)
    sock.connect(str(path))
    return sock


def test_a_client_turns_away_from_an_engine_of_another_user(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "peer_uid", lambda sock: os.getuid() + 4242)
    with pytest.raises(PermissionError, match="served by another user"):
        wire.connect(lab.socket, 1.0)


def test_one_engine_for_one_socket(lab: Lab) -> None:
    second = Engine(EngineConfig("job", "n0", lab.socket, lab.directory), lambda event: None)
    with pytest.raises(EngineRefused, match="another engine serves"):
        second.run()
    assert lab.admin.status().node == "n0", "the first one goes on"


def test_stopping_an_engine_that_has_ended_does_nothing(tmp_path: Path) -> None:
    before = open_descriptors()
    with engine_in_thread(tmp_path) as lab:
        pass
    assert open_descriptors() == before
    reading, writing = os.pipe()  # gets the numbers that the engine had
    os.set_blocking(reading, False)
    for _ in range(3):
        lab.engine.stop()
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)
    os.close(reading)
    os.close(writing)


def test_a_stale_socket_of_a_dead_engine_is_no_obstacle(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(tmp_path / "n0.sock"))
    with engine_in_thread(tmp_path) as lab:
        assert lab.admin.status().job == "job"


def test_a_socket_path_that_is_too_long_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="put it into a shorter folder"):
        EngineConfig("job", "n0", tmp_path / ("x" * 120), tmp_path)


@pytest.mark.parametrize("wrong", [{"job": ""}, {"job": "j" * 129}, {"retention_steps": 0}, {"memory_bytes_max": 0}])
def test_a_configuration_that_cannot_work_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        EngineConfig(**{"job": "j", "node": "n", "socket_path": tmp_path / "s", "directory": tmp_path, **wrong})  # type: ignore[arg-type]


def test_an_engine_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="does not answer"):
        EngineAdmin(tmp_path / "nobody.sock").status()


@pytest.mark.parametrize(
    "packet",
    [
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"op":"eat"}',
        b'{"op":"seal"}',
        b'{"op":"acquire"}',
        b'{"op":"reject"}',
        b"x" * 70_000,
    ],
    ids=["binary", "list", "empty", "unknown", "unregistered", "unregistered-2", "no-step", "large"],
)
def test_a_hostile_packet_ends_at_most_its_own_connection(lab: Lab, packet: bytes) -> None:
    with _connect_unchecked(lab.socket, 5.0) as sock:
        sock.sendall(packet)
        try:
            fields, _ = wire.receive(sock)
            assert "error" in fields
        except (wire.WireError, OSError):
            pass
    assert lab.admin.status().job == "job"


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_that_nobody_asked_for_are_closed(lab: Lab) -> None:
    before = open_descriptors()
    with _connect_unchecked(lab.socket, 5.0) as sock:
        for _ in range(20):
            wire.send(sock, {"op": "status"}, [0, 1, 2])
            wire.receive(sock)
        sock.sendall(b"")
    eventually(lambda: not lab.engine._sessions)
    assert open_descriptors() <= before + 1


def test_connections_are_bounded(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path, connections_max=2) as lab:
        held = [_connect_unchecked(lab.socket, 5.0) for _ in range(2)]
        eventually(lambda: len(lab.engine._sessions) == 2)
        with pytest.raises((EngineRefused, EngineUnavailable)):
            lab.admin.status()
        for sock in held:
            sock.close()
        eventually(lambda: not lab.engine._sessions)
        assert lab.admin.status().job == "job"


def test_stopping_does_not_wait_for_those_who_wait(tmp_path: Path) -> None:
    """One waits for the disk, one for a slot, both for longer than anybody wants an engine to take."""
    storage = GatedStorage()
    with engine_in_thread(tmp_path, storage=storage) as lab:
        rank = RawRank(lab.socket)
        storage.gate.clear()
        rank.save(1, b"one")
        assert storage.reached.wait(20)
        rank.save(2, b"two")
        waiters = [
            threading.Thread(target=_ignoring_the_end, args=(lambda: rank.acquire(3, 3, 600.0),)),
            threading.Thread(target=_ignoring_the_end, args=(lambda: rank.durable(2, 600.0),)),
        ]
        for waiter in waiters:
            waiter.start()
        eventually(lambda: len(lab.engine._sessions) == 2)
        lab.engine.stop()
        eventually(lambda: not lab.engine._sessions)
        for waiter in waiters:
            waiter.join(20)
        storage.gate.set()
        rank.close()


def _ignoring_the_end(ask: Callable[[], object]) -> None:
    with contextlib.suppress(EngineUnavailable, TimeoutError):
        ask()


def test_an_engine_that_starts_removes_what_the_last_one_left_half_written(tmp_path: Path) -> None:
    put_step(tmp_path / "ck", 10)
    half = step_on_disk(tmp_path / "ck", 10) / ".shard-00000-a0002.safetensors.n0.tmp"
    half.write_bytes(b"half")
    with engine_in_thread(tmp_path):
        assert not half.exists()


def test_a_listener_that_raises_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[object] = []
    monkeypatch.setattr(threading, "excepthook", reports.append)

    def broken(event: object) -> None:
        raise RuntimeError("the bus is on fire")

    engine = Engine(EngineConfig("job", "n0", tmp_path / "e.sock", tmp_path / "ck"), broken)
    up = threading.Event()
    thread = threading.Thread(target=engine.run, args=(up.set,))
    thread.start()
    assert up.wait(10)
    rank = RawRank(tmp_path / "e.sock")
    rank.save(1, b"one")
    assert rank.durable(1) == ""
    rank.close()
    engine.stop()
    thread.join(10)
    assert len(reports) == 4
