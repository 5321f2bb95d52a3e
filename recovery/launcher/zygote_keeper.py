"""Keeps one zygote warm: starts it, orders ranks of it, and starts another where it dies."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from ingest.clock import Clock

from .checks import Checks
from .config import LauncherConfig
from .output import LinePrefixer
from .share import Share
from .zygote_link import Exited, Forked, ForkRefused, News, Ready, ZygoteGone, ZygoteLink

BACKOFF_SECONDS = 0.2
TAIL_BYTES_MAX = 2_000


class ZygoteKeeper:
    """At most one zygote at a time. `attend` is called in every turn of the loop."""

    def __init__(
        self,
        config: LauncherConfig,
        clock: Clock,
        *,
        watch: Callable[..., None],
        show: Callable[[bytes], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._watch = watch
        self._show = show
        self._link: ZygoteLink | None = None
        self._prefixer = LinePrefixer(b"[zygote]: ")
        self._tail = b""  # of what it printed: why it could not start
        self._failures = 0
        self._start_at = 0.0
        self._started_at = 0.0
        self._ordered_at: dict[int, float] = {}
        self._error = ""

    @property
    def process(self) -> tuple[int, int]:
        """Id and start time; zeros where there is none."""
        return (self._link.pid, self._link.start_time) if self._link else (0, 0)

    def start(self) -> None:
        """Start one now; a failure is met again in `attend`."""
        self._started_at = self._clock.monotonic()
        self._tail = b""
        self._ordered_at.clear()
        try:
            self._link = ZygoteLink(self._config)
        except OSError as error:
            self._failed(f"{self._config.python} cannot be started ({error.strerror})")
            return
        self._watch(self._link.connection, lambda: None)  # wakes the loop; `attend` reads
        self._watch(self._link.output, self._read_output)

    def attend(self, share: Share | None, checks: Checks) -> bool:
        """Hear what there is, order what is pending; whether processes came or went."""
        news = self._hear(share, checks)
        if self._link is None:
            if self._failures >= self._config.limits.zygote_failures_max:
                if share is not None and share.pending:
                    share.refuse(self._error)
                    self._failures = 0  # the next attempt tries anew
            elif self._clock.monotonic() >= self._start_at:
                self.start()
                news = True
        elif self._link.ready:
            self._order(share, checks)
        return news

    def close(self) -> None:
        """End it, and with it every rank there is."""
        if self._link is not None:
            self._let_go()

    def _hear(self, share: Share | None, checks: Checks) -> bool:
        if self._link is None:
            return False
        ended = self._link.poll()
        news: list[News] = self._link.receive()
        if ended and not any(isinstance(item, ZygoteGone) for item in news):
            news.append(ZygoteGone())
        changed = False
        for item in news:
            match item:
                case Ready():
                    self._failures = 0
                    for problem in item.problems:
                        self._show(f"transom: the zygote could not import {problem}\n".encode())
                case Forked():
                    changed = True
                    self._forked(item, share, checks)
                case ForkRefused() if item.order < 0:
                    checks.refuse(item.order, item.reason)
                case ForkRefused():
                    if share is not None:
                        share.refuse(item.reason, item.order)
                case Exited():
                    changed = True
                    checks.exited(item.pid, item.code, item.signal)
                    if share is not None:
                        share.exited(item.pid, item.code, item.signal)
                case ZygoteGone():
                    changed = True
                    checks.lost()
                    self._died()
        self._check_time()
        return changed

    def _forked(self, news: Forked, share: Share | None, checks: Checks) -> None:
        if news.order < 0:
            checks.forked(news.order, news.pid, news.pidfd)
        elif share is not None:
            share.forked(news.order, news.pid, news.pidfd)
        else:
            os.close(news.pidfd)

    def _order(self, share: Share | None, checks: Checks) -> None:
        assert self._link is not None
        pending = [*(share.fork_orders() if share is not None else ()), *checks.fork_orders()]
        for order in pending:
            if order.order not in self._ordered_at:
                if not self._link.fork(order):
                    self._failed("it took no more orders")
                    return
                self._ordered_at[order.order] = self._clock.monotonic()
        still = {order.order for order in pending}
        self._ordered_at = {order: at for order, at in self._ordered_at.items() if order in still}

    def _check_time(self) -> None:
        if self._link is None:
            return
        now, limits = self._clock.monotonic(), self._config.limits
        if not self._link.ready and now - self._started_at > limits.zygote_ready_seconds_max:
            self._failed(f"it was not ready after {limits.zygote_ready_seconds_max:.0f} s")
        elif self._ordered_at and now - min(self._ordered_at.values()) > limits.fork_seconds_max:
            self._failed(f"it forked nothing for {limits.fork_seconds_max:.0f} s")

    def _died(self) -> None:
        assert self._link is not None
        self._read_output()
        last = self._tail.decode("utf-8", "replace").strip().rpartition("\n")[2]
        was_ready = self._link.ready
        self._failed(f"it ended by itself{f': {last}' if last else ''}")
        if was_ready:
            self._failures = 0  # this one worked: start another at once

    def _failed(self, reason: str) -> None:
        self._failures += 1
        self._error = f"the zygote of {self._config.node} could not fork ranks: {reason}"
        self._show(f"transom: {self._config.node}: the zygote is gone: {reason}\n".encode())
        self._start_at = self._clock.monotonic() + BACKOFF_SECONDS * self._failures
        if self._link is not None:
            self._let_go()

    def _let_go(self) -> None:
        assert self._link is not None
        for source in (self._link.connection, self._link.output):
            self._watch(source, None)
        self._link.kill()
        self._link = None

    def _read_output(self) -> None:
        if self._link is None:
            return
        chunk = b""
        with suppress(BlockingIOError, ValueError):
            chunk = os.read(self._link.output.fileno(), 65536)
            if not chunk:
                self._watch(self._link.output, None)
        self._tail = (self._tail + chunk)[-TAIL_BYTES_MAX:]
        if chunk:
            self._show(self._prefixer.feed(chunk, self._clock.now()))
