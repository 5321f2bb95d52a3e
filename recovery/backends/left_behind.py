"""Run on a node whose launcher is silent: ends with 0 where it is dead and nothing of it lives. Kills nobody."""

from __future__ import annotations

import sys
from pathlib import Path

from recovery.launcher.job_files import BrokenJobFile, JobFiles
from recovery.launcher.procfs import is_alive

from .local import ranks_of

NOTHING, SOMETHING, UNKNOWN = 0, 3, 4


def left_behind(jobs_folder: Path, job: str, node: str) -> int:
    """What /proc of this machine says of the launcher whose file is there."""
    try:
        file = JobFiles(jobs_folder, job).nodes().get(node)
    except (ValueError, BrokenJobFile):
        return UNKNOWN
    if file is None:
        return UNKNOWN
    zygote = file.zygote
    lives = is_alive(file.pid, file.start_time) or (zygote is not None and is_alive(zygote.pid, zygote.start_time))
    return SOMETHING if lives or ranks_of(file) else NOTHING


if __name__ == "__main__":
    sys.exit(left_behind(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
