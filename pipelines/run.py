"""`transom run`: one job on this machine, with its checkpoint engines and launchers, until it is over."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec

from ingest.clock import Clock
from pipelines.children import ENGINE_STOP_SECONDS_MAX, Child, Children
from pipelines.errors import StatedError
from pipelines.launcher_key import make_token
from pipelines.open_bus import own_command
from pipelines.own_process import step_back
from pipelines.places import Places, checked_name
from pipelines.settings import Settings
from recovery.backend import Observation, Unavailable
from recovery.backends.local import LocalBackend, start_first_attempt
from recovery.launcher.job_files import JobFiles
from recovery.launcher.protocol import JobEnd, JobSpec
from recovery.lease import is_held

READY_SECONDS_MAX = 180.0  # a cold import of torch on a busy machine takes tens of seconds
LOOK_SECONDS = 0.25
RECOVERY_AWAY_SECONDS_MAX = 60.0  # while it is started again after a fall


class JobRefused(StatedError):
    """The job cannot be started as asked."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of one job are run; jobs/<job>/run.json, read by each launcher."""

    spares: int = 0
    preload: tuple[str, ...] = ()
    pin_cpus: bool = False
    allow_inject: bool = False
    checkpoints: bool = True
    show_output: bool = True
    memory_bytes_max: int = 8 * 2**30
    keep_complete: int = 3


def node_names(spec: JobSpec, options: RunOptions) -> tuple[str, ...]:
    """The virtual nodes of a job on this machine, spares last."""
    return tuple(f"node{index}" for index in range(spec.nodes + options.spares))


def nodes_of(places: Places, spec: JobSpec, options: RunOptions) -> tuple[str, ...]:
    """The nodes of a job as far as they are known here: a scheduler's nodes are those whose launchers have been."""
    if spec.backend == "local":
        return node_names(spec, options)
    return tuple(JobFiles(places.jobs, spec.job).nodes())


def register_job(places: Places, spec: JobSpec, options: RunOptions, *, token: bool = True) -> None:
    """Write what is to be run, and (`token`) for launchers on other machines the token that they are asked with.

    Raises JobRefused where a job of that name has already run: terminal stays terminal.
    """
    folder = places.job(checked_name("job", spec.job))
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:
        raise JobRefused(f"there is already a job {spec.job!r} in {places.state}; choose another --job name") from error
    (folder / "nodes").mkdir(mode=0o700)
    places.checkpoints(spec.job).mkdir(mode=0o700, parents=True, exist_ok=True)
    if token and spec.backend != "local":
        make_token(places.jobs, spec.job)
    (folder / "run.json").write_bytes(msgspec.json.encode(options))
    (folder / "job.json").write_bytes(msgspec.json.encode(spec))


def read_job(places: Places, job: str) -> tuple[JobSpec, RunOptions]:
    """What `register_job` wrote. Raises JobRefused where there is no such job."""
    folder = places.job(job)
    try:
        return (
            msgspec.json.decode((folder / "job.json").read_bytes(), type=JobSpec),
            msgspec.json.decode((folder / "run.json").read_bytes(), type=RunOptions),
        )
    except (OSError, msgspec.DecodeError) as error:
        raise JobRefused(f"there is no job {job!r} in {places.state}; `transom run` makes one") from error


