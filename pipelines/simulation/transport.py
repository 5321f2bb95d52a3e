"""The way of a simulated message: some are lost, some come late, some come twice; out they go as they arrive."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ingest.events import Message
from pipelines.simulation.noise import Floats
from pipelines.simulation.scenario import Scenario

NODE_DELAY_SECONDS = (0.005, 0.05)  # from a node's launcher to the bus, for each node the same for all its messages
AGAIN_SECONDS_MAX = 5.0  # after which a duplicate comes
SURE_SECONDS = 0.001


class SimulatedMessage(NamedTuple):
    """A message and when the bus takes it, UTC seconds."""

    message: Message
    arrives_at: float


class Transport:
    """Takes messages as they are sent and gives them as they arrive.

    Only metrics and heartbeats are lost, late or doubled: what launchers say of lives they say until it is heard.
    What is on time keeps its order within a node, as one launcher sends it.
    """

    def __init__(self, scenario: Scenario) -> None:
        dice = np.random.default_rng(np.random.SeedSequence(scenario.seed, spawn_key=(3,)))
        self._scenario = scenario
        self._delay = dice.uniform(*NODE_DELAY_SECONDS, scenario.nodes).tolist()
        self._dice = dice
        self._waiting: list[tuple[float, int, Message]] = []
        self._count = 0
        self.sent = self.lost = self.late = self.doubled = 0

    def send(self, message: Message, node: int, true_at: float) -> None:
        """A message that will surely come, on time."""
        self._put(message, true_at + self._delay[node] + SURE_SECONDS)

    def send_all(self, messages: list[Message], nodes: list[int], true_at: Floats) -> None:
        """Messages that may be lost, late, or come twice; `true_at` is when each was sent."""
        if not messages:
            return
        scenario, count = self._scenario, len(messages)
        dice = self._dice.random((3, count))
        lateness = self._dice.random((2, count))
        self.sent += count
        lost = dice[0] < scenario.missing
        late = (dice[1] < scenario.late) & ~lost
        twice = (dice[2] < scenario.duplicates) & ~lost
        arrives = true_at + np.where(late, lateness[0] * scenario.late_seconds_max, 0.0)
        again = arrives + lateness[1] * AGAIN_SECONDS_MAX
        self.lost += int(lost.sum())
        self.late += int(late.sum())
        self.doubled += int(twice.sum())
        waiting, number = self._waiting, self._count
        for message, node, at, gone in zip(messages, nodes, arrives.tolist(), lost.tolist(), strict=True):
            if not gone:
                number += 1
                waiting.append((at + self._delay[node], number, message))
        self._count = number
        for index in np.flatnonzero(twice).tolist():
            self._put(messages[index], float(again[index]) + self._delay[nodes[index]])

    def arrived(self, until: float) -> Iterator[SimulatedMessage]:
        """What arrives before `until`, in order of arrival; nothing sent later may arrive before it."""
        self._waiting.sort(key=itemgetter(0, 1))
        upto = bisect_left(self._waiting, until, key=itemgetter(0))
        due, self._waiting = self._waiting[:upto], self._waiting[upto:]
        for at, _, message in due:
            yield SimulatedMessage(message, at)

    def _put(self, message: Message, at: float) -> None:
        self._count += 1
        self._waiting.append((at, self._count, message))
