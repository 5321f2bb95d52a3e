"""Who said a log line, where and when: rank, node, device and time from its prefixes and from the name of its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import msgspec

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
DAY_SECONDS = 86_400.0
YEAR_SECONDS = 366 * DAY_SECONDS  # only the order matters
MONTH_NAMES = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTHS = {
    name: at
    for at, name in enumerate(["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1)
}
DAYS_BEFORE = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)  # a leap year's, so that every date has a place
PREFIXES_MAX = 8


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who speaks. `local`: a rank's number or a device's index on its node where that is all that is told."""

    rank: int | None = None
    node: str = ""
    local: int | None = None
    attempt: int = 0

    def over(self, other: Speaker) -> Speaker:
        """What this one knows, and what `other` knows where this one does not."""
        return Speaker(
            self.rank if self.rank is not None else other.rank, self.node or other.node,
            self.local if self.local is not None else other.local, self.attempt or other.attempt,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stamp:
    """A line's time: seconds into its year (`year` 0: not told), or with `uptime` seconds since the machine started."""

    seconds: float
    year: int = 0
    uptime: bool = False
    text: str = ""

    def in_year(self, year: int) -> float:
        """Seconds on an axis on which all wall times of one run can be compared; `year` fills one that is not told."""
        return (self.year or year) * YEAR_SECONDS + self.seconds


@dataclass(frozen=True, slots=True)
class Said:
    """A line without its prefixes, and what they told. `level` is in lower case, '' where none is told."""

    text: str
    speaker: Speaker
    stamp: Stamp | None
    level: str = ""


ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d(?:[.,]\d+)?)(?:Z|[+-]\d\d:?\d\d)?")
US = re.compile(r"\b(\d\d)/(\d\d)/(\d{4}),? (\d\d):(\d\d):(\d\d(?:\.\d+)?)")
GLOG = re.compile(r"(?:^|\[)([IWEFC])(\d{3,4}) (\d\d):(\d\d):(\d\d(?:\.\d+)?)")
SYSLOG = re.compile(
    r"^\[?(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d(?:\.\d+)?)"
)
UPTIME = re.compile(r"^\[\s*(\d+\.\d{3,6})\]")
# NCCL has no louder level than WARN
LEVEL = re.compile(r"(?:^|[\s\[(:|<-])(DEBUG|INFO|NOTICE|WARNING|(?<!NCCL )WARN|ERROR|CRITICAL|FATAL)(?=[\s\]):|>-]|$)")
STAMP_WITHIN_CHARACTERS = 100
LEVEL_WITHIN_CHARACTERS = 90
GLOG_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "fatal", "C": "critical"}


def _rank(found: re.Match[str]) -> Speaker:
    return Speaker(rank=int(found.group(1)))


def _local(found: re.Match[str]) -> Speaker:
    return Speaker(local=int(found.group(1)))


def _node(found: re.Match[str]) -> Speaker:
    return Speaker(node=found.group(1))


def _nobody(found: re.Match[str]) -> Speaker:
    return Speaker()


