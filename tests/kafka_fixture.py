"""A real Apache Kafka for the session: the one that TRANSOM_BOOTSTRAP names, else our own, started once."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from ingest.clock import SystemClock
from pipelines.broker.broker import LocalBroker
from tests.machine import program

_numbers = count()


def make_broker(folder: Path) -> LocalBroker:
    """A broker of our own in `folder`; the jars are resolved once into the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return LocalBroker(
        folder,
        cache / "transom" / "kafka",
        java=str(program("java")),
        mvn=str(program("mvn")),
        clock=SystemClock(),
    )


@pytest.fixture(scope="session")
def kafka_bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given = os.environ.get("TRANSOM_BOOTSTRAP")
    if given:
        yield given
        return
    broker = make_broker(tmp_path_factory.mktemp("kafka"))
    broker.start()
    yield broker.bootstrap
    broker.kill()  # the folder is thrown away: nothing to be tidy about


@pytest.fixture
def kafka_prefix() -> str:
    """Topics and groups of this test alone."""
    return f"t{os.getpid()}-{next(_numbers)}"
