"""A small disk for checkpoints that can be filled without harm: a tmpfs of our own, which needs root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import TracebackType

SIZE_MEGABYTES = 768  # three checkpoints of the largest size, and one under way


class SmallDisk:
    """Mounts a tmpfs on a folder for as long as it is entered. `reason` says why there is none, or is empty.

    A limit on the size of files (RLIMIT_FSIZE) is no substitute: the kernel then says "File too large", and that is
    not what a full disk says.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.reason = "" if os.geteuid() == 0 else "a full disk needs a tmpfs of its own, which only root may mount"
        self._mounted = False

    def __enter__(self) -> SmallDisk:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.reason:
            command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MEGABYTES}m,mode=700", "tmpfs", str(self._folder)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                self.reason = f"a full disk needs a tmpfs, and mount cannot be run ({error.strerror})"
                return self
            self._mounted = done.returncode == 0
            if not self._mounted:
                self.reason = f"a full disk needs a tmpfs, and it cannot be mounted: {done.stderr.strip()}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._mounted:
            subprocess.run(["umount", "--lazy", str(self._folder)], capture_output=True, check=False)
