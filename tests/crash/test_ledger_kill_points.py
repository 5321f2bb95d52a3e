"""A kill at each step of a commit: what is there afterwards is whole, and what was not committed comes again."""

import subprocess
import sys
from pathlib import Path

import pytest

from ingest.clock import SystemClock
from pipelines.ledger.ledger import Ledger
from tests.ledger_messages import Tape, logs, metrics, verdict

# For each point a forked child commits once, takes more, and dies at that point of its second commit.
PROGRAM = """
import os, sys
from pathlib import Path
from ingest.clock import SystemClock
from pipelines.ledger import parts
from pipelines.ledger.ledger import Ledger
from tests.crash.test_ledger_kill_points import POINTS, first, second

parts.MERGE_PARTS = parts.MERGE_GAIN = 2


def die(*arguments, **keywords):
    os.kill(os.getpid(), 9)


def before(owner, name):
    setattr(owner, name, die)


def after(owner, name):
    original = getattr(owner, name)

    def wrapped(*arguments, **keywords):
        original(*arguments, **keywords)
        die()

    setattr(owner, name, wrapped)


class Connection:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def run(folder, point):
    ledger = Ledger(folder, SystemClock())
    ledger.append(first())
    ledger.commit(force=True)
    ledger.append(second())
    connection = ledger._connection = Connection(ledger._connection)
    {
        "before the part": lambda: before(parts.pq, "write_table"),
        "part not renamed": lambda: before(ledger.parts, "publish"),
        "part without row": lambda: before(connection, "begin"),
        "in the transaction": lambda: before(connection, "commit"),
        "after the commit": lambda: after(connection, "commit"),
        "merge not committed": lambda: before(ledger.parts, "merged_name"),
        "merged, old files there": lambda: before(ledger._upkeep, "_doom"),
    }[point]()
    ledger.commit(force=True)


for point in POINTS:
    child = os.fork()
    if child == 0:
        run(Path(sys.argv[1]) / point, point)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9, point
"""
POINTS = {  # and whether the second commit counts
    "before the part": False,
    "part not renamed": False,
    "part without row": False,
    "in the transaction": False,
    "after the commit": True,
    "merge not committed": True,
    "merged, old files there": True,
}


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one ledger for each point."""
    folder = tmp_path_factory.mktemp("kills")
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    return folder


def first():
    tape = Tape()
    tape.tell(verdict(1), logs("one"), *(metrics(step) for step in range(3)))
    return tape.records


def second():
    tape = Tape()
    tape.tell(verdict(1), logs("one"), *(metrics(step) for step in range(3)))
    tape.tell(verdict(2), logs("two", "three"), *(metrics(step) for step in range(3, 7)))
    return tape.records


@pytest.mark.parametrize(("point", "committed"), POINTS.items(), ids=POINTS)
def test_a_kill_in_a_commit_leaves_all_of_it_or_nothing(died: Path, point: str, committed: bool) -> None:
    folder = died / point
    with Ledger(folder, SystemClock()) as ledger:
        assert counts(ledger, folder) == ((2, 3, 7) if committed else (1, 1, 3))
        ledger.append(second())
        ledger.commit(force=True)
        assert counts(ledger, folder) == (2, 3, 7)
        assert {(place.topic, offset) for place, offset in ledger.offsets().items()} == {
            ("verdicts", 2), ("logs", 2), ("metrics", 7),
        }  # fmt: skip


def counts(ledger: Ledger, folder: Path) -> tuple[int, int, int]:
    """Verdicts, log lines, and samples in the files that are there (all of them must be parts)."""
    with ledger.cursor() as cursor:
        ((verdicts, lines),) = cursor.execute(
            "SELECT (SELECT count(*) FROM verdict), (SELECT count(*) FROM log_line)"
        ).fetchall()
        ((samples, steps),) = cursor.execute(
            f"SELECT count(*), count(DISTINCT step) FROM read_parquet('{folder}/metrics/*')"
        ).fetchall()
    assert samples == steps, "a sample is there twice"
    return verdicts, lines, samples
