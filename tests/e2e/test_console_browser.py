"""A person at the console: real record service, real Streamlit, real Chromium; what they see, click and keep."""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from ingest.clock import SystemClock
from tests.console_lab import PATIENCE_SECONDS, ConsoleLab, chromium, console_lab, new_page, settled
from tests.simulated_ledger import JOB, SimulatedLedger

HANG = f"{JOB}/2/hang/3"
PATIENCE = PATIENCE_SECONDS * 1000.0


@pytest.fixture(scope="module")
def simulated() -> SimulatedLedger:
    return SimulatedLedger(SystemClock().now(), faults=5)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, simulated: SimulatedLedger) -> Iterator[ConsoleLab]:
    with (
        tempfile.TemporaryDirectory() as sockets,
        console_lab(tmp_path_factory.mktemp("console"), Path(sockets)) as started,
    ):
        started.tell_story(simulated)
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    fresh = new_page(browser)
    yield fresh
    fresh.context.close()


def query(page: Page) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)


def test_the_very_first_visit_may_be_a_deep_link(lab: ConsoleLab, page: Page) -> None:
    """First of all: Streamlit knows our pages only once its entry has run."""
    page.goto(f"{lab.url}/incident?id={HANG.replace('/', '%2F')}")
    settled(page)
    expect(page.get_by_role("link", name="Overview")).to_be_visible()
    expect(page.locator(".t-timeline")).to_have_css("list-style-type", "none")


def test_the_overview_is_drawn_without_asking_anybody_outside(lab: ConsoleLab, page: Page) -> None:
    outside: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: outside.append(request.url) if is_outside(request.url) else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(lab.url)
    settled(page)
    expect(page.locator(".t-cards li")).to_have_count(5)
    expect(page.get_by_text("Median to recover")).to_be_visible()
    assert outside == []
    assert errors == []


def is_outside(url: str) -> bool:
    return urlsplit(url).scheme in {"http", "https", "ws", "wss"} and urlsplit(url).hostname != "127.0.0.1"


def test_the_console_never_opens_the_ledgers_file(lab: ConsoleLab, page: Page) -> None:
    page.goto(lab.url)
    settled(page)
    pid = lab.children.running()["console"]
    opened = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    assert not [name for name in opened if "duckdb" in name or name.endswith(".parquet")]


def test_a_deep_link_restores_filters_and_selection_through_a_reload(lab: ConsoleLab, page: Page) -> None:
    page.goto(f"{lab.url}/incidents?severity=critical&selected={HANG.replace('/', '%2F')}")
    expect(page.get_by_text(re.compile("2 of 5 incidents"))).to_be_visible(timeout=PATIENCE)
    expect(page.locator(".t-sentence")).to_contain_text("Rank 3 on node-1 is stopped")
    page.reload()
    expect(page.locator(".t-sentence")).to_contain_text("Rank 3 on node-1 is stopped", timeout=PATIENCE)
    assert query(page) == {"severity": ["critical"], "selected": [HANG]}


def test_the_detail_page_tells_the_story_and_takes_an_acknowledgement(lab: ConsoleLab, page: Page) -> None:
    page.goto(f"{lab.url}/incident?id={HANG.replace('/', '%2F')}")
    settled(page)
    expect(page.locator(".t-timeline b")).to_have_text(
        ["Onset", "Verdict", "Decision", "Stop", "Ranks gone", "Start", "First step", "Resolved"]
    )
    expect(page.locator(".t-trouble").first).to_contain_text("Watchdog")
    page.get_by_role("button", name="Respond").click()
    page.get_by_label("Your name").fill("mira")
    page.get_by_label("Your name").press("Enter")
    page.get_by_role("button", name="Acknowledge").click()
    expect(page.get_by_text("✓ acknowledged by mira")).to_be_visible(timeout=PATIENCE)
    assert lab.ledger.incident(HANG).incident.acknowledged_by == "mira"


def test_a_refresh_leaves_half_typed_text_and_an_open_choice_alone(lab: ConsoleLab, page: Page) -> None:
    page.goto(f"{lab.url}/incident?id={f'{JOB}/4/gpu_lost/node-1'.replace('/', '%2F')}")
    settled(page)
    page.get_by_role("button", name="Respond").click()
    page.get_by_label("Note").press_sequentially("half a sen")
    before = page.locator(".t-now time").inner_text()
    expect(page.locator(".t-now time")).not_to_have_text(before, timeout=PATIENCE)
    expect(page.get_by_label("Note")).to_have_value("half a sen")


