"""Pre-flight checks of this node: each a process forked from the zygote, and one that does not answer has failed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ingest.clock import Clock

from .config import LauncherConfig
from .protocol import CheckOrder, CheckOutcome, CheckVerdict
from .rank import STACKS_SIGNAL
from .zygote_link import ZYGOTE_PATH, ForkOrder

CHECK_PATH = ZYGOTE_PATH.with_name("preflight.py")
ANSWER_BYTES_MAX = 16_384
TEXT_CHARACTERS_MAX = 500
CHECKS_AT_ONCE_MAX = 16


class _Said(msgspec.Struct, frozen=True):
    """What the process prints as its last line."""

    outcome: CheckVerdict
    seconds: float = 0.0
    text: str = ""


class _Check:
    """One process from before its fork until its answer. Owns the descriptors."""

    def __init__(self, order: CheckOrder, number: int) -> None:
        self.order = order
        self.number = number
        self.pid = 0
        self.answer: CheckOutcome | None = None
        self._pidfd = -1
        self._said, self._errors, self._other = (
            os.memfd_create(f"check-{what}", os.MFD_CLOEXEC) for what in ("said", "errors", "other")
        )

    @property
    def pending(self) -> bool:
        return self.pid == 0 and self.answer is None

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        return self._said, self._other, self._other, self._errors

    def forked(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd

    def ended(self, code: int | None, number: int | None) -> None:
        """Its answer, or what it died of."""
        if self.answer is not None:
            return
        try:
            line = os.pread(self._said, ANSWER_BYTES_MAX, 0).strip().rpartition(b"\n")[2]
            said = msgspec.json.decode(line, type=_Said)
        except ValueError:
            how = f"signal {number}" if number is not None else f"exit code {code}"
            said = _Said("failed", 0.0, f"it ended by {how}{self._why()}")
        self.close(said)

    def close(self, said: _Said) -> None:
        """The answer is there; whatever is left of the process goes. Only the first one counts."""
        if self.answer is not None:
            return
        self.answer = CheckOutcome(
            check=self.order.check, outcome=said.outcome, seconds=said.seconds, text=said.text[:TEXT_CHARACTERS_MAX]
        )
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        for descriptor in (self._said, self._errors, self._other, self._pidfd):
            if descriptor >= 0:
                os.close(descriptor)

    def _why(self) -> str:
        """The exception that it left behind, if it did."""
        with suppress(ValueError, KeyError, TypeError):
            error = json.loads(os.pread(self._errors, ANSWER_BYTES_MAX * 4, 0))
            return f", {error['type']}: {error['text']}"
        return ""


class Checks:
    """At most one round of checks at a time; all methods are called from the launcher's loop."""

    def __init__(self, config: LauncherConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._round: list[_Check] = []
        self._seconds = 0.0
        self._number = 0

    def begin(self, orders: Sequence[CheckOrder], seconds: float) -> Callable[[], tuple[CheckOutcome, ...] | None]:
        """Another round, in place of one that is not done. Call what is returned until it has all answers."""
        self.abandon("another round of checks was asked for")
        self._round = [_Check(order, self._next_number()) for order in orders[:CHECKS_AT_ONCE_MAX]]
        self._seconds = seconds
        return partial(self._look, self._round, self._clock.monotonic() + seconds)

    def abandon(self, why: str) -> None:
        """Ranks are started, or nobody waits for it any more."""
        for check in self._round:
            check.close(_Said("skipped", 0.0, why))

    def _look(self, round_: Sequence[_Check], deadline: float) -> tuple[CheckOutcome, ...] | None:
        """All answers; None: not yet. A check that is not done in time has failed, and its process is killed."""
        if self._clock.monotonic() >= deadline:
            for check in round_:
                before = "could not be forked" if check.pending else "did not answer"
                check.close(_Said("failed", self._seconds, f"it {before} in {self._seconds:.0f} s"))
        answers = tuple(check.answer for check in round_ if check.answer is not None)
        return answers if len(answers) == len(round_) else None

    # The zygote's side

    def fork_orders(self) -> list[ForkOrder]:
        """What the zygote should fork, or fork again where it died before it did."""
        return [
            ForkOrder(
                order=check.number,
                name=f"check {check.order.check}",
                env={},
                cpus=(),
                stacks_signal=STACKS_SIGNAL,
                descriptors=check.descriptors,
                run={"script": str(CHECK_PATH), "module": False, "argv": [json.dumps(self._words(check.order))]},
            )
            for check in self._round
            if check.pending
        ]

    def forked(self, number: int, pid: int, pidfd: int) -> None:
        """A check's process exists; where nobody waits for it any more it goes at once."""
        for check in self._round:
            if check.number == number and check.pending:
                check.forked(pid, pidfd)
                return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)

    def refuse(self, number: int, reason: str) -> None:
        for check in self._round:
            if check.number == number:
                check.close(_Said("failed", 0.0, reason))

    def exited(self, pid: int, code: int | None, number: int | None) -> None:
        """A process of somebody's has ended."""
        for check in self._round:
            if check.pid == pid:
                check.ended(code, number)

    def lost(self) -> None:
        """The zygote has gone, and what it had forked with it."""
        for check in self._round:
            if check.pid:
                check.ended(None, signal.SIGKILL)

    def _next_number(self) -> int:
        """Ranks count from 0 upwards, checks downwards."""
        self._number -= 1
        return self._number

    def _words(self, order: CheckOrder) -> dict[str, Any]:
        folder = self._config.env.get("TRANSOM_CKPT_DIR", "")
        return {
            "check": order.check, "rank": order.rank, "world": order.world, "host": order.host, "port": order.port,
            "seconds": self._seconds, "folder": str(Path(folder)) if folder else "",
        }  # fmt: skip
