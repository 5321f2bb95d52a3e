"""JSON lines: one object a line with what a step measured; and the state file of Hugging Face's Trainer."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from .prefixes import split_by_rank
from .run import NotARun
from .tables import FILE, Cell, Row

LINE_BYTES_MAX = 16 * 2**20
DEPTH_MAX = 4  # of objects in objects, joined by slashes
CELL_CHARACTERS_MAX = 200
STATE_BYTES_MAX = 512 * 2**20
HISTORY = "log_history"
_decoder = msgspec.json.Decoder()


def is_json_lines(head: bytes) -> bool:
    """Whether a file begins with lines of JSON objects."""
    lines = [line for line in head.split(b"\n")[:5] if line.strip()]
    if not lines or not lines[0].lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(loose_json(lines[0]), dict)
    except msgspec.DecodeError:
        return False


def is_trainer_state(head: bytes, file: Path) -> bool:
    """Whether a file is what Trainer saves as trainer_state.json."""
    return head.lstrip().startswith(b"{") and file.name == "trainer_state.json"


def json_rows(files: Sequence[Path]) -> Iterator[Row]:
    """A row for each line. A last line that ends in its middle is left out. Raises NotARun."""
    for file in files:
        with _opened(file) as stream:
            number = 0
            while line := stream.readline(LINE_BYTES_MAX):
                number += 1
                if not line.strip():
                    continue
                try:
                    told = loose_json(line)
                except msgspec.DecodeError as error:
                    if not line.endswith(b"\n"):
                        break  # its writer was stopped
                    raise NotARun(f"line {number} of {file} is no JSON ({error}); take it out") from error
                if not isinstance(told, Mapping):
                    raise NotARun(f"line {number} of {file} is no object of JSON; give one object a line")
                yield from split_by_rank(_cells(file, told))


def state_rows(files: Sequence[Path]) -> Iterator[Row]:
    """A row for each entry of the log history of `trainer_state.json`. Raises NotARun."""
    for file in files:
        if file.stat().st_size > STATE_BYTES_MAX:
            raise NotARun(f"{file} has more than {STATE_BYTES_MAX} bytes; it is not read at once")
        state = loose_json(file.read_bytes())
        history = state.get(HISTORY) if isinstance(state, dict) else None
        if not isinstance(history, list):
            raise NotARun(f"{file} has no {HISTORY!r}; give the state that Trainer saves, or JSON lines")
        for entry in history:
            yield _cells(file, entry)


def loose_json(text: bytes) -> Any:
    """JSON, and what Python writes for NaN and infinities. Raises msgspec.DecodeError."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise msgspec.DecodeError(str(error)) from error


def flat(key: str, value: object, depth: int = 0) -> dict[str, Cell]:
    """Numbers and short words under `key`; objects in it are joined by slashes. Lists are left out."""
    if isinstance(value, bool):
        return {key: float(value)}
    if isinstance(value, int | float):
        return {key: float(value)}
    if isinstance(value, str):
        number = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(value)
        return {key: float(number) if number else value[:CELL_CHARACTERS_MAX]}
    cells: dict[str, Cell] = {}
    if isinstance(value, Mapping) and depth < DEPTH_MAX:
        for name, inner in value.items():
            cells |= flat(f"{key}/{name}" if key else str(name), inner, depth + 1)
    return cells


def _cells(file: Path, told: Mapping[str, object]) -> dict[str, Cell]:
    return {**flat("", told), FILE: str(file)}


def _opened(file: Path) -> IO[bytes]:
    with file.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(file)) if packed else file.open("rb")
