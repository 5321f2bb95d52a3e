"""What recovery's store keeps in memory: what the file says, after a rollback too, and never of somebody else's."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from detectors.verdict import Verdict
from recovery.store import Fenced, RecoveryStore
from recovery.store_schema import IncidentRow, JobRow
from tests.recovery_world import verdict


def of_job(job: str, number: int) -> Verdict:
    return msgspec.structs.replace(verdict("hang", f"{job}/{number}"), job=job)


def test_a_flooding_job_does_not_keep_the_others_waiting_in_the_inbox(tmp_path: Path) -> None:
    store = RecoveryStore(tmp_path / "r.sqlite")
    with store.transaction():
        for number in range(50):
            store.insert_verdict(of_job("flood", number), 1.0)
        for job in ("a", "b"):
            store.insert_verdict(of_job(job, 0), 2.0)
    turn = store.new_verdicts(4)
    assert [one.verdict.verdict_id for one in turn] == ["flood/0", "a/0", "b/0", "flood/1"]
    with store.transaction():
        for entry in turn:
            store.file_verdict(entry, "opened", entry.verdict.verdict_id)
    assert [one.verdict.verdict_id for one in store.new_verdicts(2)] == ["flood/2", "flood/3"]
    store.close()


def test_what_is_filed_is_seen_in_its_transaction_and_after_it(tmp_path: Path) -> None:
    store = RecoveryStore(tmp_path / "r.sqlite")
    first, second = verdict("hang"), verdict("hang", revision=2)
    with store.transaction():
        store.insert_verdict(first, 1.0)
        store.insert_verdict(second, 1.0)
        one, two = store.new_verdicts(2)
        store.file_verdict(one, "opened", "i")
        assert store.incident_of_verdict("v") == "i"
        store.file_verdict(two, "revision of i", "i")
        assert store.verdicts_of("i") == [second]
    assert store.verdicts_of("i") == [second]
    assert [outcome for _, _, outcome, _ in store.outcomes()] == ["opened", "revision of i"]
    assert store.new_verdicts(1) == []
    store.close()


def test_incidents_in_memory_are_those_of_the_file_in_the_order_they_were_opened(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    store = RecoveryStore(path)
    with store.transaction():
        rows = {name: store.open_incident(name, job, 1, 5.0) for name, job in (("z", "j"), ("a", "k"), ("m", "j"))}
        store.move(store.move(rows["z"], "settled", "", 6.0), "notify", "", 6.0)
        store.move(store.move(rows["m"], "settled", "", 6.0), "dropped", "", 6.0)
    seen = [
        [row.incident_id for row in store.unfinished()],
        [row.incident_id for row in store.unfinished("j")],
        [row.incident_id for row in store.unfinished(states=("notified",))],
        [row.incident_id for row in store.unfinished("k", ("notified",))],
    ]
    assert seen == [["z", "a"], ["z"], ["z"], []]
    gone = store.incident("m")
    assert gone is not None
    assert (gone.state, gone.sequence) == ("ignored", 2)
    kept = {name: store.incident(name) for name in rows}
    told = store.waiting(10)
    assert [one.seq for one in told] == [1, 2, 3, 4]
    store.close()
    again = RecoveryStore(path)
    assert {name: again.incident(name) for name in rows} == kept
    assert [row.incident_id for row in again.unfinished()] == ["z", "a"]
    assert again.waiting(10) == told
    again.close()


def write_and_fail(store: RecoveryStore, row: IncidentRow) -> None:
    with store.transaction():
        store.save_job(replace(store.job("j"), furthest_step=8))
        assert store.job("j").furthest_step == 8
        store.move(row, "settled", "", 2.0)
        store.open_incident("i2", "j", 1, 2.0)
        store.file_verdict(store.new_verdicts(1)[0], "opened", "i")
        raise KeyError


def test_what_was_rolled_back_is_not_remembered(tmp_path: Path) -> None:
    store = RecoveryStore(tmp_path / "r.sqlite")
    with store.transaction():
        store.save_job(JobRow("j", furthest_step=7))
        row = store.open_incident("i", "j", 1, 1.0)
        store.insert_verdict(verdict("hang"), 1.0)
    with pytest.raises(KeyError):
        write_and_fail(store, row)
    assert store.job("j").furthest_step == 7
    assert [(one.incident_id, one.state) for one in store.unfinished()] == [("i", "open")]
    assert store.incident("i2") is None
    assert store.incident_of_verdict("v") is None
    with store.transaction():
        store.save_job(JobRow("k"))
    assert store.waiting(1) == [], "what the lost transaction wanted to tell is not told by the next"
    assert [row.incident_id for row in store.unfinished()] == ["i"]
    store.close()


def test_a_controller_that_was_overtaken_does_not_even_look_at_what_it_remembers(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    old = RecoveryStore(path)
    path.with_name(path.name + ".lock").unlink()
    new = RecoveryStore(path)
    with pytest.raises(Fenced, match="a newer recovery"), old.together():
        pytest.fail("nothing of this round may be done")
    new.close()
