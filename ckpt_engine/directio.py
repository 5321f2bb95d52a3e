"""Whether a folder takes writes that go past the page cache (O_DIRECT): found out by writing, not by a name."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import threading
from pathlib import Path

ALIGNMENT_BYTES = 4096  # of memory, file offset and length; a device that wants more refuses, and the cache is used
REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY})
FOLDERS_MAX = 256


@functools.lru_cache(maxsize=FOLDERS_MAX)
def takes_direct(folder: Path) -> bool:
    """Write, sync and close a file of one page in `folder`; asked once for each folder.

    Some file systems take the flag and refuse the write, some only the close. Raises OSError where an ordinary
    write would fail too; that answer is not kept.
    """
    path = folder / f".direct-{os.getpid()}-{threading.get_native_id()}.tmp"
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT
    try:
        try:
            descriptor = os.open(path, flags, 0o600)
        finally:
            path.unlink(missing_ok=True)  # some make the file before they refuse the flag
        try:
            with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
                written = os.write(descriptor, page)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in REFUSALS:
            return False
        raise
    return written == ALIGNMENT_BYTES
