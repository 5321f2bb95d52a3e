"""The token that a job's launchers and whoever asks them from another machine share: made once, 0600, never said."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pipelines.errors import StatedError
from pipelines.ledger_address import read_token
from pipelines.settings import launcher_token_file_given
from recovery.launcher.job_files import JobFiles
from recovery.launcher.proof import JobKey

TOKEN_BYTES = 32


class KeyRefused(StatedError):
    """A job's token cannot be used; the text says what to do."""


def make_token(jobs_folder: Path, job: str) -> None:
    """A fresh token in the job's folder; one that is there stays."""
    path = JobFiles(jobs_folder, job).token_file
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(secrets.token_hex(TOKEN_BYTES) + "\n")


def key_of(jobs_folder: Path, job: str) -> JobKey | None:
    """The key of a job's launchers; None where it has none. Raises KeyRefused or TokenRefused."""
    path = launcher_token_file_given() or JobFiles(jobs_folder, job).token_file
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeyRefused(f"the token file {path} cannot be read ({error.strerror}); give one that can") from error
    if stat.st_mode & 0o077 or stat.st_uid not in (os.getuid(), 0):
        raise KeyRefused(f"the token file {path} is open to others; run: chmod 600 {path}, as its owner")
    return JobKey(job, read_token(path).encode())


def needed_key(jobs_folder: Path, job: str) -> JobKey:
    """The same for who cannot do without. Raises KeyRefused or TokenRefused."""
    key = key_of(jobs_folder, job)
    if key is None:
        where = JobFiles(jobs_folder, job).token_file
        raise KeyRefused(
            f"a launcher that listens for other machines needs the job's token, and there is none in {where}; "
            "register the job with `transom run`, or name the file in TRANSOM_LAUNCHER_TOKEN_FILE"
        )
    return key