def test_a_new_incident_appears_by_itself_and_the_selection_stays(
    lab: ConsoleLab, page: Page, simulated: SimulatedLedger
) -> None:
    page.goto(f"{lab.url}/incidents?selected={HANG.replace('/', '%2F')}")
    expect(page.get_by_text(re.compile("5 of 5 incidents"))).to_be_visible(timeout=PATIENCE)
    last = simulated.incident(f"{JOB}/4/gpu_lost/node-1").verdicts[0]
    now = SystemClock().now()
    lab.tell([msgspec.structs.replace(last, verdict_id=f"{JOB}/5/new", attempt=5, onset_at=now, at=now)])
    expect(page.get_by_text(re.compile("6 of 6 incidents"))).to_be_visible(timeout=PATIENCE)
    expect(page.locator(".t-sentence")).to_contain_text("Rank 3 on node-1 is stopped")
    assert query(page)["selected"] == [HANG]


def test_feedback_reaches_the_ledger(lab: ConsoleLab, page: Page) -> None:
    page.goto(f"{lab.url}/incident?id={HANG.replace('/', '%2F')}")
    settled(page)
    page.get_by_role("button", name="Respond").click()
    page.get_by_label("Your name").fill("mira")
    page.get_by_label("Your name").press("Enter")
    page.get_by_role("button", name="No, a false alarm").click()
    expect(page.get_by_text("verdict judged: false positive")).to_be_visible(timeout=PATIENCE)
    assert lab.ledger.incident(HANG).incident.feedback == "false_positive"


def test_a_job_is_held_from_the_recovery_page_once_its_name_was_typed(lab: ConsoleLab, page: Page) -> None:
    page.goto(f"{lab.url}/recovery")
    expect(page.get_by_text("result: done").first).to_be_visible(timeout=PATIENCE)
    page.get_by_role("button", name="Command the job").click()
    page.get_by_label("Your name").fill("mira")
    page.get_by_label("Your name").press("Enter")
    page.get_by_label(f"Type {JOB} to confirm").fill(JOB)
    page.get_by_label(f"Type {JOB} to confirm").press("Enter")
    page.get_by_role("button", name="Hold", exact=True).click()
    expect(page.get_by_text("person: hold")).to_be_visible(timeout=PATIENCE)
    held = [row.message for row in lab.ledger.rows("commands").rows if row.message.verb == "hold"]
    assert [(command.job, command.author) for command in held] == [(JOB, "mira")]


def test_the_export_is_a_zip_of_the_incident(lab: ConsoleLab, page: Page) -> None:
    page.goto(f"{lab.url}/incident?id={HANG.replace('/', '%2F')}")
    settled(page)
    with page.expect_download(timeout=PATIENCE) as waiting:
        page.get_by_role("button", name="Export").click()
    with zipfile.ZipFile(waiting.value.path()) as archive:
        assert msgspec.json.decode(archive.read("incident.json"))["incident"]["incident_id"] == HANG


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_is_drawn_in_both_modes(lab: ConsoleLab, browser: Browser, dark: bool) -> None:
    """With TRANSOM_SCREENSHOTS=FOLDER each page's picture is kept there."""
    page = new_page(browser, dark=dark)
    page.set_viewport_size({"width": 1400, "height": 1500})  # Streamlit scrolls inside: a full page is no longer
    folder = os.environ.get("TRANSOM_SCREENSHOTS")
    incident = f"incident?id={HANG.replace('/', '%2F')}"
    pages = {
        "": "Jobs", "incidents": "of 6 incidents", incident: "Ranks that stand out", "job": "Attempts",
        "recovery": "Audit, newest first", "checkpoints": "Steps by tier", "health": "Lag by topic",
        "rules": "What recovery does about each class",
    }  # fmt: skip
    for path, words in pages.items():
        page.goto(f"{lab.url}/{path}")
        expect(page.get_by_text(words).first).to_be_visible(timeout=PATIENCE)
        expect(page.locator("[data-testid='stException']")).to_have_count(0)
        if folder:
            page.wait_for_function("document.querySelectorAll('[data-testid=stSkeleton]').length === 0")
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = f"{path.partition('?')[0] or 'overview'}-{'dark' if dark else 'light'}.png"
            page.screenshot(path=str(Path(folder) / name))
    page.context.close()


def test_a_record_service_that_ends_leaves_the_page_with_a_banner(lab: ConsoleLab, page: Page) -> None:
    """Last: nothing of this module may ask the ledger after it."""
    page.goto(lab.url)
    settled(page)
    lab.end_record()
    expect(page.locator(".t-banner")).to_contain_text("transom record", timeout=PATIENCE)
    expect(page.locator(".t-cards li").first).to_be_visible()
    expect(page.get_by_text("Traceback")).to_have_count(0)
