"""What becomes of a message that cannot be read: the original, as it came, with the reason, on a topic of its own."""

from __future__ import annotations

from typing import NamedTuple

from .bus import HEADER_BYTES_MAX, Record
from .clock import Clock
from .codec import MESSAGE_BYTES_MAX
from .events import Topic

KEPT_BYTES_OF_OVERSIZED = 64 * 1024
REASON_CHARACTERS_MAX = 500
OWN_HEADER_BYTES_MAX = 4 * 1024  # what our own headers need at most
PREFIX = "dlq_"


class DeadLetter(NamedTuple):
    """The arguments of `Producer.send`."""

    topic: Topic
    key: str
    headers: tuple[tuple[str, bytes], ...]
    value: bytes


def dead_letter(record: Record, reason: str, clock: Clock) -> DeadLetter:
    """`record` for the dead letters: bytes and headers unchanged, plus where it lay and why it is here.

    Of a value that no bus would take (over MESSAGE_BYTES_MAX) the first 64 KiB are kept, and `dlq_value_bytes` says
    how long it was; of headers over the limit the first ones are kept, and `dlq_headers_dropped` counts the others.
    """
    kept, dropped = _fitting(record.headers)
    own = [
        ("dlq_topic", record.topic),
        ("dlq_partition", str(record.partition)),
        ("dlq_offset", str(record.offset)),
        ("dlq_reason", reason[:REASON_CHARACTERS_MAX]),
        ("dlq_at", f"{clock.now():.6f}"),
    ]
    value = record.value
    if len(value) > MESSAGE_BYTES_MAX:
        own.append(("dlq_value_bytes", str(len(value))))
        value = value[:KEPT_BYTES_OF_OVERSIZED]
    if dropped:
        own.append(("dlq_headers_dropped", str(dropped)))
    headers = (*kept, *((name, text.encode("utf-8", "replace")) for name, text in own))
    return DeadLetter("dead-letters", record.key, headers, value)


def original(record: Record) -> tuple[tuple[tuple[str, bytes], ...], bytes]:
    """Headers and value as they were before `dead_letter`, for a replay once the reason is mended."""
    return tuple(header for header in record.headers if not header[0].startswith(PREFIX)), record.value


def _fitting(headers: tuple[tuple[str, bytes], ...]) -> tuple[list[tuple[str, bytes]], int]:
    room = HEADER_BYTES_MAX - OWN_HEADER_BYTES_MAX
    kept: list[tuple[str, bytes]] = []
    for index, (name, raw) in enumerate(headers):
        room -= len(name.encode("utf-8", "surrogateescape")) + len(raw)
        if room < 0:
            return kept, len(headers) - index
        kept.append((name, raw))
    return kept, 0
