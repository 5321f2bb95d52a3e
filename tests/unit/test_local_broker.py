"""What a local broker says when it cannot be brought up, and that it never outlives who started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingest.clock import SystemClock
from pipelines.broker.broker import KAFKA_VERSION, POM, BrokerError, LocalBroker

CLOCK = SystemClock()
DEADLINE_SECONDS = 30.0


def program(folder: Path, name: str, script: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def broker(folder: Path, java: str | None, mvn: str | None = None) -> LocalBroker:
    return LocalBroker(folder / "broker", folder / "cache", java=java, mvn=mvn, clock=CLOCK)


def test_the_version_is_that_of_the_pom() -> None:
    assert f"<version>{KAFKA_VERSION}</version>" in POM.read_text()


def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=r"needs Java 17 or newer.*--bootstrap-servers"):
        broker(tmp_path, None).start()


@pytest.mark.parametrize(
    ("said", "reason"),
    [('openjdk version "11.0.2" 2019', "is Java 11; Apache Kafka needs 17"), ("hello", "is it a Java")],
)
def test_an_old_or_strange_java_is_named(tmp_path: Path, said: str, reason: str) -> None:
    java = program(tmp_path, "java", f"echo '{said}' >&2")
    with pytest.raises(BrokerError, match=reason):
        broker(tmp_path, java).start()


def test_without_jars_and_maven_it_says_what_to_install(tmp_path: Path) -> None:
    java = program(tmp_path, "java", "echo 'openjdk version \"21\" 2023' >&2")
    with pytest.raises(BrokerError, match="no mvn on the PATH"):
        broker(tmp_path, java).start()
    mvn = program(tmp_path, "mvn", "echo '[ERROR] no network'; exit 1")
    with pytest.raises(BrokerError, match="no network"):
        broker(tmp_path, java, mvn).start()
    assert not broker(tmp_path, java, mvn).running


def test_a_broker_that_ends_while_starting_is_reported_with_its_last_words(tmp_path: Path) -> None:
    java = program(
        tmp_path,
        "java",
        'case "$*" in *-version*) echo \'openjdk version "21" 2023\' >&2;;\n'
        '*format*) ;; *) echo "port taken"; exit 1;; esac',
    )
    jars = tmp_path / "cache" / f"libs-{KAFKA_VERSION}"
    jars.mkdir(parents=True)
    (jars / f"kafka_2.13-{KAFKA_VERSION}.jar").touch()
    with pytest.raises(BrokerError, match=r"ended while starting.*port taken"):
        broker(tmp_path, java).start()


def test_a_tethered_process_ends_with_its_parent() -> None:
    parent = subprocess.Popen(
        [
            sys.executable, "-c",
            "import os, subprocess, sys, time\n"
            "tether = [sys.executable, '-m', 'pipelines.broker.tether', str(os.getpid())]\n"
            "child = subprocess.Popen([*tether, 'sleep', '600'])\n"
            "while open(f'/proc/{child.pid}/comm').read() != 'sleep\\n': time.sleep(0.01)\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(600)\n",
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while alive(child):
        assert CLOCK.monotonic() < deadline
        CLOCK.sleep(0.01)


def test_a_tether_whose_parent_is_gone_already_starts_nothing(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    subprocess.run(
        [sys.executable, "-m", "pipelines.broker.tether", "1", "touch", str(touched)], check=True, timeout=30
    )
    assert os.getpid() != 1
    assert not touched.exists()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
