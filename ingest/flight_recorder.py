"""How far a rank's collectives got, from the JSON that torch's flight recorder dumps (never from its pickles)."""

from __future__ import annotations

from typing import Any

import msgspec

DUMP_BYTES_MAX = 64 * 1024 * 1024
DEFAULT_GROUPS = ("default_pg", "")


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """The newest collective of the default process group that this rank has enqueued, and the newest completed.

    `completed` is None where the backend does not tell (gloo); -1 where none is complete.
    """

    collective: str = ""
    enqueued: int | None = None
    completed: int | None = None


class _Entry(msgspec.Struct):
    """One record, of which we read these; torch 2.5 to 2.15 write them."""

    collective_seq_id: int = -1
    is_p2p: bool = False
    process_group: Any = None  # [name, description]
    profiling_name: str = ""
    state: str = ""
    time_discovered_completed_ns: int | None = None


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []


_DUMPS = msgspec.json.Decoder(_Dump)


def parse_dump(dump: bytes) -> Flight | None:
    """What one dump tells; None where it holds no collective of the default group, or is no such dump."""
    if len(dump) > DUMP_BYTES_MAX:
        return None
    try:
        entries = _DUMPS.decode(dump).entries
    except (ValueError, RecursionError):
        return None
    mine = [entry for entry in entries if not entry.is_p2p and entry.collective_seq_id >= 0 and _is_default(entry)]
    if not mine:
        return None
    newest = max(mine, key=lambda entry: entry.collective_seq_id)
    watched = any(entry.state in ("started", "completed") for entry in mine)
    done = [entry.collective_seq_id for entry in mine if entry.state == "completed"]
    return Flight(
        collective=newest.profiling_name.rpartition(":")[2],
        enqueued=newest.collective_seq_id,
        completed=max(done, default=-1) if watched else None,
    )


def _is_default(entry: _Entry) -> bool:
    group = entry.process_group
    return not isinstance(group, list) or len(group) < 2 or group[1] in DEFAULT_GROUPS
