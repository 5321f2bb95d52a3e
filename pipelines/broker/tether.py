"""Runs a command that ends with the process that started it: `python -m pipelines.broker.tether PARENT COMMAND…`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent = int(arguments[0])
    # Linux only; elsewhere the command is merely not tethered. The process id stays: the command replaces us.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            return
    os.execvp(arguments[1], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
