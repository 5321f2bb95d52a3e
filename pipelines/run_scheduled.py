"""`transom run --backend …`: registers a job, has its scheduler take nodes that each run a launcher, and attends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random

from ingest.clock import Clock
from pipelines.attend import Attendance
from pipelines.backends import BackendRefused, make_backend, submit
from pipelines.open_bus import own_command
from pipelines.places import Places
from pipelines.run import RunOptions, register_job
from pipelines.settings import DEFAULT_FILE, Settings
from recovery.backend import Rejected
from recovery.backends.scheduled import ScheduledBackend
from recovery.launcher.protocol import JobSpec


def _whole(arguments: Sequence[str], places: Places) -> list[str]:
    """The flags that give launchers the same settings, wherever they are started."""
    whole = list(arguments)
    if "--config" not in whole and DEFAULT_FILE.is_file():
        whole += ["--config", str(DEFAULT_FILE.absolute())]
    if "--state-dir" not in whole:
        whole += ["--state-dir", str(places.state)]
    return whole


class ScheduledRun:
    """The front of one job whose nodes a scheduler gives. It may leave: nothing of the job hangs on it."""

    def __init__(
        self,
        settings: Settings,
        spec: JobSpec,
        options: RunOptions,
        clock: Clock,
        random: Random,
        arguments: Sequence[str],
    ) -> None:
        self._spec = spec
        self._options = options
        self._clock = clock
        self._places = Places.of(settings)
        self._arguments = _whole(arguments, self._places)
        self._backend = make_backend(spec.backend, settings, self._places, clock, random)

    def run(self, stop: threading.Event, tell: Callable[[str], None], *, detach: bool = False) -> int:
        """Submit the job and (unless `detach`) attend it. The exit code is the attendance's."""
        job = self._spec.job
        register_job(self._places, self._spec, self._options)
        nodes = self._spec.nodes + self._options.spares
        submit(self._backend, job, nodes=nodes, command=self._launcher())
        tell(f"job {job}: {nodes} nodes are asked of {self._spec.backend}")
        if detach:
            tell(f"job {job}: `transom attend --job {job}` starts it when they are there")
            return 0
        return Attendance(self._backend, job, self._clock).run(stop, tell)

    def script(self) -> str:
        """Register the job, and say what would be submitted: whoever submits it gets the same job.

        Raises BackendRefused where its scheduler is not asked by a script.
        """
        if not isinstance(self._backend, ScheduledBackend):
            raise BackendRefused(f"the backend {self._backend.name} has no script to print")
        register_job(self._places, self._spec, self._options)
        nodes = self._spec.nodes + self._options.spares
        try:
            return self._backend.script(self._spec.job, nodes=nodes, command=self._launcher())
        except Rejected as error:
            raise BackendRefused(str(error)) from error

    def _launcher(self) -> list[str]:
        """What runs once on each node."""
        engine = ["--with-engine"] if self._options.checkpoints else []
        return own_command("launcher", "--job", self._spec.job, "--listen", "auto", *engine, *self._arguments)
