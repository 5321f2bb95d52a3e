"""How engines learn where the others are: `ring/<node>.json` in the job's shared folder, written by its own engine.

Whether another engine lives is judged by its counter going on while our own clock runs: no two hosts' clocks
are compared. A file is read only when somebody asks for that node.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .clock import Clock

FOLDER = "ring"
MEMBER_BYTES_MAX = 4096
MEMBERS_MAX = 16_384
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class Member:
    """Where one engine listens. `epoch` changes with each start, `beat` counts on while it lives."""

    node: str
    host: str
    port: int
    epoch: str
    beat: int = 0


@dataclass(slots=True)
class _Seen:
    member: Member
    changed_at: float  # by our own clock
    read_at: float


def is_node_name(name: str) -> bool:
    """Whether it can be a file's name."""
    return _NODE.match(name) is not None


def decode_member(raw: bytes) -> Member | None:
    """None where it is not one, whatever the bytes are."""
    try:
        fields = json.loads(raw)
        member = Member(**{name: fields[name] for name in ("node", "host", "port", "epoch", "beat")})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    words = all(type(word) is str and 0 < len(word) <= 256 for word in (member.node, member.host, member.epoch))
    numbers = all(type(number) is int and number >= 0 for number in (member.port, member.beat))
    return member if words and numbers and is_node_name(member.node) and member.port < 1 << 16 else None


class Members:
    """The nodes of the ring as one engine sees them. Every method may be called from any thread."""

    def __init__(
        self,
        directory: Path,
        nodes: Sequence[str],
        addresses: Mapping[str, tuple[str, int]],
        clock: Clock,
        beat_seconds: float,
        dead_seconds: float,
    ) -> None:
        self._folder = directory / FOLDER
        self._nodes = tuple(nodes)
        self._addresses = dict(addresses)
        self._clock = clock
        self._beat_seconds = beat_seconds
        self._dead_seconds = dead_seconds
        self._seen: dict[str, _Seen] = {}
        self._mine: Member | None = None
        self._names: tuple[str, ...] = ()
        self._listed_at = float("-inf")
        self._lock = threading.Lock()

    def publish(self, me: Member) -> None:
        """Say where we are, or that we still are; the counter is kept here. Raises OSError."""
        with self._lock:
            beat = self._mine.beat + 1 if self._mine is not None else 1
            self._mine = replace(me, beat=beat)
            content = json.dumps(asdict(self._mine)).encode()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f".{me.node}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_bytes(content)
        temporary.replace(self._folder / f"{me.node}.json")  # no fsync: a beat is worth nothing after a power cut

    def withdraw(self, node: str) -> None:
        """Leave, so that neighbours need not find out."""
        with contextlib.suppress(OSError):
            (self._folder / f"{node}.json").unlink()

    def order(self) -> tuple[str, ...]:
        """All nodes, living or not, in the order of the ring."""
        with self._lock:
            now = self._clock.monotonic()
            if now - self._listed_at >= self._beat_seconds / 2:
                self._names, self._listed_at = self._listed(), now
            return self._names

    def living(self, node: str) -> Member | None:
        """Where `node` listens; None where it is not known, or has been silent for too long."""
        seen = self._look(node)
        if seen is None:
            fixed = self._addresses.get(node)
            return None if fixed is None else Member(node, *fixed, epoch="")
        silent_seconds = self._clock.monotonic() - seen.changed_at
        return seen.member if silent_seconds <= self._dead_seconds else None

    def _listed(self) -> tuple[str, ...]:
        try:
            names = sorted(path.stem for path in self._folder.glob("*.json"))[:MEMBERS_MAX]
        except OSError:
            names = []
        known = dict.fromkeys((*self._nodes, *self._addresses))
        return (*known, *(name for name in names if name not in known and is_node_name(name)))

    def _look(self, node: str) -> _Seen | None:
        with self._lock:
            seen = self._seen.get(node)
            now = self._clock.monotonic()
            if seen is not None and now - seen.read_at < self._beat_seconds / 2:
                return seen
            member = self._read(node)
            if member is None:
                self._seen.pop(node, None)
                return None
            if seen is None or (seen.member.epoch, seen.member.beat) != (member.epoch, member.beat):
                seen = self._seen[node] = _Seen(member, now, now)
            seen.read_at = now
            return seen

    def _read(self, node: str) -> Member | None:
        if not is_node_name(node):
            return None
        try:
            with (self._folder / f"{node}.json").open("rb") as file:
                member = decode_member(file.read(MEMBER_BYTES_MAX + 1))
        except OSError:
            return None
        return member if member is not None and member.node == node else None
