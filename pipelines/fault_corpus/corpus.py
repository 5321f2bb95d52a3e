"""A corpus on disk: PART/RUN folders, each a recorded run with a corpus.json that says what was done to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ingest.events import FaultInjected
from pipelines.errors import StatedError
from pipelines.fault_corpus.kinds import PARTS, Part
from pipelines.recording import MESSAGES_FILE

CORPUS_FILE = "corpus.json"
FORMAT = "transom-fault-run"
VERSION = 1


class NoCorpus(StatedError):
    """This folder holds no corpus of faults; the text says how one is made."""


class CorpusRun(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to one run, and when.

    `fault` is the label as it stands on the bus: kind, parameters (with `step`), rank, node, at; None in a clean run.
    `ended_at`: when the fault was over; None where it lasts until the run's end. `stopped_at`: when the job was told
    to stop, which is no fault; None where it ended by itself. Times are UTC seconds.
    """

    format: str = FORMAT
    version: int = VERSION
    part: Part
    kind: str
    level: str
    severity: float
    size: str
    seed: int
    step_seconds: float  # the median before the fault
    fault: FaultInjected | None = None
    ended_at: float | None = None
    stopped_at: float | None = None


def write_corpus_run(folder: Path, run: CorpusRun) -> None:
    (folder / CORPUS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=2) + b"\n")


def read_corpus_run(folder: Path) -> CorpusRun:
    """Raises NoCorpus."""
    path = folder / CORPUS_FILE
    try:
        run = msgspec.json.decode(path.read_bytes(), type=CorpusRun)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NoCorpus(f"{path} cannot be read ({error}); `transom record-faults FOLDER` writes such files") from error
    if (run.format, run.version) != (FORMAT, VERSION):
        raise NoCorpus(f"{path} is {run.format!r} version {run.version}, this Transom reads {FORMAT!r} {VERSION}")
    return run


def is_recorded(folder: Path) -> bool:
    """The run is whole: its corpus.json is written last."""
    return (folder / CORPUS_FILE).is_file() and (folder / MESSAGES_FILE).is_file()


def corpus_runs(folder: Path) -> Iterator[tuple[Path, CorpusRun]]:
    """Every whole run, tuning first, by name. Raises NoCorpus where there is none."""
    found = [path for part in PARTS for path in sorted((folder / part).glob("*/")) if is_recorded(path)]
    if not found:
        raise NoCorpus(f"{folder} holds no corpus of faults; `transom record-faults {folder}` makes one")
    return ((path, read_corpus_run(path)) for path in found)
