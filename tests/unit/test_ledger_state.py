"""Jobs and incidents as they are now, live and after a restart."""

from pathlib import Path

import msgspec
import pytest

from ingest.clock import ManualClock
from pipelines.ledger.finished import open_finished
from pipelines.ledger.incidents import IncidentBook
from pipelines.ledger.ledger import Ledger
from pipelines.ledger.reader import LocalReader
from pipelines.ledger.shapes import CommandRequest, Health, LedgerUnavailable, NotInLedger
from pipelines.ledger.state import LedgerState
from tests.ledger_messages import (
    JOB,
    Tape,
    action,
    attempt_ended,
    attempt_started,
    checkpoint,
    command,
    heartbeat,
    metrics,
    receipt,
    transition,
    verdict,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


def reader_of(ledger: Ledger, clock: ManualClock) -> LocalReader:
    health = Health(status="ok", reason="", lag={}, data_at=0.0)
    return LocalReader(
        ledger.cursor, ledger.state, ledger.parts, now=clock.now, health=lambda: health, post=lambda _: ""
    )


def told(*messages: object) -> LedgerState:
    """The state after these messages, without a file."""
    state = LedgerState()
    for change, message in enumerate(messages, start=1):
        state.apply([(change, "any", message, None)])
    return state


def only_job(state: LedgerState, now: float = 1001.0):
    (job,) = state.jobs(now)
    return job


def incident(state: LedgerState, number: int = 1):
    view = state.incident(f"{JOB}/1/2/logs/{number}")
    assert view is not None
    return view


def test_a_job_runs_and_tells_how_far_it_is() -> None:
    state = told(attempt_started(at=1000.0), checkpoint(4), checkpoint(3, "sealed", rank=1))
    for step in range(6):
        state.hear(metrics(step, at=1001.0 + step))
    job = only_job(state, now=1010.0)
    assert (job.state, job.attempt, job.world_size, job.started_at) == ("running", 1, 4, 1000.0)
    assert (job.last_step, job.last_seen_at) == (5, 1006.0)
    assert job.checkpoint is not None
    assert (job.checkpoint.step, job.checkpoint.tier) == (4, "memory")


def test_a_rejected_checkpoint_gives_way_to_the_one_before() -> None:
    job = only_job(told(checkpoint(4), checkpoint(8), checkpoint(8, "rejected")))
    assert job.checkpoint is not None
    assert job.checkpoint.step == 4


def test_goodput_counts_each_step_once() -> None:
    """10 steps of 0.5 s in 10 s of wall time, the second half trained twice."""
    state = told(attempt_started(at=1000.0))
    for step in range(11):
        state.hear(metrics(step, at=1000.0 + step / 2))
    state.apply([(2, "job_event", attempt_started(2, at=1007.0, resume_step=5), None)])
    for step in range(6, 9):
        state.hear(metrics(step, attempt=2, at=1007.0 + step / 10))
    job = only_job(state, now=1010.0)
    assert job.goodput == pytest.approx(0.5)
    assert (job.attempt, job.last_step) == (2, 8)


def test_goodput_is_at_most_one_and_unknown_before_a_step() -> None:
    state = told(attempt_started(at=1000.0))
    assert only_job(state).goodput is None
    state.hear(metrics(1_000, at=1001.0))
    assert only_job(state, now=1002.0).goodput == 1.0


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (("finished", "finished"), "finished"),
        (("finished",), "running"),
        (("failed",), "failed"),
        (("failed", "stopped"), "failed"),
        (("stopped", "stopped"), "stopped"),
        (("stopped", "finished"), "stopped"),
    ],
)
def test_an_attempt_ends_when_all_its_nodes_say_so(outcomes: tuple[str, ...], expected: str) -> None:
    ends = [attempt_ended(outcome, f"node-{number}") for number, outcome in enumerate(outcomes)]
    job = only_job(told(attempt_started(), *ends), now=1101.0)
    assert job.state == expected
    assert job.outcome == ("" if expected == "running" else expected)


def test_silence_is_lost_not_failed_and_a_finished_job_is_never_lost() -> None:
    state = told(attempt_started(at=1000.0))
    state.hear(heartbeat(1030.0))
    assert only_job(state, now=1089.0).state == "running"
    assert only_job(state, now=1091.0).state == "lost"
    ended = told(attempt_started(), attempt_ended("finished", "node-0"), attempt_ended("finished", "node-1"))
    assert only_job(ended, now=9e9).state == "finished"


