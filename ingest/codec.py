"""Messages to bytes and back: JSON by msgspec, type and version in CloudEvents 1.0 headers (binary mode)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from .events import AT_MAX, MESSAGE_TYPES, Topic

MESSAGE_BYTES_MAX = 1_000_000  # below Kafka's default message.max.bytes (1,048,588) with room for headers
TYPE_PREFIX = "org.transom."
TYPE_AT = 3  # where `cloud_event_headers` puts the type: looked at first, and for nearly all messages alone

Headers = Sequence[tuple[str, bytes]]


class Undecodable(Exception):
    """These bytes are not a message this reader knows; `reason` is one sentence for the dead letter."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Encoded(NamedTuple):
    """A message ready for a producer."""

    topic: Topic
    key: str
    headers: tuple[tuple[str, bytes], ...]
    value: bytes


class Codec:
    """Encodes and decodes the types it is given; a room above passes its own types along with ours."""

    def __init__(self, types: Mapping[str, tuple[Topic, type[Any]]] = MESSAGE_TYPES) -> None:
        self._decoders = {name: msgspec.json.Decoder(type_) for name, (_, type_) in types.items()}
        self._of_header = {(TYPE_PREFIX + name).encode(): decoder for name, decoder in self._decoders.items()}
        self._names = {type_: (name, topic) for name, (topic, type_) in types.items()}
        self._encoder = msgspec.json.Encoder()

    def encode(self, message: Any) -> Encoded:
        """Bytes and headers of `message`.

        Raises ValueError if it is larger than `MESSAGE_BYTES_MAX`, has text that is no Unicode (lone surrogates)
        or a time that is no date.
        """
        name, topic = self._names[type(message)]
        value = self._encoder.encode(message)
        if len(value) > MESSAGE_BYTES_MAX:
            raise ValueError(f"a {name} message of {len(value)} bytes exceeds the limit of {MESSAGE_BYTES_MAX}")
        return Encoded(topic, message.job, cloud_event_headers(name, message), value)

    def decode(self, headers: Headers, value: bytes) -> Any:
        """The message, unknown fields ignored. Raises Undecodable, and nothing else whatever the bytes are."""
        if len(value) > MESSAGE_BYTES_MAX:
            raise Undecodable(f"the message has {len(value)} bytes, the limit is {MESSAGE_BYTES_MAX}")
        key, raw = headers[TYPE_AT] if len(headers) > TYPE_AT else ("", b"")
        decoder = self._of_header.get(raw) if key == "ce_type" and isinstance(raw, bytes) else None
        if decoder is None:
            name = message_type(headers)
            decoder = self._decoders.get(name)
            if decoder is None:
                raise Undecodable(f"message type {name!r} is not known here; is the producer newer than this reader?")
        try:
            return decoder.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(f"not a {message_type(headers)} message: {error}") from error


def message_type(headers: Headers) -> str:
    """The short type name (`metrics.v1`) in these headers. Raises Undecodable where there is none."""
    for key, raw in (*headers[TYPE_AT : TYPE_AT + 1], *headers):
        if key == "ce_type":
            try:
                return _short_name(raw)
            except (UnicodeDecodeError, AttributeError, TypeError) as error:
                raise Undecodable("the ce_type header is not UTF-8 text") from error
    raise Undecodable("there is no ce_type header; messages carry CloudEvents 1.0 headers")


@lru_cache(maxsize=256)
def _short_name(raw: bytes) -> str:
    return raw.decode("utf-8").removeprefix(TYPE_PREFIX)


def cloud_event_headers(name: str, message: Any) -> tuple[tuple[str, bytes], ...]:
    """CloudEvents 1.0 context attributes; the id is made of the stamp: a redelivery carries the same one."""
    attempt = getattr(message, "attempt", "")  # a command has none
    source = f"/{message.job}/{attempt}/{getattr(message, 'node', '')}/{getattr(message, 'rank', '')}"
    collector = getattr(message, "collector", "")
    if collector:
        source += f"/{collector}"
    identity = getattr(message, "message_id", None) or f"{source}/{name}/{getattr(message, 'sequence', 0)}"
    if not 0.0 <= message.at <= AT_MAX:
        raise ValueError(f"{message.at} is no time of a message; it must be UTC seconds")
    moment = datetime.fromtimestamp(message.at, UTC).isoformat()
    return (
        ("ce_specversion", b"1.0"),
        ("ce_id", identity.encode()),
        ("ce_source", source.encode()),
        ("ce_type", (TYPE_PREFIX + name).encode()),
        ("ce_time", moment.encode()),
        ("content-type", b"application/json"),
    )
