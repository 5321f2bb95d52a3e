"""Two recorded runs of the demo's own job: a replay says, byte for byte, what stands beside them.

After a wanted change: `transom replay data/NAME --output data/NAME/verdicts.jsonl`, and review the difference.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from detectors.verdict import Verdict
from pipelines.recording import read_recording, read_run
from pipelines.replay import replay_records
from pipelines.replayed import Replayed, compare
from pipelines.settings import Settings

DATA = Path(__file__).resolve().parents[2] / "data"
RUNS = ("clean", "six-faults")
BYTES_MAX = 5_000_000
CLASS_OF = {
    "slow": "straggler", "kill": "rank_lost", "stop": "hang", "nan": "nan", "xid": "gpu_lost", "raise": "user_error",
}  # fmt: skip


def replayed(name: str) -> Replayed:
    return replay_records(read_recording(DATA / name), Settings())


@pytest.mark.parametrize("name", RUNS)
def test_a_replay_gives_the_recorded_bytes_twice(name: str) -> None:
    expected = (DATA / name / "verdicts.jsonl").read_bytes()
    first, second = replayed(name), replayed(name)
    assert first.lines() == expected
    assert second.lines() == expected
    assert first.unreadable == 0


@pytest.mark.parametrize("name", RUNS)
def test_a_replay_says_what_the_live_run_said(name: str) -> None:
    result = replayed(name)
    difference = compare(result.live, result.verdicts)
    assert (difference.changed, difference.gone, difference.new) == ((), (), ())


@pytest.mark.parametrize("name", RUNS)
def test_every_injected_fault_has_its_verdict_and_nothing_else_has(name: str) -> None:
    labels = read_run(DATA / name).labels
    lines = (DATA / name / "verdicts.jsonl").read_bytes().splitlines()
    verdicts = [msgspec.json.decode(line, type=Verdict) for line in lines]
    opened = {verdict.verdict_id: verdict for verdict in verdicts}
    found = sorted((verdict.attempt, verdict.fault_class) for verdict in opened.values())
    assert found == sorted((label.attempt, CLASS_OF[label.fault]) for label in labels)


def test_together_they_are_small() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < BYTES_MAX
