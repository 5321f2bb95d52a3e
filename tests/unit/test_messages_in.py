"""`record` takes messages by HTTP: durable before the answer, never twice, what is none among the dead letters."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from ingest.bus import BusMisconfigured, BusUnavailable
from ingest.clock import ManualClock
from ingest.codec import Codec
from ingest.memory_bus import MemoryBus
from ingest.record_post import RecordProducer, event_of
from pipelines.ledger import messages_in
from pipelines.ledger.messages_in import MessageDesk, add_messages
from pipelines.ledger.serving import ApiServer, tcp_socket
from tests.wire_examples import EXAMPLES

METRICS = Codec().encode(EXAMPLES["metrics.v1"])
EXITED = Codec().encode(EXAMPLES["rank_exited.v1"])


class Served:
    def __init__(self) -> None:
        self.clock = ManualClock(1_000.0)
        self.bus = MemoryBus(clock=self.clock)
        self.bus.create_topics(1)
        app = FastAPI()
        add_messages(app, MessageDesk(self.bus.producer(), self.clock))
        listener = tcp_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = ApiServer(app, listener, name="test-messages")
        self.server.start()
        self.consumer = self.bus.consumer("test", ("metrics", "events", "dead-letters"))

    def post(self, body: bytes) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/messages", content=body, trust_env=False)


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.server.stop()


def test_what_a_producer_flushes_is_on_the_bus_and_is_there_once(served: Served) -> None:
    producer = RecordProducer(served.url)
    for _ in range(2):  # the second time as after a lost answer
        producer.send(*METRICS)
        producer.send(*EXITED)
        producer.flush(5.0)
    producer.close()
    records = served.consumer.poll(10, 0.0)
    assert sorted(record.topic for record in records) == ["events", "metrics"]
    decoded = {Codec().decode(record.headers, record.value) for record in records if record.topic == "events"}
    assert decoded == {EXAMPLES["rank_exited.v1"]}


def test_what_is_no_message_is_a_dead_letter_and_the_others_are_taken(served: Served) -> None:
    verdict = b'{"id":"v","type":"org.transom.verdict.v1","data":{}}'  # not for everybody to say
    answer = served.post(
        b"[" + event_of(METRICS) + b',{"id":"x","type":"org.transom.metrics.v1","data":{}},' + verdict + b"]"
    )
    assert answer.json() == {"accepted": 1, "dead_letters": 2, "repeated": 0}
    letters = [record for record in served.consumer.poll(10, 0.0) if record.topic == "dead-letters"]
    assert len(letters) == 2
    assert all(dict(record.headers)["dlq_reason"] for record in letters)


@pytest.mark.parametrize("body", [b"{}", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_batch_is_refused(served: Served, body: bytes) -> None:
    assert served.post(body).status_code == 422


def test_too_much_is_refused_with_what_to_do(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_in, "BODY_BYTES_MAX", 1_000)
    assert served.post(b"[" + b" " * 2_000 + b"]").status_code == 413
    monkeypatch.setattr(messages_in, "IN_FLIGHT_BYTES_MAX", 10)
    answer = served.post(b"[" + b" " * 500 + b"]")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    producer = RecordProducer(served.url)
    producer.send(*METRICS)
    with pytest.raises(BusUnavailable, match="429"):
        producer.flush(5.0)
    monkeypatch.undo()
    producer.flush(5.0)  # what was refused has waited
    assert [record.topic for record in served.consumer.poll(10, 0.0)] == ["metrics"]
    producer.close()


def test_an_address_that_is_none_or_silent_is_a_sentence() -> None:
    with pytest.raises(BusMisconfigured, match="http://host:port"):
        RecordProducer("ftp://x")
    producer = RecordProducer("http://127.0.0.1:9")
    producer.send(*METRICS)
    with pytest.raises(BusUnavailable, match="does not answer"):
        producer.flush(1.0)
    assert msgspec.json.decode(event_of(METRICS))["subject"] == "demo"
