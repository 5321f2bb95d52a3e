"""One real Slurm for the session; each test gets it whole."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_lab import SlurmLab, slurm_lab


@pytest.fixture(scope="session")
def slurm_of_the_session() -> Iterator[SlurmLab]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        Path(folder).chmod(0o755)  # other users, of whom there is one in the tests, read slurm.conf
        with slurm_lab(Path(folder) / "slurm") as lab:
            yield lab


@pytest.fixture
def slurm(slurm_of_the_session: SlurmLab) -> Iterator[SlurmLab]:
    """Four idle nodes, whatever the test before has broken."""
    yield slurm_of_the_session
    slurm_of_the_session.clear()
