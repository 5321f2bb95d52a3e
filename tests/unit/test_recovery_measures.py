"""What incidents took and what faults cost a job: from messages, live, after a restart, and for Prometheus."""

from pathlib import Path

import pytest

from ingest.clock import ManualClock
from pipelines.ledger.exposition import Exposition
from pipelines.ledger.ledger import Ledger
from pipelines.ledger.measures import AttemptSteps, StageTimes, incident_measures, measures_in_words
from pipelines.ledger.shapes import Health, IncidentMeasures
from pipelines.ledger.state import LedgerState
from tests.ledger_messages import JOB, Tape, action, attempt_started, metrics, receipt, transition, verdict

INCIDENT = f"{JOB}/1/2/logs/1"
STATES = (("open", 1010.1), ("deciding", 1010.2), ("stopping", 1010.5), ("selecting", 1012.5), ("starting", 1012.6),
          ("probation", 1013.6), ("resolved", 1080.0))  # fmt: skip


def story() -> list[object]:
    """A rank is lost at step 12 of attempt 1; attempt 2 resumes from step 10 and is at step 12 again at 1017."""
    told: list[object] = [attempt_started(at=1000.0)]
    told += [metrics(step, at=999.0 + step) for step in range(1, 13)]
    told += [verdict(1, at=1010.0), action(1, at=1010.5, resume_step=10), receipt(1, at=1013.6)]
    told += [transition(1, number, state, at=at) for number, (state, at) in enumerate(STATES)]
    told += [attempt_started(2, at=1013.5, resume_step=10)]
    told += [metrics(step, attempt=2, at=1004.0 + step) for step in range(11, 15)]
    return told


EXPECTED = IncidentMeasures(
    detect_seconds=1.0, decide_seconds=pytest.approx(0.4), stop_seconds=2.0, select_seconds=pytest.approx(0.1),
    start_seconds=1.0, first_step_seconds=pytest.approx(1.4), catch_up_seconds=1.0, recover_seconds=6.0, lost_steps=2,
)  # fmt: skip


def state_of(*messages: object) -> LedgerState:
    state = LedgerState()
    for change, message in enumerate(messages, start=1):
        if type(message).__name__ == "Metrics":
            state.hear(message)
        else:
            state.apply([(change, "any", message, None)])
    return state


def measures_of(state: LedgerState) -> IncidentMeasures:
    view = state.incident(INCIDENT)
    assert view is not None
    return view.measures


def test_each_stage_is_the_time_between_two_things_that_were_said() -> None:
    assert measures_of(state_of(*story())) == EXPECTED


def test_topics_may_come_in_any_order() -> None:
    told = story()
    numbers = [one for one in told if type(one).__name__ == "Metrics"]
    others = [one for one in told if type(one).__name__ != "Metrics"]
    assert measures_of(state_of(*numbers, *others)) == EXPECTED
    assert measures_of(state_of(*others, *numbers)) == EXPECTED


def test_what_has_not_happened_yet_is_not_known() -> None:
    begun = [one for one in story() if getattr(one, "attempt", 1) == 1 and getattr(one, "state", "") != "resolved"]
    measures = measures_of(state_of(*begun[:-2]))
    assert (measures.detect_seconds, measures.stop_seconds) == (1.0, 2.0)
    assert (measures.first_step_seconds, measures.catch_up_seconds, measures.recover_seconds) == (None, None, None)


def test_a_job_counts_its_failures_and_the_time_between_them() -> None:
    (job,) = state_of(*story()).jobs(1106.0)
    measures = job.measures
    assert (measures.failures, measures.restarts, measures.lost_steps) == (1, 1, 2)
    assert (measures.mttr_seconds, measures.mttf_seconds) == (6.0, 100.0)


def test_an_incident_of_which_people_are_only_told_is_no_failure() -> None:
    told = action(1, verb="notify", next_attempt=None, resume_step=None)
    (job,) = state_of(attempt_started(at=1000.0), verdict(1), told).jobs(1100.0)
    assert (job.measures.failures, job.measures.mttf_seconds) == (0, None)


def test_a_wait_for_people_or_nodes_is_a_stage_of_its_own() -> None:
    times = StageTimes()
    for number, (state, at) in enumerate(
        [("deciding", 0.0), ("held", 1.0), ("deciding", 31.0), ("stopping", 31.0), ("waiting_capacity", 33.0),
         ("selecting", 43.0)]
    ):  # fmt: skip
        times.move(state, at, number)
    assert times.seconds == {"decide": 31.0, "stop": 2.0, "wait": 10.0}


def test_a_transition_that_is_told_twice_counts_once() -> None:
    times = StageTimes()
    for state, at, sequence in [
        ("stopping", 0.0, 1),
        ("selecting", 2.0, 2),
        ("stopping", 0.0, 1),
        ("starting", 3.0, 3),
    ]:
        times.move(state, at, sequence)
    assert times.seconds == {"stop": 2.0, "select": 1.0}


def test_a_restart_from_scratch_loses_every_step() -> None:
    before, after = AttemptSteps(), AttemptSteps()
    before.ended(40, 10.0)
    after.ended(1, 20.0)
    measures = incident_measures(
        StageTimes(), onset_at=10.0, told_at=11.0, before=before, after=after, resume_step=None, restarted=True
    )
    assert (measures.lost_steps, measures.recover_seconds, measures.catch_up_seconds) == (40, 10.0, None)


def test_a_restart_of_the_ledger_knows_the_same(tmp_path: Path) -> None:
    clock = ManualClock(1090.0)
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(*story()))
        ledger.commit(force=True)
        assert measures_of(ledger.state) == EXPECTED
        before = ledger.state.jobs(1106.0)[0].measures
    with Ledger(tmp_path, clock) as again:
        assert measures_of(again.state) == EXPECTED
        assert again.state.jobs(1106.0)[0].measures == before


def test_prometheus_gets_them_with_their_units(tmp_path: Path) -> None:
    clock = ManualClock(1106.0)
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(Tape().tell(*story()))
        ledger.commit(force=True)
        health = Health(status="ok", reason="", lag={}, data_at=0.0)
        text = Exposition(ledger, lambda: health, dict, lambda: 0, clock.now).text().decode()
    for line in (
        f'transom_job_failures_total{{job="{JOB}"}} 1.0',
        f'transom_job_lost_steps_total{{job="{JOB}"}} 2.0',
        f'transom_job_mttr_seconds{{job="{JOB}"}} 6.0',
        f'transom_job_mttf_seconds{{job="{JOB}"}} 100.0',
        'transom_incident_stage_seconds_bucket{le="1.0",stage="detect"} 1.0',
        'transom_incident_stage_seconds_bucket{le="0.5",stage="detect"} 0.0',
        'transom_incident_stage_seconds_sum{stage="stop"} 2.0',
    ):
        assert line in text


def test_a_person_reads_them_in_one_line() -> None:
    assert measures_in_words(measures_of(state_of(*story()))) == (
        "training again after 6.0 s; detect 1.0, decide 0.4, stop 2.0, select 0.1, start 1.0, first step 1.4, "
        "catch up 1.0 s; 2 steps lost"
    )
    assert measures_in_words(IncidentMeasures(detect_seconds=1.0)) == ""