def test_a_late_message_of_an_old_attempt_changes_nothing_of_the_new_one() -> None:
    state = told(attempt_started(2), attempt_ended("failed", "node-0", attempt=1))
    state.hear(metrics(77, attempt=1))
    job = only_job(state)
    assert (job.attempt, job.state, job.last_step) == (2, "running", None)


def test_an_incident_merges_what_is_said_about_it() -> None:
    state = told(
        verdict(at=1010.0),
        action(),
        transition(sequence=0, state="open"),
        receipt(outcome="ambiguous", at=1012.0),
        receipt(outcome="done", at=1013.0),
        transition(sequence=1, state="probation"),
        command(verb="acknowledge", at=1014.0),
        command(verb="feedback", feedback="true_positive"),
        command(verb="mute", until=2000.0),
        verdict(revision=1, at=1020.0, status="closed"),
    )
    view = incident(state)
    assert (view.seq, view.status, view.state) == (10, "closed", "probation")
    assert (view.opened_at, view.updated_at, view.closed_at) == (1010.0, 1020.0, 1020.0)
    assert view.action is not None
    assert (view.action.verb, view.action.resume_step, view.action.resume_tier) == ("restart", 10, "memory")
    assert (view.outcome, view.outcome_text) == ("done", "Attempt 2 runs.")
    assert (view.acknowledged_by, view.acknowledged_at, view.feedback) == ("ada", 1014.0, "true_positive")
    assert view.muted_until == 2000.0


def test_a_new_revision_does_not_wipe_what_people_said() -> None:
    state = told(verdict(), command(verb="feedback", feedback="false_positive"), verdict(revision=1))
    assert incident(state).feedback == "false_positive"


def test_an_older_revision_that_comes_late_does_not_win() -> None:
    state = told(verdict(revision=2, fault_class="hang"), verdict(revision=1, fault_class="unknown"))
    assert incident(state).fault_class == "hang"


def test_topics_may_come_in_any_order() -> None:
    messages = [verdict(), action(), receipt(), transition(), command()]
    forward, backward = incident(told(*messages)), incident(told(*reversed(messages)))
    assert msgspec.structs.replace(forward, seq=0) == msgspec.structs.replace(backward, seq=0)


def test_an_incident_that_recovery_is_done_with_is_open_no_more() -> None:
    """A job that was stopped starts no attempt that would close its verdict."""
    told_to_stop = told(
        attempt_started(), verdict(), transition(state="finishing"), transition(sequence=1, state="stopped")
    )
    assert only_job(told_to_stop).open_incidents == 0
    assert incident(told_to_stop).status == "closed"
    assert only_job(told(attempt_started(), verdict(), transition(state="held"))).open_incidents == 1


def test_an_incident_that_comes_back_under_its_id_is_open_again() -> None:
    notified = (
        attempt_started(), verdict(), action(verb="notify"), transition(state="notified"),
        verdict(revision=1, at=1020.0, status="closed"), transition(sequence=1, state="resolved", at=1020.5),
    )  # fmt: skip
    assert incident(told(*notified)).status == "closed"
    assert incident(told(*notified, verdict(revision=2, at=1050.0))).status == "open"
    restarted = [action() if index == 2 else message for index, message in enumerate(notified)]
    assert incident(told(*restarted, verdict(revision=2, at=1050.0))).status == "closed"


def test_goodput_counts_from_the_first_attempt_in_whatever_order_the_topics_come() -> None:
    later = [metrics(step, attempt=2, at=1100.0 + step, train_step_duration=1.0) for step in range(50, 60)]
    started = [attempt_started(1, at=1000.0), attempt_started(2, at=1090.0, resume_step=49)]
    in_order, metrics_first = told(*started, *later), told(*later, *started)
    assert only_job(in_order, 1160.0).goodput is not None
    assert only_job(metrics_first, 1160.0).goodput == only_job(in_order, 1160.0).goodput


def test_an_incident_without_its_verdict_says_so() -> None:
    view = incident(told(action()))
    assert (view.fault_class, view.status, view.onset_at) == ("rank_lost", "open", None)
    assert "not arrived" in view.summary


