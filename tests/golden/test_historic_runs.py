"""Runs that others' libraries wrote: what is said of each, twice the same, and every command of docs/replay.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.logs.rule_book import RuleBook
from pipelines.__main__ import app
from pipelines.historic.mapping import MappingFile
from pipelines.historic.open_run import open_run
from pipelines.historic.replay import replay_historic
from pipelines.replayed import Replayed, newest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "historic"
CONFIG, RULES = DetectorConfig(ensemble=EnsembleConfig(on=False)), RuleBook.shipped()
BYTES_MAX = 100_000
# run: what it is read as, and (class, culprits, step of the onset) of each incident
EXPECTED = {
    "table.parquet": ("Parquet", [("straggler", ["2@n1"], 120)]),
    "ranks-csv": ("CSV", [("straggler", ["2@n1"], 120)]),
    "metrics.jsonl": ("JSON lines", [("numeric", [], 60)]),
    "tensorboard": ("TensorBoard", [("nan", ["1@host"], 40)]),
    "wandb": ("W&B", [("nan", ["0@n0"], 45)]),
    "torchrun": ("torchrun's logs", [("user_error", ["1@node0"], 5)]),
    "slurm": ("Slurm's outputs", [("numeric", [], 50), ("preempted", ["None@n1"], None)]),
    "trainer.log": ("logs", [("oom", ["0@node0"], 40)]),
    "deepspeed.log": ("logs", []),
}  # fmt: skip


def replayed(name: str) -> tuple[str, Replayed]:
    run = open_run(DATA / name, MappingFile())
    return run.kind, replay_historic(run, CONFIG, RULES)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_historic_run_is_judged_and_twice_in_the_same_bytes(name: str) -> None:
    (kind, first), (_, second) = replayed(name), replayed(name)
    told = [
        (one.fault_class, [f"{culprit.rank}@{culprit.node}" for culprit in one.culprits], one.onset_step)
        for one in newest(first.verdicts).values()
    ]
    assert (kind, told) == EXPECTED[name]
    assert first.lines() == second.lines()


def test_the_historic_runs_are_small() -> None:
    assert all(file.stat().st_size < BYTES_MAX for file in DATA.rglob("*") if file.is_file())


def documented_commands() -> list[str]:
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    return [line for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


@pytest.fixture
def documented_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the document's commands find where they run."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    mapping = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert mapping is not None
    (tmp_path / "mapping.toml").write_text(mapping[1], encoding="utf-8")
    (tmp_path / "before.toml").write_text("[detect]\nensemble = false\n", encoding="utf-8")
    (tmp_path / "after.toml").write_text("[detect]\nensemble = false\nstraggler_ratio = 2.5\n", encoding="utf-8")
    rows = [
        f"{rank},{step},{1_760_000_000_000 + 1_000 * step},m{rank},{2 - step / 100},{400 + rank}"
        for step in range(40) for rank in range(2)
    ]  # fmt: skip
    table = "\n".join(["worker_id,it,when,machine,total loss,fwd_bwd_ms", *rows, ""])
    (tmp_path / "measured.csv").write_text(table, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", documented_commands())
def test_every_documented_command_runs(command: str, documented_folder: Path) -> None:
    words = shlex.split(command)
    assert words[:2] == ["transom", "replay"]
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, (done.output, done.exception)
    for option in ("--report", "--json", "--output", "--ledger"):
        if option in words:
            assert (documented_folder / words[words.index(option) + 1]).exists()
