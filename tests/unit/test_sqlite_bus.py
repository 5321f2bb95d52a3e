"""What is special about the embedded bus: its file, its locks, its members' sessions, its retention."""

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from ingest.bus import BusMisconfigured, BusUnavailable, TopicPartition
from ingest.clock import ManualClock, SystemClock
from ingest.sqlite_bus import SqliteBus
from ingest.sqlite_consumer import is_dead, process_identity
from ingest.sqlite_file import file_system_of

MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/ada/local rw - xfs /dev/sdb1 rw
32 22 0:42 / /mnt/my\040share rw - fuse.sshfs ada@host: rw
33 22 0:43 / /data rw master:1 propagate_from:2 - ext4 /dev/sdc1 rw
34 22 0:44 / /data rw - lustre mgs:/fs rw
a line that is none"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/bus.sqlite", "ext4"),
        ("/home/ada/.transom/bus.sqlite", "nfs4"),
        ("/home/ada/local/bus.sqlite", "xfs"),
        ("/homer/bus.sqlite", "ext4"),
        ("/mnt/my share/bus.sqlite", "fuse.sshfs"),
        ("/data/bus.sqlite", "lustre"),  # mounted over the ext4
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "9p"])
def test_a_network_file_system_is_refused_with_a_reason_and_nothing_is_created(tmp_path: Path, kind: str) -> None:
    mounts = f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path} rw - {kind} server:/x rw"
    with pytest.raises(BusMisconfigured, match=f"{kind}, a network file system.*local disk"):
        SqliteBus(tmp_path / "state" / "bus.sqlite", clock=SystemClock(), mountinfo=mounts)
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_network_file_system_is_seen_through(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    mounts = f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path.resolve() / 'far'} rw - nfs server:/x rw"
    with pytest.raises(BusMisconfigured, match="network file system"):
        SqliteBus(tmp_path / "near" / "bus.sqlite", clock=SystemClock(), mountinfo=mounts)


def open_bus(folder: Path, clock: ManualClock | None = None, **options: float) -> SqliteBus:
    bus = SqliteBus(folder / "bus.sqlite", clock=clock or ManualClock(1000.0), mountinfo="", **options)
    bus.create_topics(1)
    return bus


def publish(bus: SqliteBus, *values: bytes, topic: str = "metrics") -> None:
    producer = bus.producer()
    for value in values:
        producer.send(topic, "job", [], value)
    producer.flush(5.0)
    producer.close()


def test_folder_and_files_are_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        bus = open_bus(tmp_path / "state")
        producer = bus.producer()
        producer.send("metrics", "job", [], b"1")
        producer.flush(5.0)
    finally:
        os.umask(before)
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()}
    producer.close()
    assert files == {"bus.sqlite": 0o600, "bus.sqlite-wal": 0o600, "bus.sqlite-shm": 0o600}
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


@pytest.mark.parametrize("content", [b"this is no database, but it is long enough to be read as one" * 40])
def test_a_file_that_is_no_bus_is_one_clear_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bus.sqlite").write_bytes(content)
    with pytest.raises(BusMisconfigured, match=r"not an intact bus file.*move it away"):
        SqliteBus(tmp_path / "bus.sqlite", clock=SystemClock(), mountinfo="")
    assert (tmp_path / "bus.sqlite").read_bytes() == content


def test_a_damaged_page_is_reported_when_it_is_read(tmp_path: Path) -> None:
    bus = open_bus(tmp_path)
    publish(bus, *[b"x" * 3000] * 40)
    raw = bytearray((tmp_path / "bus.sqlite").read_bytes())
    raw[4096:] = b"\xaa" * (len(raw) - 4096)
    (tmp_path / "bus.sqlite").write_bytes(raw)
    with pytest.raises(BusMisconfigured, match="not an intact bus file"):
        bus.consumer("g", ("metrics",)).poll(1, 0.0)


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    open_bus(tmp_path)
    connection = sqlite3.connect(tmp_path / "bus.sqlite")
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(BusMisconfigured, match="newer transom"):
        open_bus(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BusMisconfigured, match="choose a state_dir that is writable"):
        SqliteBus(tmp_path / "file" / "bus.sqlite", clock=SystemClock(), mountinfo="")


