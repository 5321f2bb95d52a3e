"""What stands before a line: rank, host, time and level, as launchers, loggers and schedulers put it there."""

from __future__ import annotations

import re
from typing import NamedTuple

LINE_CHARACTERS_MAX = 4096

ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_TIME = r"\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?: ?Z|[+-]\d\d:?\d\d)?"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_HOST = r"[A-Za-z0-9][\w.-]{0,80}"
_PARTS = (
    r"\[(?P<role>[A-Za-z_]{1,24}?)(?P<number>\d{1,6})\]:\s?",  # torchrun: [rank3]:  [default3]:  [worker3]:
    r"\[[Rr]ank[ _]?(?P<bracket>\d{1,6})\]:?\s?",  # [Rank 3]  [rank3]
    r"\[\d+,(?P<mpi>\d+)\]<std(?:out|err|diag)>:?\s?",  # mpirun --tag-output
    r"\s*(?P<label>\d{1,6}):\s",  # srun --label
    r"\((?:[\w.<>:\[\]-]+ )?pid=\d+(?:, ip=(?P<ray_host>[\w.:-]+))?\)\s?",  # Ray
    r"\((?:raylet|gcs_server|autoscaler|driver)[^)]{0,60}\)\s?",
    r"<\d{1,3}>(?=\[)",  # kernel priority
    r"\[\s*\+?\d+\.\d{3,9}\]\s*",  # dmesg
    rf"\[{_DAY} {_MONTH} [ \d]\d \d\d:\d\d:\d\d \d{{4}}\]\s*",  # dmesg -T
    rf"\[?{_TIME}\]?(?:\s*[|:-](?=\s))?\s*",  # most loggers, Kubernetes, journalctl -o short-iso
    r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?\s+",
    r"(?:stdout|stderr) [FP] ",  # a container's log file
    rf"{_MONTH} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? (?P<syslog_host>{_HOST}) (?=[\w./-]+(?:\[\d+\])?: )",  # syslog
    rf"(?P<kernel_host>{_HOST}) kernel: ",
    r"kernel:\s",
    r"(?P<compose>[a-z][\w.-]{0,60}-\d+)\s*\|\s",  # docker compose, stern
    r"(?P<dotted>\d{1,3}(?:\.\d{1,3}){3}):\s",  # pdsh
    r"(?P<host>(?=[a-z.-]{0,40}\d)[a-z][a-z0-9.-]{1,60}):\s",  # pdsh: node-01:
    r"\|\s",
    r"[EF]\d{3,4} \d\d:\d\d:\d\d(?:\.\d+)?\s+(?:\d+ )?[\w./-]+:\d+\]\s?",  # glog
    r"(?:ERROR|CRITICAL|FATAL):[\w.-]*:",  # logging.basicConfig
    r"\[?(?:ERROR|CRITICAL|FATAL)\]?(?:\s+\[[\w.:-]+\])?(?:\s*[|:-])?\s+",
    r"[\w.-]{1,60} - (?:ERROR|CRITICAL|FATAL) - ",
)  # fmt: skip
PREFIXES = re.compile("(?:" + "|".join(re.sub(r"\(\?P<\w+>", "(?:", part) for part in _PARTS) + ")+", re.ASCII)
_ONE = re.compile("|".join(_PARTS), re.ASCII)
_RANK_ROLES = frozenset(("rank", "r", "global_rank", "worker", "trainer"))


class Prefixed(NamedTuple):
    """A line without what stood before it, and what that told. None where nothing was told."""

    text: str
    rank: int | None
    local_rank: int | None
    node: str | None
    stamp: str  # the first time that stood there, as it stood there


def strip_prefixes(line: str) -> str:
    """The line (its first 4,096 characters) without rank, host, time, error level and colours."""
    if len(line) > LINE_CHARACTERS_MAX:
        line = line[:LINE_CHARACTERS_MAX]
    if "\x1b" in line:
        line = ANSI.sub("", line)
    found = PREFIXES.match(line)
    return line if found is None else line[found.end() :]


def read_prefixes(line: str) -> Prefixed:
    """`strip_prefixes`, and whom the prefixes name: for logs that no launcher of ours has stamped."""
    text = ANSI.sub("", line[:LINE_CHARACTERS_MAX])
    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    stamp, at = "", 0
    while (found := _ONE.match(text, at)) is not None and found.end() > at:
        told = {name: value for name, value in found.groupdict().items() if value is not None}
        if "role" in told:
            if told["role"].lower() in _RANK_ROLES:
                rank = int(told["number"])
            else:
                local_rank = int(told["number"])
        for name in ("bracket", "mpi", "label"):
            rank = int(told[name]) if name in told else rank
        for name in ("ray_host", "syslog_host", "kernel_host", "compose", "dotted", "host"):
            node = told.get(name, node)
        if not stamp and ":" in found.group() and found.group()[:1] in "[0123456789JFMASOND":
            stamp = found.group().strip(" []|-\t") if not told or "syslog_host" in told else ""
        at = found.end()
    return Prefixed(text[at:], rank, local_rank, node, stamp)
