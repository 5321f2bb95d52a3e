"""A recorded run for who wants its messages: in the order of the bus, decoded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

import msgspec

from ingest.bus import Record
from ingest.codec import MESSAGE_BYTES_MAX
from ingest.events import MESSAGE_TYPES, Message, Topic
from pipelines.recording import MESSAGES_FILE, REORDERED_MAX, in_bus_order, record_of, recorded_lines


class RecordedMessage(msgspec.Struct, frozen=True, gc=False):
    """One message of a job, and where it lay on the bus."""

    topic: Topic
    partition: int
    offset: int
    appended_at: float
    value: Message


class _Line(msgspec.Struct, gc=False, rename={"raw": ""}):
    """A line that waits for its turn. Only its place is read; `raw` is set by who reads it."""

    topic: str
    partition: int
    appended_at: float
    raw: bytes = b""


def _line_types() -> list[type[msgspec.Struct]]:
    """A line for each type of message, told apart by the `type` that stands in it."""
    return [
        msgspec.defstruct(
            "RecordedLine",
            [("value", type_)],
            bases=(RecordedMessage,),
            tag_field="type",
            tag=name,
            frozen=True,
            gc=False,
        )
        for name, (_, type_) in MESSAGE_TYPES.items()
    ]


_line_decoder = msgspec.json.Decoder(_Line)
_lines: Any = Union[tuple(_line_types())]  # noqa: UP007 - made of a list
_decoder: msgspec.json.Decoder[RecordedMessage] = msgspec.json.Decoder(_lines)


def read_messages(folder: Path, held_max: int = REORDERED_MAX) -> Iterator[RecordedMessage | Record]:
    """As `in_bus_order(read_recording(folder))`, but messages of the job are decoded; whatever cannot be is a record,
    as is all else. What is held back to be put in order are bytes: messages are larger, and colder when they are used.

    A folder that is no recording is refused at the call, not at the first record. Raises NotARecording.
    """
    lines, path = recorded_lines(folder), Path(folder) / MESSAGES_FILE
    return (_told_by(line.raw, path) for line in in_bus_order((_line_of(raw, path) for raw in lines), held_max))


def _line_of(raw: bytes, path: Path) -> _Line:
    try:
        line = _line_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        record = record_of(raw, path)  # says what is wrong with it
        return _Line(record.topic, record.partition, record.appended_at, raw)
    line.raw = raw
    return line


def _told_by(raw: bytes, path: Path) -> RecordedMessage | Record:
    if len(raw) <= MESSAGE_BYTES_MAX:  # a message that is larger is refused by whoever decodes it
        try:
            return _decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # another type, or no message: its reader will say so
    return record_of(raw, path)
