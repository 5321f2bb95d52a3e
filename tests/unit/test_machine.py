"""A skip is told with its reason, and is a failure where nothing may be skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
from tests.machine import program, pytest_runtest_makereport

def test_it():
    program("chromium")
"""


@pytest.mark.parametrize(("flag", "code", "said"), [("", 0, "1 skipped"), ("1", 1, "no chromium: install Chromium")])
def test_what_the_machine_lacks(tmp_path: Path, flag: str, code: int, said: str) -> None:
    (tmp_path / "conftest.py").write_text("from tests.machine import pytest_runtest_makereport\n")
    (tmp_path / "test_one.py").write_text(TEST)
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(root), "TRANSOM_TESTS_MAY_NOT_SKIP": flag}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
