"""Recovery's file: what it keeps, what it refuses, and who may hold it."""

import sqlite3
import stat
from pathlib import Path

import pytest

from recovery.action import Incident
from recovery.lease import ControllerRuns, is_held
from recovery.store import Fenced, RecoveryStore, StoreError
from recovery.store_schema import SCHEMA_STEPS, AttemptRow, Place
from tests.recovery_world import JOB, verdict


def message(sequence: int) -> Incident:
    return Incident(incident_id="i", job="j", attempt=1, at=1.0, state="deciding", cause="c", sequence=sequence)


def fail_after_a_write(store: RecoveryStore) -> None:
    with store.transaction():
        store.append(message(1))
        raise KeyError


def test_a_redelivery_is_counted_and_nothing_else(tmp_path: Path) -> None:
    store = RecoveryStore(tmp_path / "recovery.sqlite")
    with store.transaction():
        assert store.insert_verdict(verdict("hang"), 1.0)
        assert not store.insert_verdict(verdict("hang"), 2.0)
        assert store.insert_verdict(verdict("hang", revision=2), 3.0)
    assert store.outcomes() == [("v", 1, "", 1), ("v", 2, "", 0)]


def test_an_unpublished_message_is_published_by_the_next_life(tmp_path: Path) -> None:
    store = RecoveryStore(tmp_path / "recovery.sqlite")
    with store.transaction():
        store.append(message(1))
        store.append(message(2))
    store.mark_published([store.waiting(1)[0].seq])
    store.close()
    again = RecoveryStore(tmp_path / "recovery.sqlite")
    assert [one.message for one in again.waiting(10)] == [message(2)]


def test_a_transaction_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = RecoveryStore(tmp_path / "recovery.sqlite")
    with pytest.raises(KeyError):
        fail_after_a_write(store)
    assert store.waiting(10) == []


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "recovery.sqlite"
    store = RecoveryStore(path)
    with store.transaction():
        store.append(message(1))
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_commit_is_synced(tmp_path: Path) -> None:
    store = RecoveryStore(tmp_path / "recovery.sqlite")
    assert store._one("PRAGMA synchronous")[0] == 2
    assert store._one("PRAGMA journal_mode")[0] == "wal"


def test_a_second_controller_is_told_who_runs(tmp_path: Path) -> None:
    path = tmp_path / "recovery.sqlite"
    store = RecoveryStore(path)
    with pytest.raises(ControllerRuns, match=r"recovery already runs here \(process \d+ holds"):
        RecoveryStore(path)
    assert is_held(path.with_name(path.name + ".lock"))
    store.close()
    RecoveryStore(path).close()
    assert not is_held(path.with_name(path.name + ".lock"))


def test_a_controller_that_lost_its_lease_unnoticed_writes_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "recovery.sqlite"
    old = RecoveryStore(path)
    path.with_name(path.name + ".lock").unlink()
    new = RecoveryStore(path)
    with pytest.raises(Fenced, match="a newer recovery"), old.transaction():
        old.append(message(1))
    assert new.waiting(10) == []


