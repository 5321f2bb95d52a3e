"""Takes the README's two pictures of the console: `python -m tests.e2e.console_screenshots [--url URL] [--out FOLDER]`.

With --url from a console that runs (the demo's); without, from the simulated story through the real record service.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

from ingest.clock import SystemClock
from tests.console_lab import chromium, console_lab, new_page, settled
from tests.simulated_ledger import JOB, SimulatedLedger

BYTES_MAX = 250_000
OUT = Path(__file__).parents[2] / "docs" / "images"


def take(url: str, out: Path, *, incident_id: str = "", dark: bool = False) -> list[Path]:
    """console-overview.png and console-incident.png of the console at `url`; the incident named, or the newest."""
    out.mkdir(parents=True, exist_ok=True)
    suffix = "-dark" if dark else ""
    with chromium() as browser:
        page = new_page(browser, dark=dark)
        page.goto(url)
        settled(page)
        pictures = [picture(page, out / f"console-overview{suffix}.png")]
        if incident_id:
            page.goto(f"{url}/incident?id={incident_id.replace('/', '%2F')}")
        else:
            page.locator(".t-cards a").first.click()
        page.wait_for_selector(".t-timeline")
        settled(page)
        pictures.append(picture(page, out / f"console-incident{suffix}.png"))
    return pictures


def picture(page: Page, file: Path) -> Path:
    """One picture, packed as small as it gets without loss: a repository keeps every byte for ever."""
    page.screenshot(path=str(file))
    with Image.open(file) as image:
        image.convert("RGB").save(file, optimize=True)
    assert file.stat().st_size <= BYTES_MAX, f"{file} has {file.stat().st_size} bytes, more than {BYTES_MAX}"
    return file


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--incident", default="")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.url:
        pictures = take(arguments.url, arguments.out, incident_id=arguments.incident, dark=arguments.dark)
    else:
        with tempfile.TemporaryDirectory() as name, console_lab(Path(name), Path(name)) as lab:
            lab.tell_story(SimulatedLedger(SystemClock().now(), faults=5))
            incident = arguments.incident or f"{JOB}/1/straggler/1"
            pictures = take(lab.url, arguments.out, incident_id=incident, dark=arguments.dark)
    sys.stdout.write("".join(f"{file}\n" for file in pictures))


if __name__ == "__main__":
    main()
