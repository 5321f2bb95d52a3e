"""Log files as a source: torchrun's --log-dir trees, Slurm outputs, any growing file; positions outlive a restart."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ingest.events import LogLine, Stream
from ingest.sources.log_paths import LogPlace, has_slurm_fields, labelled, slurm_glob, slurm_place, torchrun_place
from pipelines.collect.source import SEEN_MAX, Seen, SeenLine, SourceFailed, Whose
from pipelines.collect.tail import Tail, TailPosition
from recovery.launcher.output import OPEN_SECONDS, Line, RecordJoiner

FILES_MAX = 4_096
LOOK_SECONDS = 2.0  # for new files
KEPT_POSITIONS_MAX = 20_000  # of files that are gone, too: a rotation may bring them back
LINES_OF_FILE_MAX = 1_000  # of one read, so that a flood in one file is not the others' silence


@dataclass(frozen=True, slots=True)
class LogFiles:
    """What to follow: a glob (`**` too), a folder of torchrun's, or a path with Slurm's `%j %t`."""

    path: str
    job: str = ""
    label: bool = False  # lines begin as `srun --label` makes them


class _Kept(msgspec.Struct, kw_only=True):
    """What is written down."""

    files: dict[str, TailPosition] = {}


class _Followed:
    """One file that is followed, its records joined for each rank that speaks in it."""

    def __init__(self, path: str, files: LogFiles, place: LogPlace, position: TailPosition | None) -> None:
        self.tail = Tail(Path(path), position)
        self._path = path
        self._files = files
        self._place = place
        self._joiners: dict[int | None, RecordJoiner] = {}
        self._begun: dict[int | None, int] = {}  # where the open record of each rank begins
        self._inode = 0

    def read(self, now: float) -> list[Seen]:
        seen: list[Seen] = []
        for line in self.tail.read(now, LINES_OF_FILE_MAX):
            if line.inode != self._inode:  # the next file after a rotation: nothing goes on over it
                for rank, joiner in self._joiners.items():
                    seen += self._of(rank, joiner.flush())
                self._begun, self._inode = {}, line.inode
            rank, shown = labelled(line.text) if self._files.label else (None, line.text)
            ended = self._joiner(rank).feed(Line(now, shown))
            if ended or rank not in self._begun:
                self._begun[rank] = line.start
            seen += self._of(rank, ended)
        for rank, joiner in self._joiners.items():
            ended = joiner.flush(now - OPEN_SECONDS)
            if ended:
                self._begun.pop(rank, None)
            seen += self._of(rank, ended)
        return seen

    @property
    def safe(self) -> TailPosition:
        """Everything before it stands in records that were given out."""
        position = self.tail.position
        if not self._begun or position.inode != self._inode:
            return position
        return msgspec.structs.replace(position, offset=min(position.offset, *self._begun.values()))

    def _joiner(self, rank: int | None) -> RecordJoiner:
        stream: Stream = "stderr" if self._place.stream == "stderr" else "stdout"
        return self._joiners.setdefault(rank, RecordJoiner(stream))

    def _of(self, rank: int | None, records: Sequence[LogLine]) -> list[Seen]:
        place = self._place
        whose = Whose(
            node=place.node, job=self._files.job, rank=rank if rank is not None else place.rank,
            local_rank=place.local_rank, torchrun_attempt=place.attempt,
            key=self._path if place.attempt is not None else "",
        )  # fmt: skip
        return [SeenLine(record, whose) for record in records]


class Logs:
    """All log files of this node. Reading goes round the files, so that none starves another.

    Positions are written down after what they stand for is on the bus: a restart loses nothing. What an earlier
    life sent and had not written down when it was killed is sent again.
    """

    name = "logs"
    every_seconds = 0.3

    def __init__(self, wanted: Sequence[LogFiles], store: Path) -> None:
        """`store`: the file that keeps the positions. Raises SourceFailed where it cannot be read."""
        self._wanted = wanted
        self._store = store
        self._kept = _read_kept(store)
        self._followed: dict[str, _Followed] = {}
        self._looked_at = float("-inf")
        self._too_many = 0
        self._gone: dict[str, int] = {}

    def read(self, now: float) -> Sequence[Seen]:
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look()
        seen: list[Seen] = []
        for path in list(self._followed):
            if len(seen) >= SEEN_MAX - LINES_OF_FILE_MAX:
                break
            followed = self._followed.pop(path)
            self._followed[path] = followed  # to the end of the round
            seen += followed.read(now)
        return seen

    def stored(self) -> None:
        files = {path: followed.safe for path, followed in self._followed.items()}
        kept = {path: place for path, place in self._kept.files.items() if path not in files} | files
        if kept == self._kept.files:
            return
        self._kept.files = dict(list(kept.items())[-KEPT_POSITIONS_MAX:])
        beside = self._store.with_suffix(".tmp")
        try:
            self._store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(beside, "wb", opener=_private) as stream:
                stream.write(msgspec.json.encode(self._kept))
            beside.replace(self._store)
        except OSError as error:
            raise SourceFailed(
                f"the positions in log files cannot be written to {self._store} ({error.strerror}); "
                "give state_dir room, or after a restart lines come twice"
            ) from error

    def counters(self) -> Mapping[str, int]:
        counted = dict(self._gone)
        for followed in self._followed.values():
            for name, number in followed.tail.counters().items():
                counted[name] = counted.get(name, 0) + number
        return counted | ({"files_beyond_limit": self._too_many} if self._too_many else {})

    def close(self) -> None:
        for followed in self._followed.values():
            followed.tail.close()

    def _look(self) -> None:
        """Begin to follow files that are new, oldest first; one that was never seen is read from its beginning."""
        found: dict[str, tuple[LogFiles, LogPlace]] = {}
        for files in self._wanted:
            for path in _paths(files):
                place = _place(files, path)
                if path not in self._followed and place is not None:
                    found.setdefault(path, (files, place))
        self._too_many = max(0, len(self._followed) + len(found) - FILES_MAX)
        for path in sorted(found, key=_changed_at)[: FILES_MAX - len(self._followed)]:
            files, place = found[path]
            self._followed[path] = _Followed(path, files, place, self._kept.files.get(path))


def _paths(files: LogFiles) -> list[str]:
    if has_slurm_fields(files.path):
        return glob.glob(slurm_glob(files.path))  # noqa: PTH207  (patterns are absolute)
    if Path(files.path).is_dir():
        return glob.glob(f"{glob.escape(files.path)}/**/attempt_*/*/std*.log", recursive=True)  # noqa: PTH207
    return [path for path in glob.glob(files.path, recursive=True) if Path(path).is_file()]  # noqa: PTH207


def _place(files: LogFiles, path: str) -> LogPlace | None:
    if has_slurm_fields(files.path):
        return slurm_place(files.path, path)
    return torchrun_place(path) or LogPlace()


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116  (for each of thousands of files)
    except OSError:
        return 0.0


def _read_kept(store: Path) -> _Kept:
    try:
        return msgspec.json.decode(store.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return _Kept()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceFailed(
            f"the positions in log files cannot be read from {store} ({error}); remove it, and files are read anew"
        ) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
