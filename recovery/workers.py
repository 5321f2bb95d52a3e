"""Where blocking calls run, so that the loop that polls and decides never waits for a backend."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Done(NamedTuple, Generic[T]):
    """A finished call: the key it was submitted under, and what it returned."""

    key: str
    result: T


class Workers(Protocol[T]):
    """Runs calls that return a value and never raise. At most one call per key is out at a time."""

    def submit(self, key: str, call: Callable[[], T]) -> bool:
        """False if there is no room now: ask again at the next tick."""
        ...

    def busy(self, key: str) -> bool: ...

    def take(self) -> list[Done[T]]:
        """What has finished since the last time; never waits."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait until something has finished, at most this long; True if something has."""
        ...


class InlineWorkers(Generic[T]):
    """Runs each call at once, in the caller's thread: simulation and tests."""

    def __init__(self) -> None:
        self._done: list[Done[T]] = []

    def submit(self, key: str, call: Callable[[], T]) -> bool:
        self._done.append(Done(key, call()))
        return True

    def busy(self, key: str) -> bool:
        return any(done.key == key for done in self._done)

    def take(self) -> list[Done[T]]:
        done, self._done = self._done, []
        return done

    def wait(self, seconds: float) -> bool:
        return bool(self._done)


class ThreadWorkers(Generic[T]):
    """One daemon thread per call: a backend that never returns costs its own job and nothing else."""

    def __init__(self, calls_max: int = 64) -> None:
        self._calls_max = calls_max
        self._out: set[str] = set()
        self._results: queue.SimpleQueue[Done[T]] = queue.SimpleQueue()
        self._finished = threading.Event()

    def submit(self, key: str, call: Callable[[], T]) -> bool:
        assert key not in self._out
        if len(self._out) >= self._calls_max:
            return False
        self._out.add(key)
        threading.Thread(target=self._run, args=(key, call), name=f"recover {key}", daemon=True).start()
        return True

    def _run(self, key: str, call: Callable[[], T]) -> None:
        self._results.put(Done(key, call()))
        self._finished.set()

    def busy(self, key: str) -> bool:
        return key in self._out

    def take(self) -> list[Done[T]]:
        self._finished.clear()
        done: list[Done[T]] = []
        while not self._results.empty():
            done.append(self._results.get())
            self._out.discard(done[-1].key)
        return done

    def wait(self, seconds: float) -> bool:
        return self._finished.wait(seconds)