def test_a_held_lock_makes_flush_fail_in_bounded_time_and_keeps_the_buffer(tmp_path: Path) -> None:
    bus = open_bus(tmp_path)
    holder = sqlite3.connect(tmp_path / "bus.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    producer = bus.producer()
    producer.send("metrics", "job", [], b"1")
    with pytest.raises(BusUnavailable, match="holds the write lock"):
        producer.flush(0.05)
    holder.execute("ROLLBACK")
    holder.close()
    producer.flush(5.0)
    producer.close()
    consumer = bus.consumer("g", ("metrics",))
    assert [record.value for record in consumer.poll(10, 0.0)] == [b"1"]
    consumer.close()


def test_a_full_disk_is_reported_and_what_was_sent_is_kept(tmp_path: Path) -> None:
    bus = open_bus(tmp_path)
    producer = bus.producer()
    (pages,) = producer._connection.execute("PRAGMA page_count").fetchone()
    producer._connection.execute(f"PRAGMA max_page_count={pages + 2}")  # SQLite's own way to be out of space
    for number in range(20):
        producer.send("metrics", "job", [], b"%d" % number + b"x" * 4000)
    with pytest.raises(BusUnavailable, match="is full"):
        producer.flush(1.0)
    producer._connection.execute("PRAGMA max_page_count=100000")
    producer.flush(1.0)
    producer.close()
    consumer = bus.consumer("g", ("metrics",))
    assert [int(record.value.rstrip(b"x")) for record in consumer.poll(100, 0.0)] == list(range(20))
    consumer.close()


def test_a_silent_member_loses_its_partitions_and_its_late_commit_is_refused(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    bus = open_bus(tmp_path, clock, session_timeout_seconds=10.0)
    publish(bus, b"1", b"2")
    told: list[str] = []
    silent = bus.consumer("g", ("metrics",), on_revoke=lambda places: told.append("revoked"))
    assert len(silent.poll(2, 0.0)) == 2
    waiting = bus.consumer("g", ("metrics",))
    assert waiting.poll(2, 0.0) == []
    clock.advance(10.5)
    assert [record.value for record in waiting.poll(2, 0.0)] == [b"1", b"2"]
    waiting.commit()
    publish(bus, b"3")
    with pytest.raises(BusUnavailable, match="was taken from this member"):
        silent.commit()
    assert silent.assignment() == {TopicPartition("metrics", 0)}  # it does not know yet
    assert silent.poll(2, 0.0) == []
    assert (told, silent.assignment()) == (["revoked"], frozenset())
    assert [record.value for record in waiting.poll(2, 0.0)] == [b"3"]
    waiting.close()
    assert [record.value for record in silent.poll(2, 0.0)] == [b"3"]  # it joined again, and is the only one now
    silent.close()


def test_a_member_that_polls_keeps_its_partitions_for_ever(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    bus = open_bus(tmp_path, clock, session_timeout_seconds=10.0)
    first, second = bus.consumer("g", ("metrics",)), bus.consumer("g", ("metrics",))
    for _ in range(20):
        first.poll(1, 0.0)
        second.poll(1, 0.0)
        clock.advance(4.0)
    assert first.assignment() == {TopicPartition("metrics", 0)}
    assert second.assignment() == frozenset()
    second.close()
    first.close()


def test_a_partition_is_not_claimed_before_its_owner_has_released_it(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path / "bus.sqlite", clock=ManualClock(1000.0), mountinfo="")
    bus.create_topics(2)
    publish(bus, b"1", b"2")
    first = bus.consumer("g", ("metrics",), on_revoke=lambda places: first.commit())
    polled = first.poll(2, 0.0)
    second = bus.consumer("g", ("metrics",))
    second.poll(2, 0.0)
    assert second.assignment() == frozenset()
    first.poll(1, 0.0)  # told, commits in on_revoke, releases
    second.poll(1, 0.0)
    assert first.assignment() | second.assignment() == {TopicPartition("metrics", n) for n in (0, 1)}
    assert not first.assignment() & second.assignment()
    assert len(polled) == 2
    assert second.lag() in ({TopicPartition("metrics", 1): 0}, {TopicPartition("metrics", 0): 0})
    first.close()
    second.close()


def test_a_process_is_dead_only_where_that_is_certain() -> None:
    ours = process_identity()
    namespace, pid, started = ours.split(" ")
    assert not is_dead(ours, ours)
    assert is_dead(f"{namespace} {pid} {int(started) - 1}", ours)  # its number was given to another process
    assert is_dead(f"{namespace} 4194305 1", ours)  # above the kernel's highest number
    assert not is_dead("pid:[1] 4194305 1", ours)  # of another container: we cannot see it
    assert not is_dead("- 4194305 1", ours)


def test_prune_takes_the_oldest_and_readers_go_on_with_what_is_left(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    bus = open_bus(tmp_path, clock)
    publish(bus, b"1", b"2")
    clock.advance(100.0)
    publish(bus, b"3")
    publish(bus, b"kept", topic="verdicts")
    slow = bus.consumer("slow", ("metrics",))
    assert [record.value for record in slow.poll(1, 0.0)] == [b"1"]
    assert bus.prune("metrics", 1050.0) == 2
    assert bus.prune("metrics", 1050.0) == 0
    assert slow.lag() == {TopicPartition("metrics", 0): 1}
    fresh = bus.consumer("fresh", ("metrics", "verdicts"))
    for consumer, expected in ((slow, [(2, b"3")]), (fresh, [(2, b"3"), (0, b"kept")])):
        assert [(record.offset, record.value) for record in consumer.poll(9, 0.0)] == expected
        consumer.close()
    publish(bus, b"4")  # offsets go on, they are never used again
    late = bus.consumer("late", ("metrics",), start="earliest")
    assert [(record.offset, record.value) for record in late.poll(9, 0.0)] == [(2, b"3"), (3, b"4")]
    late.close()


def test_prefixes_share_a_file_and_do_not_meet(tmp_path: Path) -> None:
    one = SqliteBus(tmp_path / "bus.sqlite", clock=ManualClock(1.0), prefix="one", mountinfo="")
    two = SqliteBus(tmp_path / "bus.sqlite", clock=ManualClock(1.0), prefix="two", mountinfo="")
    one.create_topics(1)
    two.create_topics(3)
    publish(one, b"1")
    other = two.consumer("g", ("metrics",))
    assert other.poll(1, 0.0) == []
    assert len(other.assignment()) == 3
    other.close()


def test_unequal_job_topics_are_reported(tmp_path: Path) -> None:
    bus = open_bus(tmp_path)
    connection = sqlite3.connect(tmp_path / "bus.sqlite")
    connection.execute("INSERT INTO logs(topic, partition) VALUES ('transom.logs', 1)")
    connection.commit()
    connection.close()
    with pytest.raises(BusMisconfigured, match="logs has 2"):
        bus.create_topics(1)
