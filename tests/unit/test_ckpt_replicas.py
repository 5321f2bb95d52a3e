"""Ranks that hold the same tensors store them once, and one different bit is a shard of its own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.clock import HostClock
from ckpt_engine.commit import commit_replica, commit_shard, finish_step, make_step_folder
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.fetching import read_from_disk
from ckpt_engine.inspection import inspect_step, verify_steps
from ckpt_engine.manifest import (
    MANIFEST,
    Manifest,
    ShardRecord,
    complete_steps,
    decode_manifest,
    encode_manifest,
    read_manifest,
    read_records,
    step_folder,
)
from ckpt_engine.replicas import (
    REPLICA_BYTES_MIN,
    SAMPLE_PAGES_MAX,
    Replicas,
    claim_name,
    same_as_stored,
    same_in_memory,
    sample_of,
)
from ckpt_engine.segment import payload_region
from ckpt_engine.shardfile import Identity, ShardChecks
from ckpt_engine.storage import OutputFile, Storage
from tests.ckpt_lab import Lab, RawRank, engine_in_thread, eventually, raw_segment

STORAGE = Storage()
BYTES = 1 << 20
SAME = bytes(range(256)) * (BYTES // 256)


def flipped(payload: bytes, at: int) -> bytes:
    raw = bytearray(payload)
    raw[at] ^= 1
    return bytes(raw)


def save_all(labs: list[Lab], payloads: list[bytes], step: int = 1) -> list[RawRank]:
    """Rank i saves payloads[i] with the engine of node i (all with one where there is one)."""
    ranks = [
        RawRank(labs[rank % len(labs)].socket, rank=rank, world_size=len(payloads)) for rank in range(len(payloads))
    ]
    for rank, payload in zip(ranks, payloads, strict=True):
        rank.save(step, payload)
    for rank in ranks:
        assert rank.durable(step) == ""
    eventually(lambda: complete_steps(labs[0].directory), "the step")
    return ranks


def stored(directory: Path, rank: int, world_size: int, step: int = 1) -> bytes:
    shard = read_from_disk(directory, Identity("job", 1, rank, world_size, step))
    return bytes(shard.memory[: shard.layout.payload_bytes])


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


def test_four_replicas_take_the_place_of_one(lab: Lab) -> None:
    ranks = save_all([lab], [SAME] * 4)
    size = sum(path.stat().st_size for path in step_folder(lab.directory, 1).iterdir())
    assert size <= 1.05 * BYTES
    assert complete_steps(lab.directory)[0].size_bytes <= 1.05 * BYTES
    assert [stored(lab.directory, rank, 4) == SAME for rank in range(4)] == [True] * 4
    eventually(lambda: not list(step_folder(lab.directory, 1).glob(".*")), "the claim goes with the work")
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("at", [0, 5000, BYTES // 2 + 4097, BYTES - 1])
def test_a_replica_that_differs_by_one_bit_is_stored_on_its_own(lab: Lab, at: int) -> None:
    """In the sampled pages or outside of them."""
    odd = flipped(SAME, at)
    ranks = save_all([lab], [SAME, odd, SAME])
    manifest = read_manifest(lab.directory, 1)
    assert manifest is not None
    assert sum(record.stored_by is None for record in manifest.shards) == 2
    assert [stored(lab.directory, rank, 3) for rank in range(3)] == [SAME, odd, SAME]
    for rank in ranks:
        rank.close()


def test_engines_of_two_nodes_write_a_content_once(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path) as one, engine_in_thread(tmp_path, node="n1") as two:
        ranks = save_all([one, two], [SAME] * 4)
        records = read_records(one.directory, 1, 1)
        assert sum(record.stored_by is None for record in records) == 1
        assert [stored(one.directory, rank, 4) == SAME for rank in range(4)] == [True] * 4
        for rank in ranks:
            rank.close()


def test_contents_are_shared_out_among_the_engines(tmp_path: Path) -> None:
    """Two nodes hold the same eight shards: an engine writes what the other has not begun."""
    contents = [flipped(SAME, at * (BYTES // SAMPLE_PAGES_MAX)) for at in range(8)]
    with engine_in_thread(tmp_path) as one, engine_in_thread(tmp_path, node="n1") as two:
        labs = [one, two]
        ranks = [RawRank(labs[rank // 8].socket, rank=rank, world_size=16) for rank in range(16)]
        for rank in ranks:
            rank.save(1, contents[rank.identity.rank % 8])
        for rank in ranks:
            assert rank.durable(1) == ""
        eventually(lambda: complete_steps(one.directory), "the step")
        records = read_records(one.directory, 1, 1)
        assert sum(record.stored_by is None for record in records) == 8
        assert [stored(one.directory, rank, 16) for rank in range(16)] == contents * 2
        for rank in ranks:
            rank.close()


def test_without_deduplication_every_rank_has_its_file(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path, deduplicate=False) as lab:
        ranks = save_all([lab], [SAME] * 2)
        assert len(list(step_folder(lab.directory, 1).glob("*.safetensors"))) == 2
        for rank in ranks:
            rank.close()


def test_values_of_replicas_stay_their_own(lab: Lab) -> None:
    """Only tensors are shared: each rank's header has its own identity and values."""
    ranks = save_all([lab], [SAME] * 2)
    listed = inspect_step(lab.directory, 1)
    assert sorted(shard.stored_by is None for shard in listed) == [False, True]
    assert {len(shard.tensors) for shard in listed} == {1}
    for rank in ranks:
        rank.close()