# what may stand before the words of a line; the first that fits is cut off, then the rest is looked at again
FRONT: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Speaker]], ...] = (
    (re.compile(r"\[rank\s?(\d{1,6})\]:? ?(?=\S|\s{2}|\t|$)"), _rank),
    (re.compile(r"\[(?:default|trainer|worker|role|RANK|Rank)_?(\d{1,4})\]: ?"), _local),
    (re.compile(r"\[\d{1,6},(\d{1,6})\]<std(?:out|err)>: ?"), _rank),  # mpirun --tag-output
    (re.compile(r"(\d{1,6}): (?=\S|\s|$)"), _rank),  # srun -l
    (re.compile(r"\(\w[\w.]* pid=\d+, ip=([\w.:-]+)\) ?"), _node),  # ray
    (re.compile(r"\(\w[\w.]* pid=\d+\) ?"), _nobody),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) std(?:out|err) [FP] "), _nobody),  # a container's log
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d) ([\w.-]+) [\w./-]+(?:\[\d+\])?: "), _node),  # rsyslog
    (re.compile(r"(?:<\d{1,3}>)?[A-Z][a-z]{2} +\d{1,2} [\d:.]{8,16} ([\w.-]+) [\w./()-]+(?:\[\d+\])?: "), _node),
    (re.compile(r"([\w.-]{1,80}?) +\| "), _node),  # docker compose
    (re.compile(r"\[\s*[\d+]\s*[\d.]{4,20}\] ?"), _nobody),  # kernel seconds
    (re.compile(r"\s*\[\d{4}-\d\d-\d\d[T ][\d:.,]+\] ?"), _nobody),  # Megatron
    (re.compile(r"\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} +\d{1,2} [\d:]{8} \d{4}\] ?"), _nobody),  # dmesg -T
    (re.compile(r"([\w-]+(?:\.[\w-]+)*) (?=kernel: )"), _node),
    (re.compile(r"kernel: ?"), _nobody),
)  # fmt: skip
NCCL = re.compile(r"^([\w.-]+):\d+:\d+ \[(\d{1,3})\] ")
NCCL_SHORT = re.compile(r"^([\w.-]+) \[(\d{1,3})\] (?=.*\bNCCL\b)")
WITHIN_RANK = re.compile(
    r"\[(?:PG [^\]]*?)?Rank (\d{1,6})\]|^(?:\w+: )?[Rr]ank (\d{1,6}):|\bglobal rank[ :]+(\d{1,6})\b"
    r"|\brank\s+:\s(\d{1,6}) \(local_rank"
)
TASK = re.compile(r"^(?:srun|slurmstepd): error: ([\w.-]+): tasks? (\d{1,6})(?!\d*[-,])")
NODE_WORDS = re.compile(
    r"(?:\bON ([\w.-]+) CANCELLED|[Nn]ode failure on ([\w.-]+)|^(?:srun|slurmstepd): error: ([\w.-]+):)"
)
LOCAL_WORDS = re.compile(r"\blocal_rank: (\d{1,4})\b")
JSON_WORDS = ("log", "message", "msg", "MESSAGE", "text", "textPayload")
JSON_TIMES = ("time", "timestamp", "@timestamp", "ts", "asctime")
JSON_NODES = ("node", "host", "hostname", "_HOSTNAME", "node_name", "pod", "pod_name")


def listen(line: str) -> Said:
    """Take a line apart: prefixes off, speaker and time from them and from what the line itself names."""
    line = ANSI.sub("", line)
    known = Speaker()
    stamp: Stamp | None = None
    if line.startswith("{"):
        line, known, stamp = _from_json(line)
    stamp = stamp or stamp_of(line)
    level = level_of(line)
    for _ in range(PREFIXES_MAX):
        for pattern, speaker in FRONT:
            found = pattern.match(line)
            if found is not None:
                known = speaker(found).over(known)
                line = line[found.end() :]
                break
        else:
            break
    return Said(line, _named_within(line, known).over(known), stamp, level)


def stamp_of(line: str) -> Stamp | None:
    """The first time that stands near a line's beginning."""
    head = line[:STAMP_WITHIN_CHARACTERS]
    if ":" not in head and "[" not in head:
        return None
    if found := ISO.search(head):
        year, month, day, hour, minute, second = found.groups()
        return _stamp(int(year), int(month), int(day), hour, minute, second, found.group())
    if found := GLOG.search(head):
        _, date, hour, minute, second = found.groups()
        return _stamp(0, int(date[:-2]), int(date[-2:]), hour, minute, second, f"{hour}:{minute}:{second[:6]}")
    if found := SYSLOG.search(head):
        name, day, hour, minute, second = found.groups()
        return _stamp(0, MONTHS.get(name.lower(), 0), int(day), hour, minute, second, found.group().lstrip("["))
    if found := US.search(head):
        month, day, year, hour, minute, second = found.groups()
        return _stamp(int(year), int(month), int(day), hour, minute, second, found.group())
    if found := UPTIME.search(head):
        return Stamp(float(found.group(1)), uptime=True, text=f"{found.group(1)} s after start")
    return None


def _stamp(year: int, month: int, day: int, hour: str, minute: str, second: str, text: str) -> Stamp | None:
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    clock = int(hour) * 3600 + int(minute) * 60 + float(second.replace(",", "."))
    return Stamp((DAYS_BEFORE[month - 1] + day - 1) * DAY_SECONDS + clock, year, text=text[:40])


def level_of(line: str) -> str:
    """The level that a logger put before its words, in lower case, '' where there is none."""
    head = line[:LEVEL_WITHIN_CHARACTERS]
    if found := GLOG.search(head):
        return GLOG_LEVELS[found.group(1)]
    if found := LEVEL.search(head):
        word = found.group(1).lower()
        return "warning" if word == "warn" else word
    return ""


