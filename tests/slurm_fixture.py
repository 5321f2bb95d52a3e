"""One real Slurm for the session; each test gets it whole."""

from collections.abc import Iterator

import pytest

from tests.slurm_lab import SlurmLab, slurm_lab


@pytest.fixture(scope="session")
def slurm_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with slurm_lab(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


@pytest.fixture
def slurm(slurm_of_the_session: SlurmLab) -> Iterator[SlurmLab]:
    """Four idle nodes, whatever the test before has broken."""
    yield slurm_of_the_session
    slurm_of_the_session.clear()