def test_a_file_of_the_first_version_is_brought_to_this_one_and_keeps_what_it_knew(tmp_path: Path) -> None:
    path = tmp_path / "recovery.sqlite"
    with sqlite3.connect(path) as old:
        old.executescript(SCHEMA_STEPS[0])
        old.execute("INSERT INTO meta VALUES ('epoch', 7)")
        old.execute("INSERT INTO attempts VALUES ('j', 2, 't', 5.0, 6.0, 40, '[[0,\"n0\"]]')")
        old.execute("INSERT INTO jobs VALUES ('j', '', '', 41, '{\"hang\":1}', 0)")
        old.execute("INSERT INTO exclusions VALUES ('j', 'n1', 1000.0, 'v')")
        old.execute(
            "INSERT INTO intents VALUES ('a', 'v', 'j', 1, 'starting', 5.0, 't', 2, 40, 'memory', '[\"n1\"]', '')"
        )
        old.execute("PRAGMA user_version=1")
    old.close()
    for epoch in (8, 9):
        store = RecoveryStore(path)
        assert store.epoch == epoch
        (attempt,) = store.attempts("j")
        assert (attempt.attempt, attempt.resume_step, attempt.budget, attempt.places[0].node) == (2, 40, "infra", "n0")
        assert (store.job("j").furthest_step, store.job("j").no_progress, store.job("j").held) == (41, {"hang": 1}, "")
        assert store.excluded("j", 2000.0) == ("n1",)
        assert store.excluded("j", 90_000.0) == ()
        assert store.released("j", 90_000.0) == ("n1",), "the backend was told of it, and is told of its end"
        assert store.quarantines("j", "n1") == 1
        assert store.intents()[0].excluded == ("n1",)
        store.close()


def test_a_migration_that_is_cut_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recovery.sqlite"
    with sqlite3.connect(path) as old:
        old.executescript(SCHEMA_STEPS[0])
        old.execute("INSERT INTO meta VALUES ('epoch', 0)")
        old.execute("PRAGMA user_version=1")
    old.close()
    with monkeypatch.context() as patched:
        half = SCHEMA_STEPS[1][: len(SCHEMA_STEPS[1]) // 2].rpartition(";\n")[0]
        patched.setattr("recovery.store_file.SCHEMA_STEPS", (SCHEMA_STEPS[0], half + ";\nNOT SQL"))
        with pytest.raises(StoreError, match="cannot be relied on"):
            RecoveryStore(path)
    store = RecoveryStore(path)
    assert store.excluded("j", 0.0) == ()


def test_an_unknown_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recovery.sqlite"
    RecoveryStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(StoreError, match="schema version 99, this recovery reads 4 and older"):
        RecoveryStore(path)
    assert not is_held(path.with_name(path.name + ".lock"))


@pytest.mark.parametrize("damage", [b"this is not a database, and has never been one" * 100, None])
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "recovery.sqlite"
    store = RecoveryStore(path)
    with store.transaction():
        for sequence in range(300):
            store.append(message(sequence))
    store.close()
    if damage is None:  # a torn page in the middle
        content = bytearray(path.read_bytes())
        content[len(content) // 2 : len(content) // 2 + 4096] = b"\xff" * 4096
        damage = bytes(content)
    path.write_bytes(damage)
    with pytest.raises(StoreError, match=r"cannot be relied on .* so nothing is done; make room or move"):
        RecoveryStore(path)


def test_what_is_decided_together_is_one_commit_and_all_or_nothing(tmp_path: Path) -> None:
    store = RecoveryStore(tmp_path / "r.sqlite")
    with store.together():
        for number in range(3):
            with store.transaction():
                store.insert_verdict(verdict("hang", f"v{number}"), 1.0)
    assert len(store.outcomes()) == 3
    with pytest.raises(KeyError), store.together():
        fail_after_a_write(store)
    assert not store.waiting(1)
    with store.transaction():
        store.insert_verdict(verdict("hang", "x"), 1.0)
    assert len(store.outcomes()) == 4, "afterwards each commits by itself again"
    store.close()


def test_only_the_newest_attempt_keeps_where_it_ran(tmp_path: Path) -> None:
    store = RecoveryStore(tmp_path / "r.sqlite")
    with store.transaction():
        for attempt in (1, 2):
            store.save_attempt(AttemptRow(JOB, attempt, "t", 1.0, None, None))
            store.save_attempt(AttemptRow(JOB, attempt, "t", 1.0, 2.0, None, (Place(0, f"n{attempt}"),)))
        store.save_attempt(AttemptRow(JOB, 3, "t", 3.0, None, None))
    assert [row.places for row in store.attempts(JOB)] == [(), (Place(0, "n2"),), ()]
    store.close()
