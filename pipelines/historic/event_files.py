"""TensorBoard's event files: the scalars of each, one row for each step.

A file is a sequence of records: length (8 bytes), its checksum (4), the event, its checksum (4). A folder that
holds event files is one rank's; a file that ends in the middle of a record was still being written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .prefixes import split_by_rank
from .protobuf_shapes import DecodeError, Event
from .run import NotARun
from .tables import FILE, Cell, Row

RECORD_BYTES_MAX = 2**30
_HEAD = struct.Struct("<QI")
_FOOT_BYTES = 4
_NUMBERS = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 14: None, 19: "<f2"}  # TensorFlow's DataType; 14 is bfloat16


def is_event_file(head: bytes) -> bool:
    """Whether a file begins as an event file does: with the event that says its version."""
    return len(head) > 24 and b"brain.Event:" in head[:64]


def event_rows(files: Sequence[Path]) -> Iterator[Row]:
    """A row for each step of each file: `wall_time`, `step` and every scalar's tag. Raises NotARun."""
    for file in files:
        yield from _rows_of(file)


def _rows_of(file: Path) -> Iterator[Row]:
    cells: dict[str, Cell] = {}
    current: int | None = None
    for event in _events(file):
        scalars = [(value.tag, number) for value in event.summary.value if (number := _number(value)) is not None]
        if not scalars:
            continue
        if current is not None and (event.step != current or any(tag in cells for tag, _ in scalars)):
            yield from split_by_rank(cells)
            cells = {}
        current = event.step
        cells.update({FILE: str(file), "step": float(event.step), "wall_time": event.wall_time})
        cells.update(scalars)
    if cells:
        yield from split_by_rank(cells)


def _events(file: Path) -> Iterator[Event]:
    with file.open("rb") as stream:
        while len(head := stream.read(_HEAD.size)) == _HEAD.size:
            size, _ = _HEAD.unpack(head)
            if size > RECORD_BYTES_MAX:
                raise NotARun(f"{file} is damaged at byte {stream.tell() - _HEAD.size}: a record of {size} bytes")
            body = stream.read(size)
            if len(body) < size or len(stream.read(_FOOT_BYTES)) < _FOOT_BYTES:
                return  # its writer was stopped, or writes on
            try:
                yield Event.FromString(body)
            except DecodeError as error:
                raise NotARun(f"{file} is damaged before byte {stream.tell()}: {error}") from error


def _number(value: Event) -> float | None:
    """A scalar's value, as TensorFlow 1 (and torch) or TensorFlow 2 wrote it; None for what is none."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    tensor = value.tensor
    for field in (tensor.float_val, tensor.double_val, tensor.int_val, tensor.int64_val):
        if len(field) == 1:
            return float(field[0])
    kind = _NUMBERS.get(tensor.dtype)
    if kind is None or len(tensor.tensor_content) != np.dtype(kind).itemsize:
        return None
    return float(np.frombuffer(tensor.tensor_content, dtype=kind)[0])
