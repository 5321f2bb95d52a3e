"""The same job as torchrun runs it: one agent on this machine, restarts without end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from ingest.clock import Clock
from pipelines.bench_job.step_log import StepLog
from pipelines.bench_job.under_transom import SCRIPT, BenchFailed
from pipelines.children import tail
from recovery.launcher.procfs import is_alive, kill_exactly, stat_of

RESTARTS_MAX = 1_000
# Else all attempts meet in one store, where a rank may read an address of the attempt before, and wait for it half an
# hour: seen with torch 2.15. With it each attempt has a store of its own.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
POLL_SECONDS = 0.02  # times come from the step log, never from when we looked
END_SECONDS_MAX = 20.0


class Torchrun:
    """One run of torchrun. Whatever it leaves behind is ended with the context."""

    def __init__(self, folder: Path, ranks: int, arguments: Sequence[str], clock: Clock) -> None:
        self._clock = clock
        self._folder = folder
        self.log = StepLog(folder, ranks)
        self._seen: dict[int, int] = {}  # ranks that it ever had: process id and start time
        self._output = folder / "torchrun.log"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1",
            "--nproc-per-node", str(ranks), "--max-restarts", str(RESTARTS_MAX), str(SCRIPT), *arguments,
        ]  # fmt: skip
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", OWN_STORE: "1"}, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.read()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid, start_time in self._seen.items():
            kill_exactly(pid, start_time)

    def read(self) -> None:
        """Take in what the ranks have written, and remember their processes."""
        for line in self.log.read():
            if line.kind == "began" and line.pid not in self._seen:
                stat = stat_of(line.pid)
                if stat is not None:
                    self._seen[line.pid] = stat.start_time

    def living_ranks(self) -> int:
        """Ranks of the newest attempt whose processes live."""
        pids = self.log.pids(self.log.attempt).values()
        return sum(pid in self._seen and is_alive(pid, self._seen[pid]) for pid in pids)

    def stopped_ranks(self) -> list[int]:
        """Process ids of ranks of the newest attempt that are stopped (SIGSTOP)."""
        pids = self.log.pids(self.log.attempt).values()
        return [pid for pid in pids if (stat := stat_of(pid)) is not None and stat.state in "Tt"]

    def wait_for(self, condition: Callable[[], object], what: str, seconds_max: float) -> None:
        """Poll until it holds. Raises BenchFailed at the end of the time, or of torchrun."""
        give_up_at = self._clock.monotonic() + seconds_max
        while True:
            self.read()
            if condition():
                return
            if self.process.poll() is not None:
                raise BenchFailed(f"torchrun ended while {what} was awaited: {tail(self._output)[-500:]}")
            if self._clock.monotonic() > give_up_at:
                raise BenchFailed(f"{what}: not within {seconds_max:.0f} s under torchrun")
            self._clock.sleep(POLL_SECONDS)
