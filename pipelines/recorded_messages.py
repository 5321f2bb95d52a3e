"""A recorded run for who wants its messages: what the job said comes decoded, in one pass over the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

import msgspec

from ingest.bus import Record
from ingest.codec import MESSAGE_BYTES_MAX
from ingest.events import MESSAGE_TYPES, Message, Topic
from pipelines.recording import MESSAGES_FILE, record_of, recorded_lines


class RecordedMessage(msgspec.Struct, frozen=True, gc=False):
    """One message of a job, and where it lay on the bus."""

    topic: Topic
    partition: int
    offset: int
    appended_at: float
    value: Message


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


_lines: Any = Union[tuple(_line_types())]  # noqa: UP007 - made of a list
_decoder: msgspec.json.Decoder[RecordedMessage] = msgspec.json.Decoder(_lines)


def read_messages(folder: Path) -> Iterator[RecordedMessage | Record]:
    """As `read_recording`, but messages of the job are decoded; whatever cannot be is a record, as is all else."""
    lines, path = recorded_lines(folder), Path(folder) / MESSAGES_FILE

    def told() -> Iterator[RecordedMessage | Record]:
        for raw in lines:
            if len(raw) <= MESSAGE_BYTES_MAX:  # a message that is larger is refused by whoever decodes it
                try:
                    yield _decoder.decode(raw)
                    continue
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    pass  # another type, or no message: its reader will say so
            yield record_of(raw, path)

    return told()
