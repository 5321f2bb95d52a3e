"""Checkpoints that must not be used although they are whole: `rejected.json`, shared by all engines of a job.

A rejection names steps and attempts: after a NaN in step 120 of attempt 4, what attempts up to 4 saved of
step 120 and later is bad; attempt 5 trains those steps again, and its checkpoints of the same numbers are
good.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointDamaged
from .storage import Storage

REJECTED = "rejected.json"
REJECTIONS_MAX = 10_000
REASON_CHARACTERS_MAX = 500
ALL_ATTEMPTS = 2**62


@dataclass(frozen=True, slots=True)
class Rejection:
    """Steps from `from_step` on, as saved by attempts up to `up_to_attempt`."""

    from_step: int
    up_to_attempt: int
    reason: str

    def covers(self, step: int, attempt: int) -> bool:
        return step >= self.from_step and attempt <= self.up_to_attempt


def is_rejected(rejections: Sequence[Rejection], step: int, attempt: int) -> bool:
    return any(rejection.covers(step, attempt) for rejection in rejections)


def read_rejections(directory: Path) -> tuple[Rejection, ...]:
    """All rejections of a job. Raises CheckpointDamaged where the file is there but not readable: better no
    checkpoint than a bad one."""
    path = directory / REJECTED
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return decode_rejections(raw, str(path))


def decode_rejections(raw: bytes, where: str) -> tuple[Rejection, ...]:
    """The rejections in `raw`, which was read from `where`. Raises CheckpointDamaged and nothing else."""
    try:
        return tuple(_rejection(row) for row in json.loads(raw)["rejected"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is not readable ({error!r:.100}); repair or remove it") from error


def encode_rejections(rejections: Sequence[Rejection]) -> bytes:
    rows = [
        {"from_step": entry.from_step, "up_to_attempt": entry.up_to_attempt, "reason": entry.reason}
        for entry in rejections
    ]
    return json.dumps({"rejected": rows}, indent=1).encode()


def read_or_reject_all(directory: Path) -> tuple[Rejection, ...]:
    """All rejections; one that covers everything where they cannot be read."""
    try:
        return read_rejections(directory)
    except (CheckpointDamaged, OSError) as error:
        return (Rejection(0, ALL_ATTEMPTS, str(error)),)


def add_rejection(directory: Path, rejection: Rejection, storage: Storage, writer: str) -> bool:
    """Record `rejection`; False where an equal or wider one stands there already. Safe between processes."""
    with storage.locked(directory):
        rejections = read_rejections(directory)
        if any(other.covers(rejection.from_step, rejection.up_to_attempt) for other in rejections):
            return False
        if len(rejections) >= REJECTIONS_MAX:
            raise CheckpointDamaged(f"{directory / REJECTED} has {REJECTIONS_MAX} entries; remove old ones")
        kept = [other for other in rejections if not rejection.covers(other.from_step, other.up_to_attempt)]
        content = encode_rejections((*kept, rejection))
        storage.write_whole(directory / REJECTED, content, writer=writer)
        storage.sync_folder(directory)
        return True


def _rejection(row: dict[str, object]) -> Rejection:
    from_step, up_to_attempt, reason = row["from_step"], row["up_to_attempt"], row["reason"]
    if type(from_step) is not int or type(up_to_attempt) is not int or type(reason) is not str:
        raise ValueError("an entry is not (from_step, up_to_attempt, reason)")
    return Rejection(from_step, up_to_attempt, reason)
