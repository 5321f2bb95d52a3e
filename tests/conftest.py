"""Fixtures that several kinds of tests share; each lives in a file of its own."""

from tests.kafka_fixture import kafka_bootstrap, kafka_prefix
from tests.kube_lab.last import pytest_collection_modifyitems
from tests.machine import pytest_runtest_makereport, pytest_sessionstart
from tests.slurm_fixture import slurm, slurm_of_the_session

__all__ = [
    "kafka_bootstrap",
    "kafka_prefix",
    "pytest_collection_modifyitems",
    "pytest_runtest_makereport",
    "pytest_sessionstart",
    "slurm",
    "slurm_of_the_session",
]
