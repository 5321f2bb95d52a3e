"""A collector without a bus: messages go to `record` over HTTP, and who runs here is asked there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ingest.events import Message
from ingest.record_post import RecordProducer
from pipelines.collect.collect import Collect
from pipelines.collect.outlet import onto_bus
from pipelines.ledger.client import LedgerClient
from pipelines.ledger.shapes import LedgerError
from pipelines.ledger_address import read_token

ASK_SECONDS = 2.0
ROWS_MAX = 1_000


class ToRecord:
    """Raises TokenRefused, BusMisconfigured."""

    def __init__(self, url: str, token_file: Path | None) -> None:
        self._url = url
        self._token = read_token(token_file) if token_file is not None else None
        self._producer = RecordProducer(url, self._token or "")
        self.deliver = onto_bus(self._producer)
        self._next = 0

    def run(self, collect: Collect, stop: threading.Event, tell: Callable[[str], None]) -> None:
        """Until `stop`."""
        listener = threading.Thread(target=self._listen, args=(collect, stop, tell), name="jobs-here", daemon=True)
        listener.start()
        tell(f"collect: telling {self._url}")
        try:
            collect.run_alone(stop)
        finally:
            listener.join(ASK_SECONDS)
            self._producer.close()

    def _listen(self, collect: Collect, stop: threading.Event, tell: Callable[[str], None]) -> None:
        told = ""
        with LedgerClient(self._url, token=self._token) as client:
            while not stop.is_set():
                try:
                    page = client.rows("events", after=self._next, limit=ROWS_MAX)
                    collect.hear([row.message for row in page.rows if isinstance(row.message, Message)])
                    self._next, told = page.next, ""
                    if len(page.rows) >= ROWS_MAX:
                        continue
                except LedgerError as error:
                    if str(error) != told:
                        told = str(error)
                        tell(f"collect: {told}; trying again")
                stop.wait(ASK_SECONDS)
