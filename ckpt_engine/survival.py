"""What makes an engine's memory outlive it: it takes over from its predecessor's keeper, and hands all to its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from .adoption import prove, take_back
from .clock import Clock
from .event import WHOLE_STEP, EngineEvent, EventState
from .keeping import KeeperConfig, KeeperLink
from .segment import SlotHeader
from .slots import SlotTable
from .wire import Fields

NO_RANK_YET = -1  # the step of an event that speaks of none


class Survival:
    """The keeper of one engine's slots; without a configuration there is none, and memory is lost with the engine
    where no rank lives."""

    def __init__(
        self,
        config: KeeperConfig | None,
        table: SlotTable,
        directory: Path,
        emit: Callable[[EngineEvent], None],
        clock: Clock,
    ) -> None:
        self._table = table
        self._directory = directory
        self._emit = emit
        self._clock = clock
        self._config = config
        self._link: KeeperLink | None = None

    @property
    def alive(self) -> bool:
        """Whether a keeper holds all that the engine holds."""
        return self._link is not None and self._link.alive

    def state(self) -> Fields:
        """`pid` is 0 where no keeper holds this memory; `error` says why."""
        if self._link is None:
            return {"pid": 0, "error": "this engine was started without a keeper"}
        return {"pid": self._link.pid if self._link.alive else 0, "error": self._link.error}

    def begin(self) -> None:
        """Adopt what an earlier engine had in memory, and have a keeper from here on. Takes milliseconds, not the
        time to read the memory: the newest shards are compared with their checksums meanwhile."""
        if self._config is None:
            return
        link = self._link = KeeperLink(self._config, self._table.changed)
        adopted = take_back(self._table, link.open(), self._config.job, self._directory)
        self._table.set_keeper(link)
        link.watch(self._table.held)
        for _, header in adopted.sealed:
            self._tell("registered", header, "an earlier engine had it in memory, and its keeper has kept it")
        for reason in adopted.refused:
            at, attempt = self._clock.now(), self._table.attempt
            self._emit(EngineEvent("evicted", NO_RANK_YET, attempt, WHOLE_STEP, "memory", at, reason=reason))
        if adopted.sealed:
            arguments = (self._table, adopted.sealed, self._damaged)
            threading.Thread(target=prove, args=arguments, name="prove", daemon=True).start()

    def end(self, *, drained: bool) -> None:
        """The engine ends. Where the disk has not taken everything the keeper stays as long as it may."""
        if self._link is None:
            return
        if drained:
            self._link.end()
        else:
            self._link.leave()

    def _damaged(self, header: SlotHeader, reason: str) -> None:
        self._tell("damaged", header, reason)

    def _tell(self, state: EventState, header: SlotHeader, reason: str) -> None:
        at, size = self._clock.now(), header.payload_bytes
        self._emit(
            EngineEvent(state, header.step, header.attempt, header.rank, "memory", at, size_bytes=size, reason=reason)
        )
