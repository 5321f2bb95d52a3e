"""A producer that posts to `record` over HTTP, for processes that have no bus: CloudEvents in batches, with a token.

Used by ranks too: the standard library alone.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from .bus import BUFFERED_MAX, BusFull, BusMisconfigured, BusUnavailable, refuse_oversized
from .codec import Encoded
from .events import Topic

PATH = "/v1/messages"
BATCH_TYPE = "application/cloudevents-batch+json"
BATCH_BYTES_MAX = 4 * 1024 * 1024
BATCH_EVENTS_MAX = 2_000
ANSWER_BYTES_MAX = 64 * 1024
REFUSED_FOR_GOOD = (400, 401, 403, 404, 405, 413, 415, 422)


class RecordProducer:
    """`Producer` over `record`'s address. Not for two threads at once.

    Raises BusMisconfigured for an address that is none, for a token that is refused and the like.
    """

    def __init__(self, url: str, token: str = "", *, buffered_max: int = BUFFERED_MAX) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise BusMisconfigured(f"{url!r} is no address of `transom record`; give http://host:port")
        self._url = url
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._secure else 80)
        self._headers = {"content-type": BATCH_TYPE}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._buffered_max = buffered_max
        self._waiting: list[bytes] = []
        self._connection: http.client.HTTPConnection | None = None

    def send(self, topic: Topic, key: str, headers: Sequence[tuple[str, bytes]], value: bytes) -> None:
        """Buffer one message. Raises BusFull."""
        refuse_oversized(topic, headers, value)
        if len(self._waiting) >= self._buffered_max:
            raise BusFull(f"{len(self._waiting)} messages wait for {self._url}; look whether `transom record` runs")
        self._waiting.append(event_of(Encoded(topic, key, tuple(headers), value)))

    def flush(self, timeout_seconds: float) -> None:
        """Post what waits. Raises BusUnavailable; what is not there yet waits on."""
        while self._waiting:
            count = size = 0
            for event in self._waiting[:BATCH_EVENTS_MAX]:
                if count and size + len(event) > BATCH_BYTES_MAX:
                    break
                count, size = count + 1, size + len(event) + 1
            self._post(b"[" + b",".join(self._waiting[:count]) + b"]", timeout_seconds)
            del self._waiting[:count]

    def close(self) -> None:
        """Let go of the connection. May be called twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def abandon(self) -> None:
        """This is a forked child: the connection is the parent's, and is left to it."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.sock is not None:
            socket.close(connection.sock.detach())

    def _post(self, body: bytes, timeout_seconds: float) -> None:
        try:
            connection = self._connected(timeout_seconds)
            connection.request("POST", PATH, body=body, headers=self._headers)
            answer = connection.getresponse()
            said = answer.read(ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            reason = str(error) or type(error).__name__
            raise BusUnavailable(f"{self._url} does not answer ({reason}); is `transom record` there?") from error
        if answer.status == 200:
            return
        self.close()
        sentence = f"{self._url} answers {answer.status}: {_reason(said)}"
        if answer.status in REFUSED_FOR_GOOD:
            raise BusMisconfigured(sentence)
        raise BusUnavailable(sentence)

    def _connected(self, timeout_seconds: float) -> http.client.HTTPConnection:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            self._connection = kind(self._host, self._port, timeout=timeout_seconds)
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_seconds)
        return self._connection


def event_of(encoded: Encoded) -> bytes:
    """One message in the JSON form of CloudEvents 1.0."""
    told = {name: raw.decode("utf-8", "replace") for name, raw in encoded.headers}
    return msgspec.json.encode(
        {
            "specversion": "1.0",
            "id": told.get("ce_id", ""),
            "source": told.get("ce_source", ""),
            "type": told.get("ce_type", ""),
            "time": told.get("ce_time", ""),
            "subject": encoded.key,
            "datacontenttype": "application/json",
            "data": msgspec.Raw(encoded.value),
        }
    )


def _reason(said: bytes) -> str:
    try:
        decoded = msgspec.json.decode(said, type=dict[str, str])
        return decoded.get("error", "")[:300]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "it gives no reason"
