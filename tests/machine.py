"""What only some machines have: a test that needs it is skipped with the reason, and fails where nothing may be."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MAY_NOT_SKIP = "TRANSOM_TESTS_MAY_NOT_SKIP"  # set in CI
PACKAGES = {
    "java": "a Java 17", "mvn": "Maven", "chromium": "Chromium", "ip": "iproute2", "openssl": "OpenSSL",
    "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client",
    "prometheus-alertmanager": "prometheus-alertmanager",
}  # fmt: skip


def program(name: str) -> Path:
    """Its path; without it the test is skipped, and the end of the run says what to install."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"this machine has no {name}: install {PACKAGES[name]} to run this test")
    return Path(found)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A real file system of that size at `folder`, an empty one in memory; only root may mount it."""
    if os.geteuid() != 0:
        pytest.skip("a full disk needs a tmpfs of its own, which only root may mount")
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where nothing may be skipped, a skip is a failure that carries its reason."""
    report = yield
    if report.skipped and os.environ.get(MAY_NOT_SKIP) and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr}"
    return report


def pytest_sessionstart() -> None:
    """A shell ignores SIGINT in what it puts into the background, and every process of the tests would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
