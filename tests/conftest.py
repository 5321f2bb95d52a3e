"""Fixtures that several kinds of tests share; each lives in a file of its own."""

from tests.kafka_fixture import kafka_bootstrap, kafka_prefix
from tests.machine import pytest_runtest_makereport

__all__ = ["kafka_bootstrap", "kafka_prefix", "pytest_runtest_makereport"]
