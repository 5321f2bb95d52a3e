"""What every channel of detection looks like: messages and closed steps go in, conditions and clues come out."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt

from detectors.clues import Clue, Condition, Place
from detectors.roster import Roster
from detectors.steps import StepMatrix
from ingest.events import Message


class Ended(NamedTuple):
    """The condition of this key is over."""

    key: str


Told: TypeAlias = Condition | Ended | Clue
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]


class Channel(Protocol):
    """Watches one thing about one attempt; made when the attempt begins, gone with it.

    What it says may depend on nothing but the messages, the closed steps and the ticks, so that a replay says the
    same. It decides for itself when a condition begins and ends; the judge keeps one of each key open.
    """

    wants: ClassVar[tuple[type[Message], ...]]  # the only types `observe` is given

    def observe(self, message: Message, place: Place | None, roster: Roster) -> None:
        """One message, in merged order; `roster` has seen it already."""
        ...

    def closed(self, step: int, matrix: StepMatrix, roster: Roster) -> None:
        """A step is closed: nothing more is awaited of it. Steps come in order, each once."""
        ...

    def look(self, now: float, roster: Roster) -> list[Told]:
        """One tick (every 0.25 s of event time), after everything up to `now` was observed."""
        ...

    def to_state(self) -> tuple[dict[str, Any], Arrays]:
        """JSON-able fields, and arrays for an npz file."""
        ...

    def load_state(self, state: dict[str, Any], arrays: Arrays) -> None:
        """Go on where `to_state` stopped; called once, on a channel that is new."""
        ...
