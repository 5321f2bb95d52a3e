"""A training process as Transom sees it: `Run`, one per process, and its logging handler.

Outside a launcher, and in every child of a rank, a Run takes the same calls and does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, get_args

from .clock import Clock
from .devices import Gpu, gpu_of_rank, nvidia_gpus
from .events import ErrorRecord, LogLine, Phase
from .flight_recorder import Flight
from .identity import RankIdentity
from .injection import DEFAULT_PCI_ADDRESS, Injector
from .process_hooks import ProcessHooks
from .rank_socket import Hello, Inject, RankSocket
from .reporter import LAST_WORDS_SECONDS, Reporter
from .step_rows import FIRST_STEP, Sample, StepRows

if TYPE_CHECKING:
    from .bus_link import BusLink

STEP_MAX = 2**53  # what every JSON reader can hold
ROLE_CHARS_MAX = 120
BUS_WORDS_SECONDS = 10.0  # at most, for the last words to a bus that is slow: further away than a launcher
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"

logger = logging.getLogger("transom")


class Run:
    """The handle that `transom.init()` returns. No method raises because of telemetry, and none waits."""

    def __init__(self, identity: RankIdentity | None, clock: Clock) -> None:
        self.clock = clock
        self.injector = Injector(clock, allowed=False)
        self._phase: Phase = "init"
        self._phases_of_user: list[Phase] = []
        self._finished = False
        self._complained: set[str] = set()
        self._reporter: Reporter | None = None
        self._identity = identity
        self._link: BusLink | None = None
        if identity is None:
            self.rows = StepRows(clock)
            return
        resumed = identity.resume_step
        self.rows = StepRows(clock, first_step=FIRST_STEP if resumed is None else resumed + 1)
        self._role = ""
        self._gpu = gpu_of_rank(identity.local_rank, identity.visible_devices, nvidia_gpus())
        self.injector = Injector(
            clock,
            allowed=identity.allow_inject,
            pci_address=self._gpu.pci_address.rpartition(".")[0] if self._gpu else DEFAULT_PCI_ADDRESS,
            on_fire=self._fault_fires,
        )
        hello = _hello(identity, self._gpu)
        if identity.link is not None:
            self._link = identity.link(hello)
        self._reporter = Reporter(
            identity, self.rows, self._link or RankSocket(identity.socket, hello, clock), lambda: self.current_phase,
            clock, on_inject=self.injector.request,
            last_words_seconds=LAST_WORDS_SECONDS if self._link is None else BUS_WORDS_SECONDS,
        )  # fmt: skip

    @property
    def active(self) -> bool:
        """Whether anybody is told: there is a launcher, and this is the rank, not a child of it."""
        return self._reporter is not None

    @property
    def reports(self) -> bool:
        """Whether this is, or was before a fork, the run of a rank with a launcher."""
        return self._identity is not None

    @property
    def resume_step(self) -> int | None:
        """The step of the checkpoint that all ranks are to load; None: begin from scratch."""
        return None if self._identity is None else self._identity.resume_step

    @property
    def current_phase(self) -> Phase:
        """Where the rank is: what the user says, else what our own hooks see."""
        if self._finished:
            return "finished"
        return self._phases_of_user[-1] if self._phases_of_user else self._phase

    @property
    def current_step(self) -> int:
        """The step the rank is in; -1 before the first."""
        return self.rows.step

    def log(self, *, step: int | None = None, **scalars: Any) -> None:
        """Report numbers of a step: Python numbers, NumPy scalars, 0-dim tensors (no device is waited for).

        A name without a dot becomes `train.<name>`. Without `step` they belong to the step in progress.
        """
        if self._reporter is None:
            return
        samples: dict[str, Sample] = {}
        for name, value in scalars.items():
            sample = self._sample(name, value)
            if sample is not None:
                samples[name if "." in name else f"train.{name}"] = sample
        self.rows.log(self._whole(step), samples)

    def step(self, step: int) -> None:
        """Say which step is beginning. Not needed where `log` is given the step."""
        number = self._whole(step)
        if self._reporter is not None and number is not None:
            self.rows.declare(number)

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Say what the rank is doing inside the block: `with run.phase("eval"):`."""
        if name not in get_args(Phase):
            self._complain("phase", f"the phase {name!r} is not one of {', '.join(get_args(Phase))}")
            name = self.current_phase
        self._phases_of_user.append(name)
        try:
            yield
        finally:
            self._phases_of_user.pop()

    def log_line(self, line: LogLine) -> None:
        """Report one log record."""
        if self._reporter is not None:
            self._reporter.add_line(line)

    def finish(self) -> None:
        """Report the phase `finished` and what is left, at most half a second (a slow bus: ten), and then nothing."""
        self._finished = True
        if self._link is not None:
            self._link.finished = True
        self.stop()

    def see_error(self, error: ErrorRecord) -> None:
        """This exception ends the process: a launcher of ours would find it in the output."""
        if self._link is not None:
            self._link.error = error

    def stop(self) -> None:
        """Report what is left, for at most half a second; nothing is reported afterwards."""
        reporter = self._reporter
        if reporter is not None:
            self.rows.close()
            reporter.stop()
            self._reporter = None

    def see_phase(self, phase: Phase) -> None:
        """What our own hooks see; what the user says goes before it."""
        self._phase = phase

    def see_gpu(self, gpu: Gpu) -> None:
        """The GPU that this rank really uses, once torch has opened it."""
        if self._reporter is not None and self._identity is not None and gpu != self._gpu:
            self._gpu = gpu
            self._reporter.introduce(_hello(self._identity, gpu, self._role))

    def take_role(self, role: str) -> None:
        """Say what work this rank does: ranks of equal words are compared with each other, with no others."""
        if self._reporter is not None and self._identity is not None and role != self._role:
            self._role = str(role)[:ROLE_CHARS_MAX]
            self._reporter.introduce(_hello(self._identity, self._gpu, self._role))

    def see_flight_recorder(self, flight: Callable[[], Flight | None]) -> None:
        """torch records this rank's collectives: how far they got can be asked for."""
        if self._reporter is not None:
            self._reporter.watch_flight(flight)

    def start(self) -> None:
        """Start to report."""
        if self._reporter is not None:
            self._reporter.start()

    def become_inert(self) -> None:
        """This is a forked child of the rank: the socket, the thread and the locks are the parent's."""
        reporter, self._reporter = self._reporter, None
        self.rows = StepRows(self.clock)
        self.injector = Injector(self.clock, allowed=False)
        if reporter is not None:
            reporter.abandon()

    def _fault_fires(self, request: Inject, step: int) -> None:
        if self._reporter is None:
            return
        logger.warning("transom: injecting %r in step %d, as `transom inject` asked", request.fault, step)
        parameters = {
            "step": float(step), "factor": request.factor, "seconds": request.seconds,
            "delay_seconds": request.delay_seconds, "megabytes_per_second": request.megabytes_per_second,
            "megabytes_max": request.megabytes_max,
        }  # fmt: skip
        self._reporter.add_fault(request.fault, parameters)
        if request.fault == "xid":
            self.stop()  # the process dies next; the label would die with it
        elif request.fault == "drop_telemetry":
            self._reporter.drop_all(request.seconds)
        elif request.fault == "delay_telemetry":
            self._reporter.hold_back(request.delay_seconds, request.seconds)

    def _sample(self, name: str, value: Any) -> Sample | None:
        try:
            if getattr(value, "is_cuda", False):
                from .torch_timers import device_number  # torch is there: this is one of its tensors

                return device_number(value)
            return float(value.detach() if hasattr(value, "detach") else value)
        except (
            TypeError,
            ValueError,
            OverflowError,
            RuntimeError,
        ) as error:  # RuntimeError: torch's own complaints
            self._complain(name, f"{name} is not reported, it is not one number: {error}")
            return None

    def _whole(self, step: Any) -> int | None:
        try:
            number = None if step is None else int(step)
            if number is not None and abs(number) > STEP_MAX:
                raise ValueError(f"it is beyond {STEP_MAX}")
            return number
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            self._complain("step", f"the step given is not a whole number and is ignored: {error}")
            return None

    def _complain(self, subject: str, text: str) -> None:
        if subject not in self._complained and len(self._complained) < 100:
            self._complained.add(subject)
            logger.warning("transom: %s", text)


