"""SIGKILL of processes that use the embedded bus: whole transactions only, and the group goes on at once."""

import random
import signal
import subprocess
import sys
from pathlib import Path

from ingest.bus import Record
from ingest.clock import SystemClock
from ingest.sqlite_bus import SqliteBus

CLOCK = SystemClock()
DEADLINE_SECONDS = 30.0
BATCH = 40

PRODUCER = f"""
import sys
from pathlib import Path
from ingest.clock import SystemClock
from ingest.sqlite_bus import SqliteBus
producer = SqliteBus(Path(sys.argv[1]), clock=SystemClock(), mountinfo="").producer()
for batch in range(1_000_000):
    for number in range({BATCH}):
        value = f"{{sys.argv[2]}} {{batch}} {{number}}".encode() + b" " * 500
        producer.send("metrics", f"job-{{number % 5}}", [], value)
    producer.flush(10.0)
"""

CONSUMER = """
import sys
from pathlib import Path
from ingest.clock import SystemClock
from ingest.sqlite_bus import SqliteBus
bus = SqliteBus(Path(sys.argv[1]), clock=SystemClock(), mountinfo="", session_timeout_seconds=3600)
consumer = bus.consumer("g", ("metrics",))
records = []
while not records:
    records = consumer.poll(1, 1.0)
print(len(consumer.assignment()), flush=True)
while True:
    consumer.poll(1, 1.0)
"""


def read_all(bus: SqliteBus, group: str) -> list[Record]:
    consumer = bus.consumer(group, ("metrics",))
    records: list[Record] = []
    while batch := consumer.poll(10_000, 0.0):
        records += batch
    consumer.close()
    return records


def test_a_producer_killed_in_mid_flush_leaves_whole_transactions_only(tmp_path: Path) -> None:
    path = tmp_path / "bus.sqlite"
    bus = SqliteBus(path, clock=CLOCK, mountinfo="")
    bus.create_topics(2)
    rng = random.Random(7)
    probe = bus.consumer("probe", ("metrics",))
    for life in range(5):
        process = subprocess.Popen([sys.executable, "-c", PRODUCER, str(path), str(life)])
        try:
            deadline = CLOCK.monotonic() + DEADLINE_SECONDS
            seen = 0
            while seen < BATCH * rng.randint(1, 6):
                assert CLOCK.monotonic() < deadline
                seen += sum(record.value.startswith(b"%d " % life) for record in probe.poll(1000, 0.05))
            CLOCK.sleep(rng.random() * 0.003)  # anywhere in a transaction
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    probe.close()

    batches: dict[tuple[int, int], list[int]] = {}
    offsets: dict[int, list[int]] = {}
    for record in read_all(bus, "all"):
        life, batch, number = map(int, record.value.split())
        batches.setdefault((life, batch), []).append(number)
        offsets.setdefault(record.partition, []).append(record.offset)
    assert {life for life, _ in batches} == set(range(5))
    assert all(sorted(numbers) == list(range(BATCH)) for numbers in batches.values())
    assert all(numbers == list(range(len(numbers))) for numbers in offsets.values())


def test_a_killed_consumer_is_replaced_at_once_and_nothing_it_had_not_committed_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "bus.sqlite"
    bus = SqliteBus(path, clock=CLOCK, mountinfo="", session_timeout_seconds=3600)
    bus.create_topics(2)
    producer = bus.producer()
    for number in range(10):
        producer.send("metrics", f"job-{number}", [], b"%d" % number)
    producer.flush(5.0)
    producer.close()
    process = subprocess.Popen([sys.executable, "-c", CONSUMER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "2\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    # Its session would live for an hour; that its process is gone counts at once.
    assert sorted(int(record.value) for record in read_all(bus, "g")) == list(range(10))


def test_many_processes_may_create_the_file_at_once(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom ingest.clock import SystemClock\n"
        "from ingest.sqlite_bus import SqliteBus\n"
        "bus = SqliteBus(Path(sys.argv[1]), clock=SystemClock(), mountinfo='')\nbus.create_topics(2)\n"
        "producer = bus.producer()\nproducer.send('metrics', 'job', [], sys.argv[2].encode())\n"
        "producer.flush(10.0)\nproducer.close()\n"
    )
    path = tmp_path / "state" / "bus.sqlite"
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(path), str(number)], stderr=subprocess.PIPE)
        for number in range(6)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, b"")
    bus = SqliteBus(path, clock=CLOCK, mountinfo="")
    assert sorted(int(record.value) for record in read_all(bus, "g")) == list(range(6))
    assert [name.name for name in path.parent.glob("*new*")] == []
