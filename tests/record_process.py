"""`record` in processes of its own on the embedded bus, for tests that kill it; forked, so that imports cost once.

python -m tests.record_process FOLDER: each line on standard input is a command. `start` forks a service and answers
"PID" and then, from the service, "ready"; `wait` answers with the exit code of the service.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from ingest.clock import SystemClock
from ingest.sqlite_bus import SqliteBus
from pipelines.ledger.ledger import LedgerConfig
from pipelines.record import Record, RecordConfig


def config_of(folder: Path) -> RecordConfig:
    """Everything often, so that a kill finds something to interrupt."""
    return RecordConfig(
        ledger_folder=folder / "ledger",
        socket_path=folder / "run" / "ledger.sock",
        recording_folder=folder / "recordings",
        ledger=LedgerConfig(flush_seconds=0.2, bulk_seconds=0.1),
        group_seconds=0.02,
        lag_seconds=0.3,
    )


def serve(folder: Path) -> None:
    """Record `folder`/bus.sqlite until SIGTERM; says "ready" once it serves."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    clock = SystemClock()
    record = Record(config_of(folder), SqliteBus(folder / "bus.sqlite", clock=clock), clock)

    def say() -> None:
        record.ready.wait()
        os.write(1, b"ready\n")

    threading.Thread(target=say, daemon=True).start()
    record.run(stop)


def main(folder: Path) -> None:
    """Obey the lines of standard input."""
    pid = 0
    for line in sys.stdin:
        if line.strip() == "start":
            pid = os.fork()
            if pid == 0:
                serve(folder)
                os._exit(0)
            os.write(1, b"%d\n" % pid)
        else:
            _, status = os.waitpid(pid, 0)
            os.write(1, b"%d\n" % os.waitstatus_to_exitcode(status))


class RecordProcesses:
    """The test's side: one service at a time."""

    def __init__(self, folder: Path) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.record_process", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
        )
        self.pid = 0

    def start(self) -> None:
        """Return when the service serves."""
        self._say(b"start\n")
        answers = {self._hear(), self._hear()}  # the service may be quicker than its parent
        assert b"ready" in answers
        (pid,) = answers - {b"ready"}
        self.pid = int(pid)

    def end(self, number: int) -> int:
        """Send the signal, return the exit code."""
        os.kill(self.pid, number)
        self._say(b"wait\n")
        return int(self._hear())

    def close(self) -> None:
        """No service runs any more, so neither does their parent."""
        self._parent.communicate(b"")

    def _say(self, line: bytes) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.write(line)
        self._parent.stdin.flush()

    def _hear(self) -> bytes:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline().strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
