"""Sequence numbers of collectives, as NCCL's watchdog prints them: two lines can carry all the evidence of a hang."""

from __future__ import annotations

import re
from typing import NamedTuple

GATE = ("SeqNum=", "ast enqueued ")  # one of them is in every line that tells something
_GROUP = re.compile(r"\[PG (?:ID )?(\d+)(?: PG GUID ([^\]\s]+))? Rank (\d+)\]|\[Rank (\d+)\]")
_SEQUENCE = re.compile(r"\bSeqNum=(\d{1,15})\b(?:, OpType=(\w+))?")
_WORK = re.compile(r"\b[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,15}), last completed (?:NCCL )?work: (-?\d{1,15})")


class Told(NamedTuple):
    """What one watchdog line tells. `group` names the process group ("" where the line does not), `rank` is the rank
    in it; `number` is the collective that timed out, `enqueued` and `completed` the newest of the rank."""

    group: str
    rank: int | None
    number: int | None = None
    collective: str = ""
    enqueued: int | None = None
    completed: int | None = None


def parse_watchdog(line: str) -> Told | None:
    """What the line tells; None where it is no such line."""
    if GATE[0] not in line and GATE[1] not in line:
        return None
    sequence, work = _SEQUENCE.search(line), _WORK.search(line)
    if sequence is None and work is None:
        return None
    where = _GROUP.search(line)
    group = "" if where is None or where.group(1) is None else where.group(2) or where.group(1)
    rank = None if where is None else int(where.group(3) or where.group(4))
    return Told(
        group,
        rank,
        int(sequence.group(1)) if sequence else None,
        (sequence.group(2) or "").lower() if sequence else "",
        int(work.group(1)) if work else None,
        int(work.group(2)) if work else None,
    )
