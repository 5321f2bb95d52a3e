"""Faults that a rank does to itself when `transom inject` asks: each once, and only where allowed.

The forward hook of `transom.watch` asks `due` in every training step and does what it is told; what needs
torch (the repeated forward, tensors made NaN) is done there, what telemetry suffers is done by the reporter.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from .clock import Clock
from .rank_socket import Inject

FAULTS = (
    "slow", "slow_backward", "sleep", "slow_data", "gil_hog", "memory_hog", "nan", "nan_gradient", "scale_gradient",
    "drop_telemetry", "delay_telemetry", "raise", "xid",
)  # fmt: skip
ARMED_FAULTS_MAX = 16
FACTOR_MAX = 100.0
GRADIENT_FACTOR_MAX = 1e12
SECONDS_MAX = 3_600.0
DELAY_SECONDS_MAX = 60.0
MEGABYTES_MAX = 64_000.0
HOG_TICK_SECONDS = 0.1
DEFAULT_PCI_ADDRESS = "0000:3b:00"

_hoard: list[bytes] = []  # what memory hogs hold

logger = logging.getLogger("transom")


@dataclass(slots=True)
class Lasting:
    """A fault that goes on until `until` (monotonic). `owed`: the part of a repetition not yet done."""

    request: Inject
    until: float
    owed: float = 0.0


class Injector:
    """Keeps what was asked for until its step comes."""

    def __init__(
        self,
        clock: Clock,
        *,
        allowed: bool,
        pci_address: str = DEFAULT_PCI_ADDRESS,
        on_fire: Callable[[Inject, int], None] = lambda request, step: None,
    ) -> None:
        self._clock = clock
        self._allowed = allowed
        self._pci_address = pci_address
        self._on_fire = on_fire
        self._lock = threading.Lock()
        self._armed: list[Inject] = []
        self._lasting: dict[str, Lasting] = {}
        self._gradient_factor: float | None = None

    def request(self, body: bytes) -> None:
        """Arm a fault that the launcher asks for, or say in the log why not. Never raises."""
        if not self._allowed:
            logger.warning("transom: a fault injection was refused; set TRANSOM_ALLOW_INJECT=1 to allow it in this job")
            return
        try:
            request = msgspec.json.decode(body, type=Inject)
        except msgspec.DecodeError as error:
            logger.warning("transom: a fault injection was refused: %s", error)
            return
        problem = _problem(request)
        with self._lock:
            if problem is None and len(self._armed) >= ARMED_FAULTS_MAX:
                problem = f"{ARMED_FAULTS_MAX} faults are waiting for their step already"
            if problem is None:
                self._armed.append(request)
                return
        logger.warning("transom: a fault injection was refused: %s", problem)

    def due(self, step: int) -> Inject | None:
        """The fault whose step has come, taken out of the list; None as good as always."""
        if not self._armed:
            return None
        with self._lock:
            for index, request in enumerate(self._armed):
                if request.at_step <= step:
                    del self._armed[index]
                    break
            else:
                return None
        self._on_fire(request, step)
        self._begin(request)
        return request

    def extra_forwards(self) -> int:
        """How often to repeat the forward computation in this step; fractions add up over the steps."""
        return self._repetitions("slow", 1)

    def extra_backwards(self) -> int:
        """How many forward computations to add to the backward of this step: a backward is worth two forwards."""
        return self._repetitions("slow_backward", 2)

    @property
    def forward_sleep_seconds(self) -> float:
        """For how long to do nothing in the forward of this step."""
        return self._delay("sleep")

    @property
    def data_sleep_seconds(self) -> float:
        """For how long to keep the next batch back."""
        return self._delay("slow_data")

    def take_gradient_factor(self, *, last: bool) -> float | None:
        """What to multiply this step's local gradients by, or None. `last`: they are complete, forget it."""
        factor = self._gradient_factor
        if last:
            self._gradient_factor = None
        return factor

    def _begin(self, request: Inject) -> None:
        match request.fault:
            case "nan_gradient":
                self._gradient_factor = math.nan
            case "scale_gradient":
                self._gradient_factor = request.factor
            case "memory_hog":
                _start(lambda: grow_memory(request, self._clock, _hoard), "transom-memory-hog")
            case "gil_hog":
                _start(lambda: hold_the_interpreter(request.seconds, self._clock), "transom-gil-hog")
            case "slow" | "slow_backward" | "sleep" | "slow_data":
                self._lasting[request.fault] = Lasting(request, self._clock.monotonic() + request.seconds)

    def _running(self, fault: str) -> Lasting | None:
        lasting = self._lasting.get(fault)
        if lasting is not None and self._clock.monotonic() >= lasting.until:
            del self._lasting[fault]
            return None
        return lasting

    def _repetitions(self, fault: str, worth: int) -> int:
        lasting = self._running(fault)
        if lasting is None:
            return 0
        lasting.owed += worth * (lasting.request.factor - 1.0)
        whole = int(lasting.owed)
        lasting.owed -= whole
        return whole

    def _delay(self, fault: str) -> float:
        lasting = self._running(fault)
        return 0.0 if lasting is None else lasting.request.delay_seconds

    def crash_like_a_lost_gpu(self) -> NoReturn:
        """Print what the NVIDIA driver prints when a GPU is gone, and die by SIGABRT."""
        pid = os.getpid()
        line = f"NVRM: Xid (PCI:{self._pci_address}): 79, pid={pid}, name=python3, GPU has fallen off the bus."
        sys.stdout.flush()
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a core of a training process takes seconds to write
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.kill(pid, signal.SIGABRT)
        os._exit(128 + signal.SIGABRT)  # only where SIGABRT is blocked


