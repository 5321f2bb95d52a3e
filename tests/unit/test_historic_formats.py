"""What a path holds is found by its content; files that end in their middle are read to there; damage is an error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from detectors.step_block import StepBlock
from ingest.events import AttemptStarted, Logs, Metrics, RankExited
from pipelines.historic.mapping import MappingFile
from pipelines.historic.open_run import open_run
from pipelines.historic.run import NotARun, Told

DATA = Path(__file__).resolve().parents[2] / "data" / "historic"


def read(path: Path) -> list[Told]:
    return list(open_run(path, MappingFile()).told())


def steps_of(told: list[Told]) -> int:
    return sum(len(one.ranks) if isinstance(one, StepBlock) else isinstance(one, Metrics) for one in told)


def test_what_could_be_two_things_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "both.jsonl").write_text('{"message": "step 1 done", "step": 1}\n' * 3, encoding="utf-8")
    with pytest.raises(NotARun, match="--format jsonl or --format logs"):
        open_run(tmp_path / "both.jsonl", MappingFile())
    (tmp_path / "both.jsonl").unlink()
    shutil.copy(DATA / "table.parquet", tmp_path)
    shutil.copy(DATA / "metrics.jsonl", tmp_path)
    with pytest.raises(NotARun, match=r"holds jsonl and parquet; say which with --format jsonl\|parquet"):
        open_run(tmp_path, MappingFile())
    assert open_run(tmp_path, MappingFile(), "jsonl").kind == "JSON lines"


def test_nothing_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="there is no"):
        open_run(tmp_path / "nowhere", MappingFile())
    with pytest.raises(NotARun, match="no files"):
        open_run(tmp_path, MappingFile())
    (tmp_path / "zeros").write_bytes(bytes(100))
    with pytest.raises(NotARun, match="can be read as a run"):
        open_run(tmp_path, MappingFile())


@pytest.mark.parametrize("name", ["tensorboard/rank_0", "wandb/offline-run-run-aaaa0000"])
def test_a_file_whose_writer_was_stopped_is_read_to_there(name: str, tmp_path: Path) -> None:
    (file,) = (DATA / name).iterdir()
    whole = file.read_bytes()
    (tmp_path / file.name).write_bytes(whole[: len(whole) // 2])
    found = steps_of(read(tmp_path))
    assert 10 < found < steps_of(read(file))


def test_damage_is_said_with_its_place(tmp_path: Path) -> None:
    (file,) = (DATA / "tensorboard" / "rank_0").iterdir()
    damaged = bytearray(file.read_bytes())
    damaged[600:640] = b"\xff" * 40
    (tmp_path / file.name).write_bytes(damaged)
    with pytest.raises(NotARun, match="is damaged"):
        read(tmp_path)


def test_json_lines_may_have_nan_and_end_in_their_middle(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "time": 10 + step, "loss": float("nan")}) for step in range(3)]
    (tmp_path / "m.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "ti', encoding="utf-8")
    told = read(tmp_path / "m.jsonl")
    assert [one.non_finite[0].value for one in told if isinstance(one, Metrics)] == ["nan"] * 3
    (tmp_path / "m.jsonl").write_text("\n".join([lines[0], "{]", *lines[1:], ""]), encoding="utf-8")
    with pytest.raises(NotARun, match="line 2 of"):
        read(tmp_path / "m.jsonl")


def test_the_state_of_a_trainer_is_a_run(tmp_path: Path) -> None:
    history = [{"step": step, "loss": 2.0, "grad_norm": 1.0, "step_time": 1.5} for step in range(10, 60, 10)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}, indent=1), encoding="utf-8")
    assert steps_of(read(tmp_path)) == 5


def test_keys_that_begin_with_a_rank_are_that_ranks(tmp_path: Path) -> None:
    rows = [
        {"step": step, "time": 10 + step, "rank0/loss": 1.0, "rank1/loss": 2.0, "lr": 0.1} for step in range(4)
    ]  # fmt: skip
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    blocks = [one for one in read(tmp_path / "m.jsonl") if isinstance(one, StepBlock)]
    assert all(block.ranks.tolist() == [0, 1] for block in blocks)
    assert blocks[1].values[:, blocks[1].names.index("train.loss")].tolist() == [1.0, 2.0]


def test_a_rank_of_torchrun_that_raised_has_ended() -> None:
    told = read(DATA / "torchrun")
    (start,) = [one for one in told if isinstance(one, AttemptStarted)]
    assert [place.rank for place in start.places] == [0, 1]
    (ended,) = [one for one in told if isinstance(one, RankExited)]
    assert (ended.rank, ended.error.type if ended.error else "") == (1, "RuntimeError")
    assert told.index(ended) > max(number for number, one in enumerate(told) if isinstance(one, Logs) and one.rank == 1)
    times = [one.at for one in told]
    assert times == sorted(times)
