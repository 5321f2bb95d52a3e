"""`transom demo` as a user runs it: six faults, six right answers, on both buses; none where nothing is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

TRANSOM = Path(sysconfig.get_path("scripts")) / "transom"
DEMO_SECONDS_MAX = 360
pytestmark = pytest.mark.timeout(DEMO_SECONDS_MAX + 60)


def demo(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, float]]:
    """Run it headless; returns the process and its figures."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRANSOM_")}
    command = [
        TRANSOM,
        "demo",
        "--headless",
        "--state-dir",
        tmp_path / "state",
        "--json",
        tmp_path / "demo.json",
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=DEMO_SECONDS_MAX, check=False
    )
    tree = json.loads((tmp_path / "demo.json").read_text()) if (tmp_path / "demo.json").exists() else {"figures": []}
    return done, {figure["name"]: figure["value"] for figure in tree["figures"]}


def replayed(tmp_path: Path) -> str:
    (recording,) = (tmp_path / "state").glob("demo/*/recordings/demo")
    command = [TRANSOM, "replay", recording]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True).stdout


def test_every_fault_is_handled_right_on_the_embedded_bus(tmp_path: Path) -> None:
    done, figures = demo(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (figures["demo.faults_right"], figures["demo.false_verdicts"]) == (6, 0)
    assert "6 of 6 faults handled right" in done.stdout
    assert "6 the same, 0 changed, 0 gone, 0 new" in replayed(tmp_path), "a replay says what the live run said"


def test_every_fault_is_handled_right_over_kafka(tmp_path: Path, kafka_bootstrap: str) -> None:
    done, figures = demo(tmp_path, "--bus", "kafka", "--bootstrap-servers", kafka_bootstrap)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (figures["demo.faults_right"], figures["demo.false_verdicts"]) == (6, 0)
    assert "6 the same, 0 changed, 0 gone, 0 new" in replayed(tmp_path)


def test_a_run_without_faults_has_no_verdict(tmp_path: Path) -> None:
    done, figures = demo(tmp_path, "--faults", "none", "--steps", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures["demo.false_verdicts"] == 0
