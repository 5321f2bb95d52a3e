"""Checkpoints that training has proved good: `verified.json`, shared by all engines of a job.

A step is verified when what was trained from it, or after it, showed no fault: whoever judges that (recovery,
a person) says so, and then the newest verified step is the one that retention never removes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointDamaged
from .storage import Storage

VERIFIED = "verified.json"
VERIFICATIONS_MAX = 1_000  # the newest are kept
REASON_CHARACTERS_MAX = 500


@dataclass(frozen=True, slots=True)
class Verification:
    """One step, as saved by one attempt."""

    step: int
    attempt: int
    reason: str = ""


def read_verifications(directory: Path) -> tuple[Verification, ...]:
    """All verifications of a job, ascending by step. Raises CheckpointDamaged where the file is not readable."""
    path = directory / VERIFIED
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return decode_verifications(raw, str(path))


def decode_verifications(raw: bytes, where: str) -> tuple[Verification, ...]:
    """The verifications in `raw`, which was read from `where`. Raises CheckpointDamaged and nothing else."""
    try:
        found = [_verification(row) for row in json.loads(raw)["verified"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is not readable ({error!r:.100}); repair or remove it") from error
    return tuple(sorted(found, key=lambda entry: (entry.step, entry.attempt)))


def encode_verifications(verifications: Sequence[Verification]) -> bytes:
    """The newest of them."""
    entries = sorted(verifications, key=lambda entry: (entry.attempt, entry.step))
    rows = [
        {"step": entry.step, "attempt": entry.attempt, "reason": entry.reason[:REASON_CHARACTERS_MAX]}
        for entry in entries[-VERIFICATIONS_MAX:]
    ]
    return json.dumps({"verified": rows}, indent=1).encode()


def add_verification(directory: Path, verification: Verification, storage: Storage, writer: str) -> bool:
    """Record `verification`; False where that step of that attempt stands there already. Safe between processes."""
    with storage.locked(directory):
        standing = read_verifications(directory)
        if any((entry.step, entry.attempt) == (verification.step, verification.attempt) for entry in standing):
            return False
        content = encode_verifications((*standing, verification))
        storage.write_whole(directory / VERIFIED, content, writer=writer)
        storage.sync_folder(directory)
        return True


def _verification(row: dict[str, object]) -> Verification:
    step, attempt, reason = row["step"], row["attempt"], row["reason"]
    if type(step) is not int or type(attempt) is not int or type(reason) is not str or min(step, attempt) < 0:
        raise ValueError("an entry is not (step, attempt, reason)")
    return Verification(step, attempt, reason)
