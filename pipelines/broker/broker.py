"""One real Apache Kafka broker (KRaft) on loopback, for the demo and the tests: start, kill, stop, start again."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from ingest.clock import Clock
from pipelines.errors import StatedError

KAFKA_VERSION = "4.4.0"  # as in pom.xml, which a test compares
POM = Path(__file__).with_name("pom.xml")
JAVA_MAJOR_MIN = 17
INSTALL_SECONDS_MAX = 600.0
ANSWER_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 30.0
POLL_SECONDS = 0.05
LOG_TAIL_BYTES = 2_000

# Small and quick to start: this broker carries one machine's traffic.
JVM_OPTIONS = (
    "-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Djava.awt.headless=true",
)  # fmt: skip

PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=400
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.num.partitions=4
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
"""


class BrokerError(StatedError):
    """The broker cannot be brought up; the text is one sentence that says what to do."""


class LocalBroker:
    """A broker whose data lie in `folder`; its jars, shared by all brokers, lie under `libs`.

    `java` and `mvn` are the paths of the programs, None where there are none; mvn is only needed while the jars are
    not there yet. The broker dies with the thread that called `start`.
    """

    def __init__(self, folder: Path, libs: Path, *, java: str | None, mvn: str | None, clock: Clock) -> None:
        self._folder = folder.absolute()
        self._libs = libs.absolute() / f"libs-{KAFKA_VERSION}"
        self._java = java
        self._mvn = mvn
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def bootstrap(self) -> str:
        """host:port; the same after a restart."""
        return f"127.0.0.1:{self._port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Return when the broker takes connections. Raises BrokerError. Does nothing while it runs."""
        if self.running:
            return
        java = self._checked_java()
        self._install()
        self._folder.mkdir(parents=True, exist_ok=True)
        properties = self._folder / "server.properties"
        if not properties.exists():
            port, controller_port = _free_ports()
            properties.write_text(
                PROPERTIES.format(port=port, controller_port=controller_port, data=self._folder / "data")
            )
        self._port = _port_in(properties.read_text())
        if not (self._folder / "data" / "meta.properties").exists():
            self._format(java, properties)
        self._launch(java, properties)

    def kill(self) -> None:
        """SIGKILL: a crash. The data stay; `start` goes on from them."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End cleanly. The data stay."""
        self._end(signal.SIGTERM)

    def _checked_java(self) -> str:
        if self._java is None:
            raise BrokerError(
                f"a broker of our own needs Java {JAVA_MAJOR_MIN} or newer and there is no java on the PATH; "
                "install it, or name a running broker with --bootstrap-servers"
            )
        shown = subprocess.run([self._java, "-version"], capture_output=True, text=True, check=False)
        first = (shown.stderr or shown.stdout).partition("\n")[0]
        try:
            major = int(first.split('"')[1].split(".")[0])
        except (IndexError, ValueError):
            raise BrokerError(f"{self._java} does not say its version ({first!r}); is it a Java?") from None
        if major < JAVA_MAJOR_MIN:
            raise BrokerError(f"{self._java} is Java {major}; Apache Kafka needs {JAVA_MAJOR_MIN} or newer")
        return self._java

    def _install(self) -> None:
        """Resolve the jars into the cache folder, once: aside first, so that a broken download is never used."""
        if any(self._libs.glob("kafka_2.13-*.jar")):
            return
        if self._mvn is None:
            raise BrokerError(
                f"Apache Kafka's jars are not in {self._libs} and there is no mvn on the PATH to fetch them; "
                "install Maven, or name a running broker with --bootstrap-servers"
            )
        aside = self._libs.with_name(f"{self._libs.name}.new-{os.getpid()}")
        aside.mkdir(parents=True, exist_ok=True)
        command = [
            self._mvn, "-q", "-B", "-f", str(POM), "dependency:copy-dependencies", f"-DoutputDirectory={aside}",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
        except subprocess.TimeoutExpired:
            raise BrokerError(f"Maven did not fetch Kafka's jars in {INSTALL_SECONDS_MAX:.0f} s; try again") from None
        if done.returncode != 0:
            errors = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
            raise BrokerError(f"Maven could not fetch Kafka's jars: {(errors or ['no reason given'])[0]}")
        try:
            aside.rename(self._libs)
        except OSError:
            if not any(self._libs.glob("kafka_2.13-*.jar")):  # else somebody else was first
                raise

    def _format(self, java: str, properties: Path) -> None:
        # An id that Kafka takes: 16 bytes in URL-safe base64; made of the folder's name, not of dice.
        digest = hashlib.sha256(str(self._folder).encode()).digest()[:16]
        cluster = base64.urlsafe_b64encode(digest).decode().rstrip("=").replace("-", "A")
        done = subprocess.run(
            [java, *JVM_OPTIONS, "-cp", f"{self._libs}/*", "kafka.tools.StorageTool", "format", "-t", cluster,
             "-c", str(properties)],
            capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS_MAX,
        )  # fmt: skip
        if done.returncode != 0:
            raise BrokerError(
                f"the broker's folder {self._folder} could not be formatted: {done.stderr.strip()[-300:]}"
            )

    def _launch(self, java: str, properties: Path) -> None:
        command = [
            sys.executable, "-m", "pipelines.broker.tether", str(os.getpid()),
            java, *JVM_OPTIONS, "-cp", f"{self._libs}/*", "kafka.Kafka", str(properties),
        ]  # fmt: skip
        with (self._folder / "broker.log").open("ab") as log:
            # A session of its own: Ctrl-C is for the demo, which then stops the broker itself.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = self._clock.monotonic() + ANSWER_SECONDS_MAX
        while not self._answers():
            if not self.running:
                self._process = None
                raise BrokerError(f"the broker ended while starting; see {self._folder / 'broker.log'}: {self._tail()}")
            if self._clock.monotonic() > deadline:
                self.kill()
                raise BrokerError(
                    f"the broker did not answer in {ANSWER_SECONDS_MAX:.0f} s; see {self._folder / 'broker.log'}"
                )
            self._clock.sleep(POLL_SECONDS)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def _tail(self) -> str:
        lines = (self._folder / "broker.log").read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")

    def _end(self, with_signal: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(with_signal)
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._process = None


def _free_ports() -> tuple[int, int]:
    """Two loopback ports that are free now; both are held while they are chosen, so that they differ."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(two.getsockname()[1])


def _port_in(properties: str) -> int:
    for line in properties.splitlines():
        if line.startswith("advertised.listeners="):
            return int(line.rpartition(":")[2])
    raise BrokerError("server.properties names no listener; remove the broker's folder and start again")