def test_incidents_are_filtered_newest_first_and_given_page_by_page() -> None:
    book = IncidentBook()
    for number in range(6):
        book.apply(number + 1, verdict(number, severity="error" if number % 2 else "warning"))
    book.apply(7, verdict(0, revision=1, severity="warning", status="closed"))
    everything = {"job": None, "state": None, "fault_class": None, "severity": None}
    page = book.page(**everything, after=None, limit=3)
    assert [view.seq for view in page.incidents] == [7, 6, 5]
    assert page.next == 7
    assert [view.seq for view in book.page(**everything, after=5, limit=9).incidents] == [7, 6]
    assert book.page(**everything, after=7, limit=9) == book.page(**everything, after=7, limit=1)

    def seqs(**wanted: str) -> list[int]:
        return [view.seq for view in book.page(**everything | wanted, after=None, limit=9).incidents]

    assert seqs(severity="error") == [6, 4, 2]
    assert seqs(state="closed") == [7]
    assert seqs(fault_class="rank_lost", job=JOB) == [7, 6, 5, 4, 3, 2]
    assert seqs(job="other") == []
    seen: list[int] = []
    after = 0
    while (page := book.page(**everything, after=after, limit=2)).incidents:
        seen += [view.seq for view in reversed(page.incidents)]
        after = page.next
    assert seen == [2, 3, 4, 5, 6, 7], "a reader that pages misses nothing"


def test_the_book_is_bounded_and_open_incidents_stay() -> None:
    book = IncidentBook(incidents_max=3)
    book.apply(1, verdict(1))
    for number in range(2, 7):
        book.apply(2 * number, verdict(number))
        book.apply(2 * number + 1, verdict(number, revision=1, status="closed"))
    assert [state.incident_id[-1] for state in book] == ["1", "5", "6"]


def test_a_restart_gives_the_same_jobs_and_incidents(tmp_path: Path, clock: ManualClock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(attempt_started(), *(metrics(step, train_loss=1.0) for step in range(9))))
        for number in range(4):
            ledger.append(tape.tell(verdict(number), transition(number), checkpoint(number)))
            ledger.commit(force=True)
            ledger.append(tape.tell(action(number), receipt(number), command(number)))
            ledger.commit(force=True)
        ledger.append(tape.tell(verdict(1, revision=1, status="closed")))
        ledger.commit(force=True)
        reader = reader_of(ledger, clock)
        before = (reader.jobs(), reader.incidents(), reader.metric_names(JOB))
        assert before[0][0].open_incidents == 3
    clock.advance(20.0)
    with Ledger(tmp_path, clock) as ledger:
        reader = reader_of(ledger, clock)
        assert reader.incidents() == before[1]
        assert reader.metric_names(JOB) == before[2]
        (old,), (new,) = before[0], reader.jobs()
        old_measures, new_measures = (
            msgspec.structs.replace(job.measures, mttf_seconds=None) for job in (old, new)
        )  # goodput and MTTF go on with the time
        assert new_measures == old_measures
        assert msgspec.structs.replace(new, goodput=None, measures=old_measures) == msgspec.structs.replace(
            old, goodput=None, measures=old_measures
        )
        assert new.goodput is not None
    finished = open_finished(tmp_path, clock)
    assert finished.incidents() == before[1]
    assert finished.jobs()[0].state == "running"
    assert finished.incident(before[1].incidents[0].incident_id).incident == before[1].incidents[0]
    with pytest.raises(LedgerUnavailable, match="live ledger"):
        finished.post_command(CommandRequest(verb="acknowledge", incident_id="x", author="ada"))
    finished.close()


def test_an_incident_too_old_for_the_memory_is_still_told(tmp_path: Path, clock: ManualClock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(verdict(1), action(1), receipt(1), transition(1), command(1)))
        ledger.commit()
        story = reader_of(ledger, clock).incident(f"{JOB}/1/2/logs/1")
        assert [len(part) for part in (story.verdicts, story.actions, story.receipts)] == [1, 1, 1]
        assert (story.transitions, story.commands) == ((transition(1),), (command(1),))
        ledger.state._incidents = IncidentBook()
        assert reader_of(ledger, clock).incident(f"{JOB}/1/2/logs/1").incident.outcome == "done"
        with pytest.raises(NotInLedger, match="transom incidents"):
            reader_of(ledger, clock).incident("nobody")


def test_rows_page_forward_and_the_newest_come_without_a_cursor(tmp_path: Path, clock: ManualClock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(*(verdict(number) for number in range(10)), verdict(3, job="other")))
        ledger.commit()
        reader = reader_of(ledger, clock)
        assert [row.seq for row in reader.rows("verdicts", limit=3).rows] == [9, 10, 11]
        page = reader.rows("verdicts", after=4, limit=3)
        assert ([row.seq for row in page.rows], page.next) == ([5, 6, 7], 7)
        assert [row.seq for row in reader.rows("verdicts", job="other").rows] == [11]
        assert reader.rows("verdicts", after=11) == reader.rows("verdicts", after=11, limit=1)
        assert reader.rows("verdicts", after=11).next == 11
        assert page.rows[0].message == verdict(4)
