"""Lines of a host's kernel, from /dev/kmsg, from the journal as JSON, or from a syslog file, with UTC times."""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo
from typing import NamedTuple

import msgspec

TEXT_CHARS_MAX = 4_096
MICROSECONDS = 1_000_000
_ESCAPED = re.compile(r"\\x([0-9a-fA-F]{2})")
_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), start=1
    )
}
_BSD = re.compile(
    r"^(?:<\d{1,3}>)?([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\S+) (kernel): (?:\[ *\d+\.\d+\] )?(.*)$"
)
_ISO = re.compile(
    r"^(?:<\d{1,3}>(?:1 )?)?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-]\d\d:?\d\d)?) (\S+) "
    r"kernel(?::| - - - | - - )\s*(?:\[ *\d+\.\d+\] )?(.*)$"
)


class KernelLine(NamedTuple):
    """One line; `host` is empty where the source is this host's own. `number` counts, where the kernel numbers."""

    at: float
    text: str
    host: str = ""
    number: int | None = None


class _JournalEntry(msgspec.Struct):
    message: str | list[int] | None = msgspec.field(name="MESSAGE", default=None)
    microseconds: str = msgspec.field(name="__REALTIME_TIMESTAMP", default="")


_journal = msgspec.json.Decoder(_JournalEntry)


def from_kmsg(record: bytes, booted_at: float) -> KernelLine | None:
    """One record of /dev/kmsg; None where it is none. `booted_at`: UTC seconds of the kernel's zero.

    Its form (Documentation/ABI/testing/dev-kmsg): `priority,number,microseconds,flags;text`, then ` KEY=value` lines.
    """
    head, separator, rest = record.partition(b";")
    fields = head.split(b",")
    if not separator or len(fields) < 3:
        return None
    try:
        number, microseconds = int(fields[1]), int(fields[2])
    except ValueError:
        return None
    text = rest.split(b"\n", 1)[0].decode("utf-8", "replace")
    shown = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)[:TEXT_CHARS_MAX]
    return KernelLine(booted_at + microseconds / MICROSECONDS, shown, number=number)


def from_journal(line: bytes) -> KernelLine | None:
    """One line of `journalctl -k -o json`; None where it is none."""
    try:
        entry = _journal.decode(line)
        microseconds = int(entry.microseconds)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
    if entry.message is None:
        return None
    text = entry.message
    if not isinstance(text, str):  # text that is no UTF-8 is given as numbers
        text = bytes(number & 0xFF for number in text).decode("utf-8", "replace")
    return KernelLine(microseconds / MICROSECONDS, text[:TEXT_CHARS_MAX])


def from_syslog(line: str, now: float, zone: tzinfo = UTC) -> KernelLine | None:
    """A kernel's line in a syslog file (RFC 3164 or ISO times); None for all else.

    Old times have neither year nor zone: the zone is the file's, the year the one that puts them nearest before `now`.
    """
    found = _ISO.match(line)
    if found is not None:
        moment = datetime.fromisoformat(found[1])
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)
        return KernelLine(moment.timestamp(), found[3][:TEXT_CHARS_MAX], host=found[2])
    found = _BSD.match(line)
    if found is None or found[1] not in _MONTHS:
        return None
    day, hour, minute, second = (int(found[index]) for index in range(2, 6))
    this_year = datetime.fromtimestamp(now, zone).year
    try:
        moment = datetime(this_year, _MONTHS[found[1]], day, hour, minute, min(second, 59), tzinfo=zone)
        if moment.timestamp() > now + 86_400.0:
            moment = moment.replace(year=this_year - 1)
    except ValueError:  # the 30th of February
        return None
    return KernelLine(moment.timestamp(), found[8][:TEXT_CHARS_MAX], host=found[6])