def test_damage_is_found_for_everybody_who_shares_the_file(lab: Lab) -> None:
    ranks = save_all([lab], [SAME] * 3)
    (path,) = step_folder(lab.directory, 1).glob("*.safetensors")
    assert [verdict.whole for verdict in verify_steps(lab.directory)] == [True] * 3
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    verdicts = list(verify_steps(lab.directory))
    assert [verdict.whole for verdict in verdicts] == [False] * 3
    assert all(path.name in verdict.reason for verdict in verdicts)
    raw[-1] ^= 1
    path.write_bytes(raw)
    header = next(iter(step_folder(lab.directory, 1).glob("*.header")))
    header.write_bytes(header.read_bytes().replace(b'"$dict', b'"$dicu'))
    assert sorted(verdict.whole for verdict in verify_steps(lab.directory)) == [False, True, True]
    for rank in ranks:
        rank.close()


class SlowShards(Storage):
    """Shards wait at `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reached = threading.Event()

    def create(self, path: Path) -> OutputFile:
        if "safetensors" in path.name:
            self.reached.set()
            assert self.gate.wait(20)
        return super().create(path)


def test_what_another_engine_is_writing_is_waited_for(tmp_path: Path) -> None:
    slow = SlowShards()
    with engine_in_thread(tmp_path, storage=slow) as one, engine_in_thread(tmp_path, node="n1") as two:
        ranks = [RawRank(lab.socket, rank=rank, world_size=2) for rank, lab in enumerate((one, two))]
        ranks[0].save(1, SAME)
        assert slow.reached.wait(20)
        ranks[1].save(1, SAME)
        assert ranks[1].durable(1, 0.3) is None
        slow.gate.set()
        assert [rank.durable(1) for rank in ranks] == ["", ""]
        assert [record.stored_by for record in read_records(one.directory, 1, 1)] == [None, 0]
        for rank in ranks:
            rank.close()


def test_an_engine_that_claimed_and_died_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_engine.replicas.PATIENCE_SECONDS_MIN", 0.05)
    with engine_in_thread(tmp_path) as lab:
        header, view = raw_segment(1, SAME, Identity("job", 1, 1, 2, -1))
        make_step_folder(STORAGE, lab.directory, 1)
        name = claim_name(sample_of(header, payload_region(view, header)), 1)
        (step_folder(lab.directory, 1) / name).write_text('{"writer": "dead", "rank": 0}')
        with RawRank(lab.socket, rank=1, world_size=2) as rank:
            rank.save(1, SAME)
            assert rank.durable(1) == ""
        assert [record.stored_by for record in read_records(lab.directory, 1, 1)] == [None]


def test_an_engine_that_is_told_to_go_waits_for_nobody(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path) as lab:
        header, view = raw_segment(1, SAME, Identity("job", 1, 1, 2, -1))
        make_step_folder(STORAGE, lab.directory, 1)
        name = claim_name(sample_of(header, payload_region(view, header)), 1)
        (step_folder(lab.directory, 1) / name).write_text('{"writer": "other", "rank": 0}')
        with RawRank(lab.socket, rank=1, world_size=2) as rank:
            rank.save(1, SAME)
            assert rank.durable(1, 0.2) is None
    assert [record.rank for record in read_records(lab.directory, 1, 1)] == [1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"writer": 3, "rank": 0}', '{"writer": "n9", "rank": -1}', "\xff"])
def test_a_claim_that_says_nothing_is_waited_for_like_any_other(tmp_path: Path, text: str) -> None:
    header, view = raw_segment(1, SAME, Identity("job", 1, 1, 2, -1))
    payload = payload_region(view, header)
    make_step_folder(STORAGE, tmp_path, 1)
    name = claim_name(sample_of(header, payload), 1)
    (step_folder(tmp_path, 1) / name).write_text(text, encoding="latin-1")
    replicas = Replicas(STORAGE, tmp_path, "n0", HostClock())
    assert replicas.source(header, payload, patient=True) == "wait"
    assert replicas.source(header, payload, patient=False) == "own"


def test_small_shards_and_lone_ranks_claim_nothing(tmp_path: Path) -> None:
    replicas = Replicas(STORAGE, tmp_path, "n0", HostClock())
    for size, world_size in ((REPLICA_BYTES_MIN - 1, 2), (REPLICA_BYTES_MIN, 1)):
        header, view = raw_segment(1, bytes(size), Identity("job", 1, 0, world_size, -1))
        assert replicas.source(header, payload_region(view, header), patient=True) == "own"
    assert list(tmp_path.iterdir()) == []


def put_pair(directory: Path, storage: Storage = STORAGE, payload: bytes = SAME) -> ShardRecord | None:
    """Rank 0 whole, rank 1 as its replica, and the step."""
    headers = [raw_segment(1, SAME if rank == 0 else payload, Identity("job", 1, rank, 2, -1)) for rank in range(2)]
    source = commit_shard(storage, directory, *headers[0], writer="n0")
    record = commit_replica(
        storage, directory, *headers[1], source,
        lambda tensors: same_as_stored(tensors, step_folder(directory, 1), source), writer="n1",
    )  # fmt: skip
    if record is not None:
        finish_step(storage, directory, 1, 1, writer="n1")
    return record


def test_a_replica_is_compared_byte_by_byte_with_the_file(tmp_path: Path) -> None:
    record = put_pair(tmp_path / "same")
    assert record is not None
    assert record.stored_by == 0
    assert put_pair(tmp_path / "same") == record, "and once more is the same"
    assert put_pair(tmp_path / "other", payload=flipped(SAME, 777_777)) is None
    assert put_pair(tmp_path / "short", payload=SAME[:-1]) is None


def test_a_file_that_is_damaged_holds_nobodys_tensors(tmp_path: Path) -> None:
    header, view = raw_segment(1, SAME, Identity("job", 1, 0, 2, -1))
    source = commit_shard(STORAGE, tmp_path, header, view, writer="n0")
    payload = payload_region(view, header)
    path = step_folder(tmp_path, 1) / source.file
    raw = path.read_bytes()
    assert same_as_stored(payload, path.parent, source) == source.checks.payload_crc32
    for bad in (flipped(raw, 9), flipped(raw, len(raw) - 1), raw[:-1]):
        path.write_bytes(bad)
        assert same_as_stored(payload, path.parent, source) is None
    path.unlink()
    assert same_as_stored(payload, path.parent, source) is None
    assert same_in_memory(payload, payload[:-1], source) is None
    assert same_in_memory(payload, memoryview(flipped(SAME, 3)), source) is None


def test_a_replica_is_not_recorded_where_the_disk_fails(tmp_path: Path) -> None:
    class Full(Storage):
        def write_whole(self, path: Path, content: bytes, *, writer: str) -> None:
            if path.suffix == ".header":
                raise OSError(errno.ENOSPC, "full")
            super().write_whole(path, content, writer=writer)

    with pytest.raises(OSError, match="full"):
        put_pair(tmp_path, Full())
    assert [record.rank for record in read_records(tmp_path, 1, 1)] == [0]
    assert complete_steps(tmp_path) == []


@pytest.mark.parametrize(
    "wrong", [{"stored_by": 1}, {"stored_by": 5}, {"layout_hash": "cd"}, {"payload_crc32": 9}, {"stored_by": 2}]
)
def test_a_manifest_that_gives_a_rank_the_tensors_of_another_content_is_refused(wrong: dict[str, object]) -> None:
    fields = {"layout_hash": "ab", "payload_crc32": 2, "stored_by": 0, **wrong}
    layout, stored_by = str(fields["layout_hash"]), int(str(fields["stored_by"]))
    records = (
        ShardRecord("job", 3, 0, 3, 120, "ab", ShardChecks(500, 1, 2)),
        ShardRecord("job", 3, 1, 3, 120, layout, ShardChecks(90, 1, int(str(fields["payload_crc32"]))), stored_by),
        ShardRecord("job", 3, 2, 3, 120, "ab", ShardChecks(90, 1, 2), 0),
    )
    with pytest.raises(CheckpointDamaged, match="contradicts itself"):
        decode_manifest(encode_manifest(Manifest("job", 3, 3, 120, records)), 120)


def test_records_that_contradict_each_other_complete_no_step(tmp_path: Path) -> None:
    assert put_pair(tmp_path) is not None
    (step_folder(tmp_path, 1) / MANIFEST).unlink()
    header, view = raw_segment(1, flipped(SAME, 1), Identity("job", 1, 0, 2, -1))
    for path in step_folder(tmp_path, 1).glob("shard-00000*"):
        path.unlink()
    commit_shard(STORAGE, tmp_path, header, view, writer="n0")
    with pytest.raises(CheckpointDamaged, match="cannot be completed"):
        finish_step(STORAGE, tmp_path, 1, 1, writer="n0")
