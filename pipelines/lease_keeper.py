"""Keeps a scheduler's lease for our controller: takes it when it is free, renews it, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from recovery.backend import BackendError
from recovery.lease import ControllerLease

KEEP_SECONDS = 3.0  # a third of what the shortest lease grants, less what its holder leaves for others' clocks
END_SECONDS_MAX = 15.0  # a request that is out may take so long


class LeaseKeeper:
    """From `start` to `close`. What changes is told once; whether we may act is asked of the lease itself."""

    def __init__(self, lease: ControllerLease, tell: Callable[[str], object]) -> None:
        self._lease = lease
        self._tell = tell
        self._told = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def start(self) -> None:
        """The first try is made before this returns, so that who is alone acts at once."""
        self._try()
        self._thread.start()

    def close(self) -> None:
        """Others may have it at once."""
        self._stop.set()
        self._thread.join(END_SECONDS_MAX)
        if not self._thread.is_alive():
            self._lease.release()

    def _keep(self) -> None:
        while not self._stop.wait(KEEP_SECONDS):
            self._try()

    def _try(self) -> None:
        try:
            text = "has the lease" if self._lease.take() else "waits: another controller has the lease"
        except BackendError as error:
            text = f"cannot keep its lease: {error}"
        if text != self._told:
            self._told = text
            self._tell(f"recover: {text}")
