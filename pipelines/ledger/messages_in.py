"""Messages of jobs by HTTP POST onto the bus of `record`: a few nodes need no Kafka."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from ingest.bus import BusError, BusFull, Producer
from ingest.clock import Clock
from ingest.codec import MESSAGE_BYTES_MAX, TYPE_PREFIX, Codec, Undecodable
from ingest.events import MESSAGE_TYPES
from pipelines.extras import missing_extra

try:
    from fastapi import FastAPI, Request, Response
    from starlette.concurrency import run_in_threadpool
except ImportError as error:
    raise missing_extra("ledger", "the ledger's API (FastAPI)") from error

PATH = "/v1/messages"
BATCH_TYPE = "application/cloudevents-batch+json"
BODY_BYTES_MAX = 8 * 1024 * 1024
IN_FLIGHT_BYTES_MAX = 32 * 1024 * 1024
EVENTS_MAX = 10_000  # of one batch
REMEMBERED_MAX = 100_000  # ids, so that what is sent again after a lost answer is not there twice
FLUSH_SECONDS = 5.0
RETRY_AFTER_SECONDS = 2
REASON_CHARS_MAX = 500


class CloudEvent(msgspec.Struct, frozen=True):
    """One event of a batch, in the JSON form of CloudEvents 1.0."""

    id: str
    type: str
    data: msgspec.Raw
    specversion: str = "1.0"


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: on the bus, among the dead letters, and there already."""

    accepted: int
    dead_letters: int
    repeated: int


class NotABatch(ValueError):
    """The body is no batch at all; one sentence."""


class MessageDesk:
    """Puts batches onto the bus; durable before the answer. Called from any thread."""

    def __init__(self, producer: Producer, clock: Clock) -> None:
        self._producer = producer
        self._clock = clock
        self._codec = Codec(MESSAGE_TYPES)
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, None] = OrderedDict()

    def post(self, body: bytes) -> Accepted:
        """Raises NotABatch; BusError where it may or may not be on the bus: the same batch may be sent again."""
        try:
            elements = msgspec.json.decode(body, type=list[msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotABatch(f"the body is no JSON list of CloudEvents ({error}); send {BATCH_TYPE}") from error
        if len(elements) > EVENTS_MAX:
            raise NotABatch(f"a batch has at most {EVENTS_MAX} events, this one {len(elements)}; send it in parts")
        with self._lock:
            return self._put(elements)

    def _put(self, elements: Sequence[msgspec.Raw]) -> Accepted:
        accepted = dead = repeated = 0
        ids: list[str] = []
        for raw in elements:
            try:
                event = msgspec.json.decode(raw, type=CloudEvent)
                if event.id in self._seen:
                    repeated += 1
                    continue
                kind = event.type.encode("utf-8", "replace")
                encoded = self._codec.encode(self._codec.decode((("ce_type", kind),), bytes(event.data)))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Undecodable, ValueError) as error:
                self._bury(bytes(raw), str(error))
                dead += 1
                continue
            self._send(encoded.topic, encoded.key, encoded.headers, encoded.value)
            ids.append(event.id)
            accepted += 1
        self._producer.flush(FLUSH_SECONDS)
        for identity in ids:
            self._seen[identity] = None
        while len(self._seen) > REMEMBERED_MAX:
            self._seen.popitem(last=False)
        return Accepted(accepted=accepted, dead_letters=dead, repeated=repeated)

    def _send(self, topic: Any, key: str, headers: Sequence[tuple[str, bytes]], value: bytes) -> None:
        try:
            self._producer.send(topic, key, headers, value)
        except BusFull:
            self._producer.flush(FLUSH_SECONDS)
            self._producer.send(topic, key, headers, value)

    def _bury(self, raw: bytes, reason: str) -> None:
        headers = (
            ("ce_specversion", b"1.0"),
            ("ce_type", f"{TYPE_PREFIX}unknown".encode()),
            ("dlq_topic", PATH.encode()),
            ("dlq_reason", reason[:REASON_CHARS_MAX].encode("utf-8", "replace")),
            ("dlq_at", f"{self._clock.now():.6f}".encode()),
        )
        self._send("dead-letters", "", headers, raw[:MESSAGE_BYTES_MAX])


def add_messages(app: FastAPI, desk: MessageDesk) -> None:
    """The route that takes them; what is too much at once is refused with 429, and may be sent later."""
    in_flight = _InFlight()

    @app.post(PATH)
    async def messages(request: Request) -> Response:
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > BODY_BYTES_MAX:
            return _answer(413, f"a batch has at most {BODY_BYTES_MAX} bytes; send it in parts")
        body = b""
        taken = 0
        try:
            async for chunk in request.stream():
                if not in_flight.take(len(chunk)):
                    return _answer(429, "too much is sent at once; send it again later")
                taken += len(chunk)
                body += chunk
                if taken > BODY_BYTES_MAX:
                    return _answer(413, f"a batch has at most {BODY_BYTES_MAX} bytes; send it in parts")
            result = await run_in_threadpool(desk.post, body)
        except NotABatch as error:
            return _answer(422, str(error))
        except BusError as error:
            return _answer(503, f"the bus does not take it now ({error}); send the same batch again")
        finally:
            in_flight.give_back(taken)
        return Response(msgspec.json.encode(result), media_type="application/json")


class _InFlight:
    """Bytes of bodies that are being taken, over all requests. Used by the event loop's thread alone."""

    def __init__(self) -> None:
        self._bytes = 0

    def take(self, count: int) -> bool:
        if self._bytes + count > IN_FLIGHT_BYTES_MAX:
            return False
        self._bytes += count
        return True

    def give_back(self, count: int) -> None:
        self._bytes -= count


def _answer(status: int, sentence: str) -> Response:
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    body = msgspec.json.encode({"error": sentence})
    return Response(body, status_code=status, media_type="application/json", headers=headers)
