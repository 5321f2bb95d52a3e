"""A job's records in its ConfigMap: each change is a compare-and-swap, and an overtaken controller makes none."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from recovery.backend import Ambiguous, Conflict, Rejected, Unavailable
from recovery.launcher.protocol import Excluded, JobEnd, JobSpec, Placement

from .api import CONFIG_MAPS, KubeApi
from .manifests import object_name
from .objects import ConfigMap

SPEC = "job.json"
PLACEMENT = "placement.json"
EXCLUDED = "excluded.json"
END = "outcome.json"
TURN = "allocation.json"
TEMPLATE = "template.json"
EPOCH = "epoch"
PLAIN_BYTES_MAX = 128 * 1024  # a ConfigMap holds 1 MiB in all; 16,384 ranks are that much uncompressed
UNPACKED_BYTES_MAX = 64 * 1024 * 1024
SWAPS_MAX = 8
Content = TypeVar("Content", bound=msgspec.Struct)
Changes = dict[str, bytes | None]  # by key; None: nothing of that name stands there any more


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Which generation of pods there is to be: the intent, written before any pod is deleted or made."""

    generation: int
    pods: int
    attempt: int = 0
    token: str = ""
    excluded: tuple[str, ...] = ()


class JobMap:
    """What the ConfigMap of a job says, as it was read; None of it where there is no such job."""

    def __init__(self, found: ConfigMap | None) -> None:
        self.found = found

    def read(self, key: str, type_: type[Content]) -> Content | None:
        raw = self._raw(key)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=type_)
        except (ValueError, RecursionError) as error:
            raise Rejected(f"{key} in the ConfigMap of the job is not what it should be ({error})") from error

    @property
    def template(self) -> dict[str, object]:
        raw = self._raw(TEMPLATE)
        if raw is None:
            raise Rejected("the ConfigMap of the job has no pod template; it was not made by `transom run`")
        return msgspec.json.decode(raw, type=dict[str, object])

    @property
    def turn(self) -> Turn | None:
        return self.read(TURN, Turn)

    @property
    def placement(self) -> Placement | None:
        return self.read(PLACEMENT, Placement)

    @property
    def excluded(self) -> frozenset[str]:
        content = self.read(EXCLUDED, Excluded)
        return frozenset(content.nodes) if content else frozenset()

    @property
    def end(self) -> JobEnd | None:
        return self.read(END, JobEnd)

    @property
    def epoch(self) -> int:
        raw = self._raw(EPOCH)
        return int(raw) if raw and raw.isdigit() else 0

    @property
    def newest_attempt(self) -> tuple[int, str]:
        """The newest attempt that stands anywhere here, with its token."""
        turn, placement = self.turn, self.placement
        known = [(one.attempt, one.token) for one in (turn, placement) if one is not None]
        return max(known, key=lambda pair: pair[0], default=(0, ""))

    def _raw(self, key: str) -> bytes | None:
        if self.found is None:
            return None
        packed = self.found.binary_data.get(f"{key}.gz")
        if packed is None:
            text = self.found.data.get(key)
            return None if text is None else text.encode()
        unpacker = zlib.decompressobj(wbits=31)
        try:
            raw = unpacker.decompress(packed, UNPACKED_BYTES_MAX)
        except zlib.error as error:
            raise Rejected(f"{key}.gz in the ConfigMap of the job cannot be unpacked ({error})") from error
        if unpacker.unconsumed_tail:
            raise Rejected(f"{key}.gz in the ConfigMap of the job has more than {UNPACKED_BYTES_MAX} bytes")
        return raw


class ConfigMapRecords:
    """`JobRecords` of one job. `epoch` says as which controller we write; 0: as whoever submitted the job."""

    def __init__(self, api: KubeApi, job: str, epoch: Callable[[], int]) -> None:
        self._api = api
        self._job = job
        self._epoch = epoch

    def look(self) -> JobMap:
        return JobMap(self._api.get(CONFIG_MAPS, object_name(self._job), ConfigMap))

    def spec(self) -> JobSpec | None:
        return self.look().read(SPEC, JobSpec)

    def placement(self) -> Placement | None:
        return self.look().placement

    def excluded(self) -> frozenset[str]:
        return self.look().excluded

    def end(self) -> JobEnd | None:
        return self.look().end

    def write_placement(self, placement: Placement) -> None:
        """Raises Conflict where a newer attempt, or this one of another, stands there."""

        def change(seen: JobMap) -> Changes:
            attempt, token = seen.newest_attempt
            if attempt > placement.attempt or (attempt == placement.attempt and token != placement.token):
                raise Conflict(f"attempt {attempt} of {self._job} was here, {placement.attempt} is not newer")
            return {PLACEMENT: msgspec.json.encode(placement)}

        self.swap(change)

    def write_excluded(self, nodes: frozenset[str]) -> None:
        self.swap(lambda _: {EXCLUDED: msgspec.json.encode(Excluded(nodes=tuple(sorted(nodes))))})

    def write_end(self, end: JobEnd) -> None:
        """The first end stays. It is written by whoever knows it, the front of the job too."""
        self.swap(lambda seen: {} if seen.end is not None else {END: msgspec.json.encode(end)}, fenced=False)

    def swap(self, change: Callable[[JobMap], Changes], *, fenced: bool = True) -> JobMap:
        """Write what `change` makes of what stands there, unless somebody was quicker: then look and try again.

        An answer that was lost is looked after: it counts as written where it stands there. `change` raises Conflict
        where there is nothing to be done. Raises Conflict too for a controller whose epoch is over.
        """
        lost: Ambiguous | None = None
        for _ in range(SWAPS_MAX):
            seen = self.look()
            if seen.found is None:
                raise Rejected(f"there is no job {self._job} in namespace {self._api.namespace}")
            changes = change(seen)
            epoch = self._epoch() if fenced else seen.epoch
            if fenced and epoch < seen.epoch:
                raise Conflict(f"another controller (epoch {seen.epoch}) has {self._job}; this one was {epoch}")
            if epoch > seen.epoch:
                changes = changes | {EPOCH: str(epoch).encode()}
            if not _differs(seen.found, changes):
                return seen
            body = {"metadata": {"resourceVersion": seen.found.metadata.resource_version}} | _patch(changes)
            try:
                return JobMap(self._api.patch(CONFIG_MAPS, object_name(self._job), body, ConfigMap))
            except Ambiguous as error:
                lost = error
            except Conflict:
                continue
        if lost is not None:
            raise lost
        raise Unavailable(f"the records of {self._job} were changed by others {SWAPS_MAX} times in a row")


def _entry(key: str, content: bytes | None) -> tuple[str | None, bytes | None]:
    """What stands in `data` and in `binaryData` for it."""
    if content is None:
        return None, None
    if len(content) <= PLAIN_BYTES_MAX:
        return content.decode(), None
    return None, gzip.compress(content, mtime=0)


def _patch(changes: Changes) -> dict[str, object]:
    data: dict[str, object] = {}
    binary: dict[str, object] = {}
    for key, content in changes.items():
        text, packed = _entry(key, content)
        data[key] = text
        binary[f"{key}.gz"] = None if packed is None else msgspec.to_builtins(packed)  # base64
    return {"data": data, "binaryData": binary}


def _differs(found: ConfigMap, changes: Changes) -> bool:
    for key, content in changes.items():
        text, packed = _entry(key, content)
        if found.data.get(key) != text or found.binary_data.get(f"{key}.gz") != packed:
            return True
    return False
