"""Background threads give way to training: for the processor by their niceness, for the disk by their I/O class."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from typing import Literal

IoClass = Literal["none", "best-effort", "idle"]

NICENESS = 19  # the lowest: on busy cores a tenth of one would still be felt in every step
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "loongarch64": 30, "ppc64le": 273, "s390x": 282}
_WHO_PROCESS = 1  # which for the kernel is a thread
_CLASS_SHIFT = 13
_PRIORITIES = {"best-effort": 2 << _CLASS_SHIFT | 7, "idle": 3 << _CLASS_SHIFT}


def give_way(io_class: IoClass = "best-effort") -> None:
    """Lower the calling thread alone. What the kernel does not allow is left as it is."""
    thread = threading.get_native_id()  # on Linux the niceness is the thread's own
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
    if io_class != "none":
        _set_io_priority(_PRIORITIES[io_class])


def _set_io_priority(priority: int) -> bool:
    """The library of C has no name for this call, so it goes by its number, where we know that."""
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is None or sys.maxsize < 2**32:
        return False
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return False
    syscall.restype = ctypes.c_long
    arguments = (ctypes.c_long(number), ctypes.c_int(_WHO_PROCESS), ctypes.c_int(0), ctypes.c_int(priority))
    return bool(syscall(*arguments) == 0)