def _named_within(line: str, known: Speaker) -> Speaker:
    """What the words themselves say of the speaker. The rank in `[PG ID 2 PG GUID 5 Rank 1]` counts within its process
    group: a rank that is known from before the line is the better one."""
    if found := NCCL.match(line) or NCCL_SHORT.match(line):
        return Speaker(node=found.group(1), local=int(found.group(2)))
    if found := TASK.match(line):
        return Speaker(rank=int(found.group(2)), node=found.group(1))
    speaker = Speaker()
    if "ank" in line and (found := WITHIN_RANK.search(line)) and (found.group(1) is None or known.rank is None):
        speaker = Speaker(rank=int(next(group for group in found.groups() if group is not None)))
    if "local_rank" in line and (found := LOCAL_WORDS.search(line)):
        speaker = replace(speaker, local=int(found.group(1)))
    if "error" in line and (found := NODE_WORDS.search(line)):
        speaker = replace(speaker, node=next(group for group in found.groups() if group is not None))
    return speaker


def _from_json(line: str) -> tuple[str, Speaker, Stamp | None]:
    try:
        tree = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return line, Speaker(), None
    if not isinstance(tree, Mapping):
        return line, Speaker(), None
    words = next((tree[key] for key in JSON_WORDS if isinstance(tree.get(key), str)), None)
    if words is None:
        return line, Speaker(), None
    rank = tree.get("rank")
    node = next((tree[key] for key in JSON_NODES if isinstance(tree.get(key), str)), "")
    at = next((tree[key] for key in JSON_TIMES if isinstance(tree.get(key), str)), "")
    level = next((tree[key] for key in ("level", "levelname", "severity") if isinstance(tree.get(key), str)), "")
    speaker = Speaker(rank=rank if isinstance(rank, int) and 0 <= rank < 10**6 else None, node=node[:100])
    text = words.rstrip("\n")
    return (f"{level.upper()} {text}" if level.lower() in ("debug", "info", "warning") else text), speaker, stamp_of(at)


FILE_RANK = re.compile(r"(?:^|[._-])(?:global_?)?(?:rank|task|proc)[_.-]?(\d{1,6})(?=$|[._-])", re.IGNORECASE)
FILE_NODE = re.compile(r"^(?:.*[._-])?((?:node|host|worker|gpu-?node|pod)[_.-]?\d{1,6})(?=$|[._-])", re.IGNORECASE)
FILE_KERNEL = re.compile(r"^(?:dmesg|kern(?:el)?|kmsg|syslog|messages|journal)[._-]([\w-]+?)(?:\.(?:log|txt|out|gz))*$")
FILE_SLURM = re.compile(r"^slurm-\d+(?:_\d+)?(?:[._-]([A-Za-z][\w-]*?))?(?:[._-](\d{1,6}))?\.(?:out|err|log)$")
ATTEMPT = re.compile(r"^attempt_(\d{1,4})$")


def speaker_of_file(name: str) -> Speaker:
    """What a file's path tells: torchrun's `attempt_0/3/stderr.log`, `rank_3.log`, `node-7.log`, `slurm-9-n4-2.out`."""
    path = PurePosixPath(name.replace("\\", "/"))
    parts = path.parts
    for at, part in enumerate(parts):
        found = ATTEMPT.match(part)
        if found is not None:
            local = parts[at + 1] if at + 2 < len(parts) else ""
            known = Speaker(local=int(local) if local.isdigit() else None, attempt=int(found.group(1)) + 1)
            return known.over(_from_names(parts[:at]))
    return _from_names(parts)


def _from_names(parts: tuple[str, ...]) -> Speaker:
    known = Speaker()
    for part in reversed(parts[-4:]):
        if found := FILE_SLURM.match(part):
            node, task = found.groups()
            # slurm-123_4.out is task 4 of a job array, not rank 4
            known = known.over(Speaker(rank=int(task) if task and node else None, node=node or ""))
            continue
        if found := FILE_RANK.search(part):
            known = known.over(Speaker(rank=int(found.group(1))))
        if (found := FILE_NODE.match(part)) or (found := FILE_KERNEL.match(part)):
            known = known.over(Speaker(node=found.group(1)))
    return known
