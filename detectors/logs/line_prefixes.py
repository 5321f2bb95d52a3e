"""What stands before a line: rank, host, time and level, as launchers, loggers and schedulers put it there."""

from __future__ import annotations

import re

LINE_CHARACTERS_MAX = 4096

ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_TIME = r"\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?: ?Z|[+-]\d\d:?\d\d)?"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_HOST = r"[A-Za-z0-9][\w.-]{0,80}"
_PARTS = (
    r"\[[A-Za-z_]{1,24}?\d{1,6}\]:\s?",  # torchrun: [rank3]:  [default3]:  [worker3]:
    r"\[[Rr]ank[ _]?\d{1,6}\]:?\s?",  # [Rank 3]  [rank3]
    r"\[\d+,\d+\]<std(?:out|err|diag)>:?\s?",  # mpirun --tag-output
    r"\s*\d{1,6}:\s",  # srun --label
    r"\((?:[\w.<>:\[\]-]+ )?pid=\d+(?:, ip=[\w.:-]+)?\)\s?",  # Ray
    r"\((?:raylet|gcs_server|autoscaler|driver)[^)]{0,60}\)\s?",
    r"<\d{1,3}>(?=\[)",  # kernel priority
    r"\[\s*\+?\d+\.\d{3,9}\]\s*",  # dmesg
    rf"\[{_DAY} {_MONTH} [ \d]\d \d\d:\d\d:\d\d \d{{4}}\]\s*",  # dmesg -T
    rf"\[?{_TIME}\]?(?:\s*[|:-](?=\s))?\s*",  # most loggers, Kubernetes, journalctl -o short-iso
    r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?\s+",
    r"(?:stdout|stderr) [FP] ",  # a container's log file
    rf"{_MONTH} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? {_HOST} (?=[\w./-]+(?:\[\d+\])?: )",  # syslog
    rf"{_HOST} kernel: ",
    r"kernel:\s",
    r"[a-z][\w.-]{0,60}-\d+\s*\|\s",  # docker compose, stern
    r"\d{1,3}(?:\.\d{1,3}){3}:\s",  # pdsh
    # pdsh: node-01: - and not the device of which a kernel speaks: ata1.00:, eth0:
    r"(?!(?:ata|bond|dm-|en[ops]|eth|ib|md|nvme|sd|usb|wl)\d)(?=[a-z.-]{0,40}\d)[a-z][a-z0-9.-]{1,60}:\s",
    r"\|\s",
    r"[EF]\d{3,4} \d\d:\d\d:\d\d(?:\.\d+)?\s+(?:\d+ )?[\w./-]+:\d+\]\s?",  # glog
    r"(?:ERROR|CRITICAL|FATAL):[\w.-]*:",  # logging.basicConfig
    r"\[?(?:ERROR|CRITICAL|FATAL)\]?(?:\s+\[[\w.:-]+\])?(?:\s*[|:-])?\s+",
    r"[\w.-]{1,60} - (?:ERROR|CRITICAL|FATAL) - ",
)  # fmt: skip
PREFIXES = re.compile("(?:" + "|".join(_PARTS) + ")+", re.ASCII)


def strip_prefixes(line: str) -> str:
    """The line (its first 4,096 characters) without rank, host, time, error level and colours."""
    if len(line) > LINE_CHARACTERS_MAX:
        line = line[:LINE_CHARACTERS_MAX]
    if "\x1b" in line:
        line = ANSI.sub("", line)
    found = PREFIXES.match(line)
    return line if found is None else line[found.end() :]
