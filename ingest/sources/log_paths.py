"""Whose output a log file holds, told from its path: torchrun's --log-dir trees and Slurm's patterns."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import NamedTuple

_TORCHRUN = re.compile(r"^(?P<run>.+)/attempt_(?P<attempt>\d{1,9})/(?P<local>\d{1,6})/(?P<stream>stdout|stderr)\.log$")
_RANDOM = re.compile(r"_[a-z0-9_]{8}$")  # tempfile's, which torchrun puts behind the run's id
_LABEL = re.compile(r"^ *(\d{1,6}): ?(.*)$", re.DOTALL)
_SLURM = {
    "%j": ("job", r"[0-9]+(?:_[0-9]+)?"), "%J": ("job", r"[0-9.]+"), "%A": ("job", r"[0-9]+"),
    "%a": ("array", r"[0-9]+"),
    "%t": ("rank", r"[0-9]+"), "%n": ("node_number", r"[0-9]+"), "%N": ("node", r"[A-Za-z0-9.-]+"),
    "%x": ("name", r"[^/]+?"), "%s": ("step", r"[0-9]+"), "%u": ("user", r"[^/]+?"),
}  # fmt: skip
_FIELD = re.compile(r"%(\d{0,2})([jJAatnNxsu%])")


class LogPlace(NamedTuple):
    """What a path tells. `attempt` counts torchrun's restarts from 0; None and empty: it does not say."""

    stream: str = "stdout"
    run: str = ""  # torchrun's run id, or Slurm's job number
    attempt: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    node: str = ""


def torchrun_place(path: str) -> LogPlace | None:
    """Of DIR/<run id>_<random>/attempt_<n>/<local rank>/<stdout|stderr>.log; None for other paths."""
    found = _TORCHRUN.match(path)
    if found is None:
        return None
    run = _RANDOM.sub("", PurePosixPath(found["run"]).name)
    return LogPlace(found["stream"], run, int(found["attempt"]), None, int(found["local"]))


def has_slurm_fields(pattern: str) -> bool:
    """Whether a path is one of Slurm's file name patterns (`%j`, `%t` …)."""
    return any(field[2] != "%" for field in _FIELD.finditer(pattern))


def slurm_glob(pattern: str) -> str:
    """The pattern as a glob that finds its files."""
    return _FIELD.sub(lambda field: "%" if field[2] == "%" else "*", pattern)


def slurm_place(pattern: str, path: str) -> LogPlace | None:
    """What `path` says that was written by this pattern; None where it was not."""
    seen: set[str] = set()
    parts, at = ["^"], 0
    for field in _FIELD.finditer(pattern):
        parts.append(re.escape(pattern[at : field.start()]))
        at = field.end()
        if field[2] == "%":
            parts.append("%")
            continue
        name, shape = _SLURM[f"%{field[2]}"]
        parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{shape})")
        seen.add(name)
    found = re.match("".join([*parts, re.escape(pattern[at:]), "$"]), path)
    if found is None:
        return None
    told = found.groupdict()
    stream = "stderr" if PurePosixPath(path).suffix in (".err", ".stderr") else "stdout"
    rank = int(told["rank"]) if told.get("rank") else None
    return LogPlace(stream, told.get("job") or "", None, rank, None, told.get("node") or "")


def labelled(text: str) -> tuple[int | None, str]:
    """(task, line) of a line that `srun --label` wrote; (None, line) of any other."""
    found = _LABEL.match(text)
    return (int(found[1]), found[2]) if found is not None else (None, text)
