"""A bounded queue before one receiver, emptied by a thread of its own: who posts never waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import msgspec
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_when_event_set, wait_exponential
from tenacity.nap import sleep_using_event

from .notice import Notice
from .sending import Refused, Sender, Undelivered

NOTICES_MAX = 200
TRIES_MAX = 8  # with the waits between them two to four minutes
WAIT_SECONDS, WAIT_SECONDS_MAX = 1.0, 60.0


class Mailbox:
    """From the first `put` to `close`. What cannot be delivered is counted, said, and told with the next notice."""

    def __init__(
        self, sender: Sender, tell: Callable[[str], object], *, notices_max: int = NOTICES_MAX,
        tries_max: int = TRIES_MAX, wait_seconds: float = WAIT_SECONDS,
    ) -> None:  # fmt: skip
        self.lost = 0
        self._sender = sender
        self._tell = tell
        self._notices: deque[Notice] = deque()
        self._notices_max = notices_max
        self._changed = threading.Condition()
        self._closing = False
        self._stop = threading.Event()
        self._retrying = Retrying(
            stop=stop_after_attempt(tries_max) | stop_when_event_set(self._stop),
            wait=wait_exponential(multiplier=wait_seconds, max=WAIT_SECONDS_MAX),
            retry=retry_if_exception(lambda error: isinstance(error, Undelivered) and not isinstance(error, Refused)),
            sleep=sleep_using_event(self._stop),
            reraise=True,
        )
        self._thread = threading.Thread(target=self._deliver, name=f"notify-{sender.name}", daemon=True)
        self._thread.start()

    def put(self, notice: Notice) -> None:
        """Returns at once. Where it is full the oldest makes room: what is so now matters more."""
        with self._changed:
            if len(self._notices) >= self._notices_max:
                self._notices.popleft()
                self.lost += 1
            self._notices.append(notice)
            self._changed.notify()

    def close(self, seconds_max: float) -> None:
        """What waits may still go out in that time; the rest is lost."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds_max)
        self._stop.set()

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._notices or self._closing)
                if not self._notices or self._stop.is_set():
                    return
                notice, lost = self._notices.popleft(), self.lost
            try:
                self._retrying(self._sender.send, msgspec.structs.replace(notice, lost_before=lost))
            except Undelivered as error:
                with self._changed:
                    self.lost += 1
                self._tell(f"notify: {self._sender.name} {error}; {notice.notice_id} is not told there")
            else:
                with self._changed:
                    self.lost -= lost  # the receiver knows of these now