def grow_memory(request: Inject, clock: Clock, kept: list[bytes]) -> None:
    """Grow this process by so many megabytes a second up to the bound, and keep them until the process ends."""
    end = clock.monotonic() + request.seconds
    megabytes = 0.0
    while clock.monotonic() < end and megabytes < request.megabytes_max:
        more = min(request.megabytes_per_second * HOG_TICK_SECONDS, request.megabytes_max - megabytes)
        kept.append(b"\1" * int(more * 1e6))  # written, so that it is resident and not only promised
        megabytes += more
        clock.sleep(HOG_TICK_SECONDS)


def hold_the_interpreter(seconds: float, clock: Clock) -> None:
    """Run Python code and nothing else, so that every other thread of this process waits for the interpreter."""
    end = clock.monotonic() + seconds
    while clock.monotonic() < end:
        sum(range(10_000))


def raise_injected(step: int) -> NoReturn:
    """The exception of user code that was asked for."""
    raise RuntimeError(f"injected by transom inject: an exception of user code in step {step}")


def made_nan(value: Any) -> Any:
    """The same structure with every floating tensor in it times NaN."""
    if hasattr(value, "is_floating_point"):
        return value * math.nan if value.is_floating_point() else value
    if isinstance(value, Mapping):
        spoilt = copy.copy(value)
        for key in value:
            spoilt[key] = made_nan(value[key])  # type: ignore[index]
        return spoilt
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(made_nan(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(made_nan(item) for item in value)
    return value


def _start(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


def _problem(request: Inject) -> str | None:
    """Why a request cannot be done, or None."""
    if request.fault not in FAULTS:
        return f"{request.fault!r} is not one of {', '.join(FAULTS)}"
    if request.at_step < -1:
        return f"the step is {request.at_step}, it must be -1 (the next) or a step"
    factor_max = GRADIENT_FACTOR_MAX if request.fault == "scale_gradient" else FACTOR_MAX
    if not 1.0 <= request.factor <= factor_max:
        return f"the factor is {request.factor}, it must be between 1 and {factor_max:g}"
    for name, value, bound in (
        ("seconds", request.seconds, SECONDS_MAX),
        ("delay_seconds", request.delay_seconds, DELAY_SECONDS_MAX),
        ("megabytes_per_second", request.megabytes_per_second, MEGABYTES_MAX),
        ("megabytes_max", request.megabytes_max, MEGABYTES_MAX),
    ):
        if not 0.0 < value <= bound:
            return f"the {name} are {value}, they must be above 0 and at most {bound:g}"
    return None
