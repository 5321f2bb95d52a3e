"""What every historic run looks like to a replay: messages and blocks of steps in the order of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

from detectors.step_block import StepBlock
from ingest.events import Message
from pipelines.errors import StatedError

Told: TypeAlias = Message | StepBlock


class NotARun(StatedError):
    """This cannot be read as a historic run; the text is one sentence that says what to do."""


class HistoricRun(Protocol):
    """One run that somebody's program left behind. Nothing of it is held in memory but what lies in one window."""

    @property
    def job(self) -> str: ...

    @property
    def kind(self) -> str:
        """What it was read as, in a person's words."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was guessed or left out, one sentence each; complete once all was read."""
        ...

    @property
    def interval_seconds(self) -> float:
        """How far two reports of a rank are apart; 0.0 where that is not known. Shorter silence means nothing."""
        ...

    def told(self) -> Iterator[Told]:
        """Everything, `at` never going back. May be asked again: it then begins anew. Raises NotARun."""
        ...
