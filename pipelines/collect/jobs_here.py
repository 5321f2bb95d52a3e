"""Which attempts of which jobs run on this node, and where their ranks are: told by the events on the bus."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec

from ingest.events import AttemptEnded, AttemptStarted, Message, NodeHeartbeat, RankExited, RankStarted
from pipelines.collect.source import Whose

JOBS_MAX = 256
FILES_MAX = 20_000  # whose attempt is remembered
SILENT_SECONDS_MAX = 600.0  # an attempt of which nobody on the node has spoken for so long is over
WANTED = frozenset({"attempt_started.v1", "attempt_ended.v1", "rank_started.v1", "rank_exited.v1", "node_heartbeat.v1"})


class RankHere(msgspec.Struct, kw_only=True):
    """One rank of this node."""

    local_rank: int = 0
    pid: int = 0
    gpu_uuid: str = ""
    pci_address: str = ""


class JobHere(msgspec.Struct, kw_only=True):
    """The newest attempt of a job that has ranks on this node."""

    attempt: int
    node: str
    heard_at: float
    ranks: dict[int, RankHere] = {}
    over: bool = False


class Stamp(msgspec.Struct, frozen=True):
    """Whom a message of ours is about."""

    job: str
    attempt: int
    rank: int
    node: str


class JobsHere:
    """Fed by one thread, asked by those of the sources."""

    def __init__(self, node: str, gpus: dict[str, int] | None = None) -> None:
        """`gpus`: PCI address (`0000:3b:00.0`) → local rank, where ranks do not tell which GPU they use."""
        self.node = node
        self._gpus = {_device(address): rank for address, rank in (gpus or {}).items()}
        self._jobs: dict[tuple[str, str], JobHere] = {}  # by job and node
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()

    def hear(self, messages: Iterable[Message]) -> None:
        """Take in events, oldest first."""
        with self._lock:
            for message in messages:
                self._hear(message)

    def running(self, node: str, now: float) -> list[tuple[str, JobHere]]:
        """Jobs whose newest attempt has ranks on `node` (empty: this one), newest last."""
        with self._lock:
            found = [
                (job, here) for (job, name), here in self._jobs.items()
                if name == (node or self.node) and not here.over and now - here.heard_at <= SILENT_SECONDS_MAX
            ]  # fmt: skip
        return sorted(found, key=lambda one: one[1].heard_at)

    def stamps(self, whose: Whose, now: float) -> list[Stamp]:
        """Whom something is about that a source has seen; none where nothing of the kind runs here.

        What names a job is taken at its word; a file of torchrun's belongs to the attempt that ran when it was new.
        """
        node = whose.node or self.node
        running = [(job, here) for job, here in self.running(node, now) if whose.job in ("", job)]
        stamps = []
        for job, here in running:
            rank = self._rank(here, whose)
            stamps.append(Stamp(job, self._attempt(whose, here.attempt), -1 if rank is None else rank, node))
        if not stamps and whose.job:
            rank = whose.rank if whose.rank is not None else whose.local_rank
            attempt = self._attempt(whose, 1 + (whose.torchrun_attempt or 0))
            return [Stamp(whose.job, attempt, -1 if rank is None else rank, node)]
        return stamps

    def to_state(self) -> bytes:
        with self._lock:
            return msgspec.json.encode([[job, node, here] for (job, node), here in self._jobs.items()])

    def load_state(self, raw: bytes) -> None:
        """Raises msgspec.DecodeError."""
        loaded = msgspec.json.decode(raw, type=list[tuple[str, str, JobHere]])
        with self._lock:
            self._jobs = {(job, node): here for job, node, here in loaded}

    def _attempt(self, whose: Whose, current: int) -> int:
        if whose.attempt is not None:
            return whose.attempt
        if not whose.key:
            return current
        with self._lock:
            if len(self._files) >= FILES_MAX:
                self._files.pop(next(iter(self._files)))
            return self._files.setdefault(whose.key, current)

    def _rank(self, here: JobHere, whose: Whose) -> int | None:
        if whose.rank is not None:
            return whose.rank
        local = whose.local_rank
        if whose.pci_address:
            device = _device(whose.pci_address)
            for rank, known in here.ranks.items():
                if known.pci_address and _device(known.pci_address) == device:
                    return rank
            local = self._gpus.get(device)
        if local is None:
            return None
        return next((rank for rank, known in here.ranks.items() if known.local_rank == local), None)

    def _hear(self, message: Message) -> None:
        key = (message.job, message.node)
        if isinstance(message, AttemptStarted):
            for place in message.places:
                here = self._at((message.job, place.node), message)
                if here is not None:
                    here.ranks.setdefault(place.rank, RankHere()).local_rank = place.local_rank
            return
        if isinstance(message, NodeHeartbeat) and not message.attempt:
            return  # a launcher that waits has no ranks
        here = self._at(key, message)
        if here is None:
            return
        if isinstance(message, RankStarted):
            here.ranks[message.rank] = RankHere(
                local_rank=message.local_rank, pid=message.pid, gpu_uuid=message.gpu_uuid or "",
                pci_address=message.pci_address or "",
            )  # fmt: skip
        elif isinstance(message, AttemptEnded):
            here.over = True
        elif isinstance(message, RankExited):
            return  # its last lines may still have to be read

    def _at(self, key: tuple[str, str], message: Message) -> JobHere | None:
        here = self._jobs.get(key)
        if here is None or message.attempt > here.attempt:
            for other in [other for other in self._jobs if other[0] == key[0]]:
                if self._jobs[other].attempt < message.attempt:
                    del self._jobs[other]
            while len(self._jobs) >= JOBS_MAX:
                del self._jobs[min(self._jobs, key=lambda one: self._jobs[one].heard_at)]
            here = self._jobs[key] = JobHere(attempt=message.attempt, node=key[1], heard_at=message.at)
        if message.attempt < here.attempt:
            return None
        here.heard_at = max(here.heard_at, message.at)
        return here


def _device(address: str) -> str:
    """`00000000:3B:00.0` and `0000:3b:00` are one."""
    domain, _, rest = address.lower().partition(".")[0].rpartition(":")[0].rpartition(":")
    bus = address.lower().partition(".")[0].rpartition(":")
    return f"{domain.lstrip('0')}:{rest or bus[0]}:{bus[2]}" if domain else f":{bus[0]}:{bus[2]}"