class JobRun:
    """The front of one job: starts its processes, its first attempt, and stays until the job is over."""

    def __init__(
        self,
        settings: Settings,
        spec: JobSpec,
        options: RunOptions,
        clock: Clock,
        random: Random,
        arguments: Sequence[str],
    ) -> None:
        self._arguments = list(arguments)  # that give our processes the same settings
        self._spec = spec
        self._options = options
        self._clock = clock
        self._places = Places.of(settings)
        self._recovered_at = float("-inf")  # when recovery was seen last
        self._backend = LocalBackend(self._places.jobs, clock, random)

    def run(self, stop: threading.Event, tell: Callable[[str], None], environ: dict[str, str]) -> int:
        """Run the job; returns the exit code: 0 finished, 1 failed or stopped. `tell` takes lines for a person."""
        register_job(self._places, self._spec, self._options)
        with Children(self._places.logs, self._clock) as children:
            launchers = self._start_processes(children, environ)
            step_back()  # only now: ranks inherit the priority of the launchers
            self._await_launchers(children, stop)
            if stop.is_set():
                return self._stopped(tell)
            token = secrets.token_hex(8)
            self._is_recovered()  # so that one that falls before our first look is waited for
            start_first_attempt(self._backend, self._spec.job, token, launchers_seconds=READY_SECONDS_MAX)
            tell(f"job {self._spec.job}: attempt 1 with {self._spec.world_size} ranks has started")
            return self._stay(children, launchers, stop, tell)

    def _start_processes(self, children: Children, environ: dict[str, str]) -> list[Child]:
        job, given = self._spec.job, self._arguments
        names = node_names(self._spec, self._options)
        if self._options.checkpoints:
            for node in names:
                command = own_command("ckpt", "serve", "--job", job, "--node", node, *given)
                children.start(f"{job}-{node}-ckpt", command, environ=environ, stop_seconds_max=ENGINE_STOP_SECONDS_MAX)
        return [
            children.start(
                f"{job}-{node}",
                own_command("launcher", "--job", job, "--node", node, *given),
                environ=environ,
                show=self._options.show_output,
            )
            for node in names
        ]

    def _await_launchers(self, children: Children, stop: threading.Event) -> None:
        deadline = self._clock.monotonic() + READY_SECONDS_MAX
        files = [self._places.node_file(self._spec.job, node) for node in node_names(self._spec, self._options)]
        sockets = [self._places.socket(self._spec.job, node, "ckpt") for node in node_names(self._spec, self._options)]
        wanted = files + (sockets if self._options.checkpoints else [])
        while not stop.is_set() and not all(path.exists() for path in wanted):
            ended = [child.name for child in children.ended()]
            if ended:
                raise JobRefused(f"{ended[0]} ended before the job began; see {self._places.logs / ended[0]}.log")
            if self._clock.monotonic() > deadline:
                missing = next(path for path in wanted if not path.exists())
                raise JobRefused(
                    f"not ready after {READY_SECONDS_MAX:.0f} s: {missing} is missing; see {self._places.logs}"
                )
            self._clock.sleep(0.05)

    def _stay(
        self, children: Children, launchers: list[Child], stop: threading.Event, tell: Callable[[str], None]
    ) -> int:
        job = self._spec.job
        while not stop.wait(LOOK_SECONDS):
            recovered = self._is_recovered()
            children.revive(tell, but=launchers)  # engines: their ranks hand over again what they hold
            end = self._end()
            if end is not None:
                tell(f"job {job}: {end.outcome}; {end.reason}")
                return 0 if end.outcome == "finished" else 1
            if all(child.process.poll() is not None for child in launchers):
                tell(f"job {job}: all launchers are gone")
                return 1
            try:
                seen = self._backend.observe(job)
            except Unavailable:
                continue
            self._conclude(seen, recovered=recovered)
        return self._stopped(tell)

    def _stopped(self, tell: Callable[[str], None]) -> int:
        self._backend.finish(self._spec.job, "stopped", "stopped by a signal")
        tell(f"job {self._spec.job}: stopped by a signal")
        return 1

    def _conclude(self, seen: Observation, *, recovered: bool) -> None:
        """End the job where nobody else will: all ranks finished, or one failed and no recovery is there."""
        if seen.phase == "finished":
            self._backend.finish(seen.job, "finished", "every rank ended with exit code 0")
        elif seen.phase in ("failed", "stopped") and not recovered:
            bad = next((rank for rank in seen.ranks if rank.exit_code or rank.signal), None)
            why = "the ranks are gone" if bad is None else _ending(bad.rank, bad.exit_code, bad.signal)
            self._backend.finish(seen.job, "failed", f"{why}, and no `transom recover` runs here to restart the job")

    def _is_recovered(self) -> bool:
        """Whether somebody recovers jobs here, or did until a moment ago: one that fell is being started again."""
        now = self._clock.monotonic()
        if is_held(self._places.recovery_lease):
            self._recovered_at = now
        return now - self._recovered_at < RECOVERY_AWAY_SECONDS_MAX

    def _end(self) -> JobEnd | None:
        path = self._places.job(self._spec.job) / "outcome.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=JobEnd)
        except FileNotFoundError:
            return None


def _ending(rank: int, exit_code: int | None, signal: int | None) -> str:
    return f"rank {rank} was killed by signal {signal}" if signal else f"rank {rank} ended with exit code {exit_code}"


def default_job_name(script: str, clock: Clock) -> str:
    """The script's name and the second it was started in."""
    stem = "".join(letter if letter.isalnum() else "-" for letter in Path(script).stem)[:24].strip("-") or "job"
    return f"{stem}-{int(clock.now()):x}-{os.getpid():x}"
