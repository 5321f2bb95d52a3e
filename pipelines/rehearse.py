"""`transom recover --dry-run`: what recovery would decide about a stream of verdicts, without doing any of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import msgspec

from detectors.verdict import Verdict
from ingest.bus import Bus, Record
from ingest.codec import Codec, Undecodable
from pipelines.recording import in_bus_order, read_recording
from recovery.action import RECOVERY_TYPES, Action, Command
from recovery.backend import NoCheckpoints
from recovery.backends.pretend import PretendBackend
from recovery.calls import Result
from recovery.controller import Controller
from recovery.policy_config import PolicyConfig
from recovery.store import RecoveryStore
from recovery.workers import InlineWorkers

TICKS = 8  # that carry an incident from its verdict to the pretended start
WAITS = (0.0, 3.5, 60.0, 700.0)  # seconds: coalescing, backoff and the like are over after these
READ_MAX = 500
QUIET_SECONDS = 1.0  # without a new message: all that there is has been read


class Rehearsal:
    """The real controller and policy over a backend that only pretends, on the time of the verdicts themselves."""

    def __init__(self, folder: Path, config: PolicyConfig) -> None:
        self._store = RecoveryStore(folder / "rehearsal.sqlite", durable=False)
        self._backend = PretendBackend()
        workers: InlineWorkers[Result] = InlineWorkers()
        self._controller = Controller(self._store, self._backend, NoCheckpoints(), config, Random(0), workers)
        self._now = 0.0

    def hear(self, message: Verdict | Command) -> Iterator[Action]:
        """Take in the next message; the decisions that it, and the time before it, bring about."""
        if self._now:
            yield from self._let_pass(message.at)
        self._now = max(self._now, message.at)
        if isinstance(message, Verdict):
            self._backend.meet(message.job, message.attempt)
            self._controller.accept(message, self._now)
        else:
            self._controller.accept_command(message, self._now)
        yield from self._decisions(self._now)

    def end(self) -> Iterator[Action]:
        """What only time would still decide."""
        yield from self._let_pass(float("inf"))

    def close(self) -> None:
        self._store.close()

    def _let_pass(self, until: float) -> Iterator[Action]:
        for seconds in WAITS:
            if self._now + seconds < until:
                yield from self._decisions(self._now + seconds)

    def _decisions(self, now: float) -> Iterator[Action]:
        for _ in range(TICKS):
            self._controller.tick(now)
            waiting = self._controller.pending_messages()
            self._controller.mark_published([one.seq for one in waiting])
            yield from (one.message for one in waiting if isinstance(one.message, Action))


@contextmanager
def rehearsal(config: PolicyConfig) -> Iterator[Rehearsal]:
    """A rehearsal whose memory is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="transom-dry-run-") as folder:
        one = Rehearsal(Path(folder), config)
        try:
            yield one
        finally:
            one.close()


def rehearse_recording(recording: Path, config: PolicyConfig, tell: Callable[[Action], None]) -> int:
    """Every decision about a recorded run's verdicts; how many verdicts there were. Raises NotARecording."""
    messages = _messages(record for record in in_bus_order(read_recording(recording)))
    return _rehearse(messages, config, tell)


def rehearse_bus(bus: Bus, group: str, config: PolicyConfig, tell: Callable[[Action], None], stop: Event | None) -> int:
    """The same of all verdicts that lie on the bus, and with `stop` of those that come, until it is set."""
    consumer = bus.consumer(group, ("verdicts", "commands"))

    def records() -> Iterator[Record]:
        while stop is None or not stop.is_set():
            found = consumer.poll(READ_MAX, QUIET_SECONDS)
            yield from found
            if not found and stop is None:
                return

    try:
        return _rehearse(_messages(records()), config, tell)
    finally:
        consumer.close()


def _rehearse(messages: Iterable[Verdict | Command], config: PolicyConfig, tell: Callable[[Action], None]) -> int:
    verdicts = 0
    with rehearsal(config) as one:
        for message in messages:
            verdicts += isinstance(message, Verdict)
            for action in one.hear(message):
                tell(action)
        for action in one.end():
            tell(action)
    return verdicts


def _messages(records: Iterable[Record]) -> Iterator[Verdict | Command]:
    codec = Codec(RECOVERY_TYPES)
    for record in records:
        if record.topic not in ("verdicts", "commands"):
            continue
        try:
            message: Any = codec.decode(record.headers, record.value)
        except Undecodable:
            continue
        if isinstance(message, Verdict | Command):
            yield message


def in_words(action: Action) -> str:
    """One decision as a person reads it."""
    plan = f"  plan {action.plan_hash}" if action.plan_hash else ""
    away = f"  without {', '.join((*action.excluded_nodes, *action.spared_nodes))}" if action.excluded_nodes else ""
    return f"{action.job} #{action.attempt}  {action.verb} ({action.mode}){away}{plan}\n    {action.rule}"


def as_json(actions: Iterable[Action]) -> bytes:
    return msgspec.json.encode(list(actions))
