"""The file where torch's `@record` leaves the exception that ended a rank: one for each rank of each attempt.

The rank may write there whatever it likes, so what is read is bounded and believed only as far as it has the form.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingest.events import ErrorRecord

ERROR_FILE_BYTES_MAX = 256 * 1024
TEXT_CHARACTERS_MAX = 16_000


def error_file(node_file: Path, attempt: int, rank: int) -> Path:
    """jobs/<job>/errors/attempt-<n>/rank-<r>.json, beside the folder of the node's file."""
    return node_file.parent.parent / "errors" / f"attempt-{attempt}" / f"rank-{rank}.json"


def make_folder(path: Path) -> None:
    """The folder of an error file, and nothing of an earlier try in it. A disk that is full costs the text alone."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)


def read_error(path: Path) -> ErrorRecord | None:
    """What a rank has left there; None where that is nothing, or nothing of the kind."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        raw = os.pread(descriptor, ERROR_FILE_BYTES_MAX, 0)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    with suppress(ValueError, RecursionError):
        return _record_of(json.loads(raw))
    return None


def _record_of(said: Any) -> ErrorRecord | None:
    """torch writes {"message": {"message": "Type: text", "extraInfo": {"py_callstack": …, "timestamp": …}}}."""
    message: Any = said.get("message") if isinstance(said, dict) else None
    extra: Any = None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        message = message.get("message")
    if not isinstance(message, str) or not message:
        return None
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    kind, colon, text = message.partition(": ")
    if not colon or not kind.replace(".", "").replace("_", "").isalnum():
        kind, text = "Error", message
    traceback = stack if isinstance(stack, str) else ""
    return ErrorRecord(type=kind, text=text[:TEXT_CHARACTERS_MAX], traceback=traceback[-TEXT_CHARACTERS_MAX:])
