"""Tables as historic runs: which column is what, when a row was told, and in what order rows become blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from detectors.step_block import StepBlock
from ingest.events import AttemptStarted, Metrics
from pipelines.historic import table_run
from pipelines.historic.mapping import MappingFile, map_columns, read_mapping
from pipelines.historic.open_run import open_run
from pipelines.historic.run import NotARun, Told

BEGINS_AT = 1_760_000_000.0


def read(path: Path, given: MappingFile | None = None) -> list[Told]:
    return list(open_run(path, given or MappingFile()).told())


def written(folder: Path, text: str, name: str = "run.csv") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_usual_names_are_known_and_said_aloud() -> None:
    names = ["global_step", "_timestamp", "rank", "train/loss", "step_time_ms", "lr", "what", "hostname"]
    found = map_columns(names, names, MappingFile())
    assert found.roles == {"step": "global_step", "time": "_timestamp", "rank": "rank", "node": "hostname"}
    assert found.metrics["train.loss"].column == "train/loss"
    assert (found.metrics["train.step.duration"].column, found.metrics["train.step.duration"].scale) == (
        "step_time_ms",
        1e-3,
    )
    assert found.metrics["train.what"].column == "what"
    assert any("'step_time_ms', in milliseconds" in note for note in found.notes)


def test_a_mapping_is_used_and_a_wrong_one_is_refused_with_the_columns_that_are_there(tmp_path: Path) -> None:
    path = written(tmp_path, 'step = "it"\n[metrics]\n"train.loss" = { column = "l", scale = 2.0 }\n', "m.toml")
    given = read_mapping(path)
    run = written(tmp_path, "it,t,l\n0,10,1.5\n1,11,1.25\n")
    blocks = [told for told in read(run, MappingFile(step="it", time="t", metrics=given.metrics))]
    losses = [told.values[0, told.names.index("train.loss")] for told in blocks if isinstance(told, StepBlock)]
    assert losses == [3.0, 2.5]
    with pytest.raises(NotARun, match=r"no such column; there are: it, t, l"):
        read(run, MappingFile(step="nothing"))
    with pytest.raises(NotARun, match=r"m\.toml is wrong"):
        read_mapping(written(tmp_path, 'stepp = "it"\n', "m.toml"))


@pytest.mark.parametrize(
    ("first", "second", "unit"),
    [("1760000000", "1760000001", "seconds"), ("1760000000000", "1760000001000", "milliseconds"),
     ("2025-10-09T08:53:20Z", "2025-10-09T08:53:21+00:00", "dates"), ("5", "6", "seconds")],
)  # fmt: skip
def test_the_unit_of_times_is_seen_in_their_size(tmp_path: Path, first: str, second: str, unit: str) -> None:
    run = open_run(written(tmp_path, f"step,time,loss\n0,{first},1\n1,{second},2\n"), MappingFile())
    start, one, two = run.told()
    assert isinstance(start, AttemptStarted)
    assert two.at - one.at == pytest.approx(1.0)
    assert one.at in (pytest.approx(BEGINS_AT), 5.0)
    assert any(f"are read as {unit}" in note for note in run.notes)


def test_a_missing_number_and_nan_are_not_the_same(tmp_path: Path) -> None:
    table = pa.table({
        "step": [0, 1, 2], "time": [1.0, 2.0, 3.0], "loss": pa.array([1.0, None, float("nan")]), "step_time": [1.0] * 3,
    })  # fmt: skip
    pq.write_table(table, tmp_path / "run.parquet")
    _, first, second, third = read(tmp_path / "run.parquet")
    assert isinstance(first, StepBlock)
    assert isinstance(second, StepBlock)
    assert "train.loss" not in second.names
    assert isinstance(third, Metrics)
    assert [(entry.metric, entry.value) for entry in third.non_finite] == [("train.loss", "nan")]


def test_rows_in_any_order_become_blocks_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same whether they were written rank by rank, or as time went; and however they come in batches."""
    monkeypatch.setattr(table_run, "READ_ROWS", 2_048)
    dice = np.random.default_rng(0)
    step, rank = (part.ravel() for part in np.meshgrid(np.arange(1_000), np.arange(8), indexing="ij"))
    columns = {
        "step": step, "rank": rank, "ended_at": BEGINS_AT + step + dice.uniform(0.0, 0.2, len(step)),
        "loss": dice.normal(size=len(step)), "step_time": np.ones(len(step)),
    }  # fmt: skip
    told = []
    for number, order in enumerate((np.lexsort((rank, step)), np.lexsort((step, rank)), dice.permutation(len(step)))):
        path = tmp_path / str(number)
        path.mkdir()
        pq.write_table(pa.table({name: values[order] for name, values in columns.items()}), path / "run.parquet")
        told.append(read(path / "run.parquet"))
    for others in told[1:]:
        assert len(others) == len(told[0])
        for one, other in zip(told[0][1:], others[1:], strict=True):
            assert (one.step, one.at, one.ranks.tolist()) == (other.step, other.at, other.ranks.tolist())
            assert np.array_equal(one.values, other.values)
            assert np.array_equal(one.sequence, other.sequence)
    times = [one.at for one in told[0]]
    assert times == sorted(times)
    assert sum(len(one.ranks) for one in told[0][1:]) == len(step)


def test_a_long_table_is_made_wide(tmp_path: Path) -> None:
    rows = "".join(
        f"{rank},{step},{10 + step},{metric},{value}\n"
        for step in range(3) for rank in range(2) for metric, value in (("loss", 1.5), ("step_time", 0.5))
    )  # fmt: skip
    blocks = read(written(tmp_path, "rank,step,time,metric,value\n" + rows))[1:]
    assert [(block.step, block.ranks.tolist(), set(block.names)) for block in blocks] == [
        (step, [0, 1], {"train.loss", "train.step.duration"}) for step in range(3)
    ]


def test_without_times_the_clock_goes_by_the_steps_and_without_both_it_is_refused(tmp_path: Path) -> None:
    blocks = read(written(tmp_path, "step,loss,step_time\n0,1,2.0\n1,1,2.0\n2,1,3.0\n"))[1:]
    assert [block.at for block in blocks] == [3.0, 5.0, 8.0]
    with pytest.raises(NotARun, match="no column of times and none of step durations"):
        read(written(tmp_path, "step,loss\n0,1\n1,1\n"))
    with pytest.raises(NotARun, match="no column that looks like a step"):
        read(written(tmp_path, "time,loss\n0,1\n1,1\n"))


def test_a_rank_that_tells_twice_at_once_is_told_twice(tmp_path: Path) -> None:
    _, *told = read(written(tmp_path, "rank,step,time,loss,step_time\n0,1,10,1,1\n0,1,10,2,1\n1,1,10,3,1\n"))
    assert [type(one) for one in told] == [Metrics] * 3
    assert [one.sequence for one in told if one.rank == 0] == [0, 1]
