"""The ledger under any input and any redelivery: nothing breaks it, nothing is there twice, nothing is missing."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.clock import ManualClock
from ingest.codec import cloud_event_headers
from pipelines.ledger.ledger import Ledger
from tests.ledger_messages import (
    CODEC,
    Tape,
    action,
    attempt_started,
    checkpoint,
    command,
    logs,
    metrics,
    receipt,
    transition,
    verdict,
)

KINDS = [
    metrics(1, train_loss=1.0), logs("a"), attempt_started(), checkpoint(1), verdict(), action(), receipt(),
    transition(), command(),
]  # fmt: skip
ODD = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 2**31, 2**53 + 1, 2**63, 1e308, "", "\0", "a\0b", "ü" * 50, None, True]),
    st.text(max_size=10),
    st.lists(st.integers(-2, 2**64), max_size=3),
    st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False) | st.none(), max_size=2),
)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ledger, Tape]]:
    """One ledger that takes everything, with the tape that numbers it."""
    with Ledger(tmp_path_factory.mktemp("ledger"), ManualClock(1000.0)) as ledger:
        yield ledger, Tape()


@given(kind=st.sampled_from(KINDS), changes=st.lists(st.tuples(st.integers(0, 30), ODD), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_message_with_any_fields_is_stored_or_handed_back(shelf, kind, changes) -> None:
    ledger, tape = shelf
    fields = msgspec.to_builtins(kind)
    names = sorted(fields)
    for which, value in changes:
        fields[names[which % len(names)]] = value
    encoded = CODEC.encode(kind)
    record = tape.raw(encoded.topic, json.dumps(fields).encode(), encoded.headers)
    rejected = ledger.append([record])
    ledger.commit(force=True)
    assert ledger.offsets()[record.place] == record.offset + 1
    assert len(rejected) <= 1


@given(value=st.binary(max_size=40), kind=st.sampled_from(["verdict.v1", "metrics.v1", "no.v1", ""]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_handed_back(shelf, value: bytes, kind: str) -> None:
    ledger, tape = shelf
    record = tape.raw("verdicts", value, cloud_event_headers(kind, verdict()))
    (rejected,) = ledger.append([record])
    ledger.commit(force=True)
    assert rejected.record == record
    assert rejected.reason
    assert ledger.offsets()[record.place] == record.offset + 1


@given(
    deliveries=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 40), st.sampled_from(["commit", "flush", "lose", "restart"])),
        max_size=12,
    )
)
@settings(max_examples=15, deadline=None)
def test_any_redelivery_and_restart_gives_the_same_ledger(tmp_path_factory, deliveries) -> None:
    """Whatever was lost with a restart is asked for again from the ledger's own offsets."""
    folder: Path = tmp_path_factory.mktemp("ledger")
    tape = Tape()
    for number in range(8):
        tape.tell(verdict(number), logs(f"line {number}"), metrics(number), checkpoint(number), attempt_started(number))
    clock = ManualClock(1000.0)
    ledger = Ledger(folder, clock)
    reached = 0
    for back, count, what in deliveries:
        start = max(0, reached - back)
        ledger.append(tape.records[start : start + count])
        reached = max(reached, min(len(tape.records), start + count))
        if what != "lose":
            ledger.commit(force=what == "flush")
        if what in ("lose", "restart"):
            ledger.close()
            ledger = Ledger(folder, clock)
            reached = min(
                (index for index, record in enumerate(tape.records)
                 if record.offset >= ledger.offsets().get(record.place, 0)),
                default=len(tape.records),
            )  # fmt: skip
    ledger.append(tape.records[reached:])
    ledger.commit(force=True)
    with ledger.cursor() as cursor:
        for table, topic in (("verdict", "verdicts"), ("log_line", "logs")):
            offsets = cursor.execute(f"SELECT source_offset FROM {table} ORDER BY seq").fetchall()
            assert offsets == [(record.offset,) for record in tape.records if record.topic == topic]
        steps = cursor.execute(f"SELECT step FROM read_parquet('{folder}/metrics/*.parquet') ORDER BY step").fetchall()
        assert steps == [(step,) for step in range(8)]
        events = cursor.execute(
            "SELECT source_offset FROM (FROM job_event SELECT source_offset UNION ALL FROM checkpoint_event"
            " SELECT source_offset) ORDER BY source_offset"
        ).fetchall()
        assert events == [(record.offset,) for record in tape.records if record.topic == "events"]
    ledger.close()