class LoggingHandler(logging.Handler):
    """Reports log records of the rank as they are logged, whole, each with its own time.

    For loggers that do not write to stdout or stderr; what is printed there, the launcher sees anyway.
    """

    def __init__(self, level: int | str = logging.NOTSET) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter(LOG_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        run = _process.run
        if run is None or not run.active:
            return
        try:
            run.log_line(LogLine(at=record.created, stream="logging", text=self.format(record)))
        except Exception:  # noqa: BLE001 — a bad format string must not raise into whoever logs
            self.handleError(record)


class _Process:
    """The one Run of this process."""

    run: Run | None = None
    hooks: ProcessHooks | None = None
    pid: int = 0


_process = _Process()


def start_run(identity: RankIdentity | None, clock: Clock) -> Run:
    """The Run of this process, started at the first call; later calls return the same."""
    if _process.run is None or not is_started():
        run = Run(identity, clock)
        _process.run, _process.pid = run, os.getpid()
        if identity is not None:
            _process.hooks = ProcessHooks(run)
            _process.hooks.install()
            run.start()
    return _process.run


def is_started() -> bool:
    """Whether this process has its Run. One without a launcher is not inherited: a zygote forks ranks."""
    run = _process.run
    return run is not None and (run.reports or _process.pid == os.getpid())


def hook_exceptions_again() -> None:
    """Be the first exception hook again: torch wraps ours in init_process_group."""
    if _process.hooks is not None:
        _process.hooks.hook_exceptions()


def _hello(identity: RankIdentity, gpu: Gpu | None, role: str = "") -> Hello:
    return Hello(
        job=identity.job,
        attempt=identity.attempt,
        rank=identity.rank,
        token=identity.token,
        pid=identity.pid,
        gpu_uuid=gpu.uuid if gpu else None,
        pci_address=gpu.pci_address if gpu else None,
        scheduler_ids=dict(identity.scheduler_ids),
        role=role,
    )
