"""The console as a person has it: the real record service over a bus, the real Streamlit process, a real Chromium."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from ingest.clock import Clock, SystemClock
from ingest.codec import Codec
from ingest.events import Metrics
from ingest.memory_bus import MemoryBus
from pipelines.children import Children
from pipelines.console import plan_console, wait_ready
from pipelines.ledger.client import LedgerClient
from pipelines.ledger.shapes import LedgerError
from pipelines.record import Record, RecordConfig
from pipelines.settings import ConsoleSettings
from recovery.action import RECOVERY_TYPES
from tests.machine import program
from tests.simulated_ledger import SimulatedLedger

WIDTH, HEIGHT = 1400, 900
PATIENCE_SECONDS = 120.0


@dataclass(slots=True)
class ConsoleLab:
    """What a test may do to it."""

    url: str
    ledger: LedgerClient
    bus: MemoryBus
    clock: Clock
    children: Children
    stop_record: threading.Event
    record: threading.Thread

    def tell(self, messages: Iterable[Any]) -> None:
        """Put messages on the bus."""
        codec, producer = Codec(RECOVERY_TYPES), self.bus.producer()
        for message in messages:
            encoded = codec.encode(message)
            producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
        producer.flush(10.0)
        producer.close()

    def tell_story(self, simulated: SimulatedLedger) -> None:
        """The whole simulated story, and return when the ledger has it."""
        messages = simulated.messages()
        self.tell(message for message in messages if not isinstance(message, Metrics))
        self.wait_for_incidents(len(simulated.faults))
        self.tell(message for message in messages if isinstance(message, Metrics))
        self.tell(simulated.heartbeats(self.clock.now()))

    def wait_for_incidents(self, count: int) -> None:
        """Return when the ledger has that many."""
        deadline = self.clock.monotonic() + PATIENCE_SECONDS
        while self.clock.monotonic() < deadline:
            try:
                if len(self.ledger.incidents().incidents) >= count:
                    return
            except LedgerError:
                pass
            self.clock.sleep(0.1)
        raise AssertionError(f"the ledger did not have {count} incidents in {PATIENCE_SECONDS:.0f} s")

    def end_record(self) -> None:
        """The record service ends, as after a kill; the console lives on."""
        self.stop_record.set()
        self.record.join(PATIENCE_SECONDS)


@contextmanager
def console_lab(folder: Path, sockets: Path) -> Iterator[ConsoleLab]:
    """Record in a thread of this process, the console as a process of its own; both gone afterwards."""
    clock = SystemClock()
    bus = MemoryBus(clock=clock)
    bus.create_topics(1)
    socket = sockets / "record.sock"
    service = Record(RecordConfig(ledger_folder=folder / "ledger", socket_path=socket), bus, clock)
    stop = threading.Event()
    thread = threading.Thread(target=service.run, args=(stop,), name="record", daemon=True)
    thread.start()
    assert service.ready.wait(PATIENCE_SECONDS), "record did not come up"
    plan = plan_console(ConsoleSettings(port=0), socket)
    with Children(folder / "logs", clock) as children, LedgerClient(socket) as client:
        children.start("console", plan.command)
        assert wait_ready(plan, clock, PATIENCE_SECONDS), "the console did not come up"
        try:
            yield ConsoleLab(plan.url, client, bus, clock, children, stop, thread)
        finally:
            stop.set()
            thread.join(PATIENCE_SECONDS)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium; nothing is downloaded."""
    expect.set_options(timeout=PATIENCE_SECONDS * 1000.0)  # the default of 5 s is shorter than a busy machine's page
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(program("chromium")), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def new_page(browser: Browser, *, dark: bool = False) -> Page:
    """A page of the screenshots' size, in a time zone that is not UTC."""
    context = browser.new_context(
        viewport={"width": WIDTH, "height": HEIGHT},
        color_scheme="dark" if dark else "light",
        timezone_id="Europe/Berlin",
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_SECONDS * 1000.0)
    return page


def settled(page: Page) -> None:
    """Return when the page is drawn: charts are there, no skeleton is left, the script has ended."""
    page.wait_for_selector("[data-testid='stEChartsChart'] canvas, [data-testid='stEChartsChart'] svg")
    page.wait_for_function("document.querySelectorAll('[data-testid=stSkeleton]').length === 0")
    page.wait_for_timeout(600)  # only for pictures: fonts and the last paint
