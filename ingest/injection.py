"""Faults that a rank does to itself when `transom inject` asks: each once, and only where allowed.

The forward hook of `transom.watch` asks `due` in every training step and does what it is told; what needs
torch (the repeated forward, tensors made NaN) is done there.
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

FAULTS = ("slow", "nan", "raise", "xid")
ARMED_FAULTS_MAX = 16
FACTOR_MAX = 100.0
SECONDS_MAX = 3_600.0
DEFAULT_PCI_ADDRESS = "0000:3b:00"

logger = logging.getLogger("transom")


@dataclass(frozen=True, slots=True)
class Slowness:
    """Repeat the forward computation until `until` (monotonic), so that it takes `factor` times as long."""

    factor: float
    until: float


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
        self._slow: Slowness | None = None
        self._extra_due = 0.0

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
        if request.fault == "slow":
            self._slow = Slowness(request.factor, self._clock.monotonic() + request.seconds)
        return request

    def extra_forwards(self) -> int:
        """How often to repeat the forward computation in this step; fractions add up over the steps."""
        slow = self._slow
        if slow is None:
            return 0
        if self._clock.monotonic() >= slow.until:
            self._slow, self._extra_due = None, 0.0
            return 0
        self._extra_due += slow.factor - 1.0
        whole = int(self._extra_due)
        self._extra_due -= whole
        return whole

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


def _problem(request: Inject) -> str | None:
    """Why a request cannot be done, or None."""
    if request.fault not in FAULTS:
        return f"{request.fault!r} is not one of {', '.join(FAULTS)}"
    if not 1.0 <= request.factor <= FACTOR_MAX:
        return f"the factor is {request.factor}, it must be between 1 and {FACTOR_MAX:g}"
    if not 0.0 < request.seconds <= SECONDS_MAX:
        return f"the seconds are {request.seconds}, they must be above 0 and at most {SECONDS_MAX:g}"
    if request.at_step < -1:
        return f"the step is {request.at_step}, it must be -1 (the next) or a step"
    return None
