"""`transom evaluate PATH` on a small folder of labelled series, made here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from pipelines.__main__ import app
from pipelines.evaluate import series
from pipelines.evaluate.evaluation import CannotEvaluate
from pipelines.evaluate.scoring import Span
from pipelines.evaluate.series_baselines import OURS, answer
from pipelines.evaluate.series_files import entities, read_series

EVENT = Span(400, 419)


def write_entity(folder: Path, name: str, past: int) -> np.ndarray:
    """One entity with one event in metric 2; `past`: how `end` is written, 0 the last row, 1 one past it."""
    rng = np.random.default_rng(sum(map(ord, name)))
    parts = {}
    for part, rows in (("train", 1440), ("test", 600)):
        wave = np.sin(2 * np.pi * np.arange(rows) / 96)[:, None]
        values = 0.5 + 0.1 * wave * [1.0, 2.0, 0.5] + 0.01 * rng.normal(size=(rows, 3))
        if part == "test":
            values[EVENT.start : EVENT.end + 1, 1] += 0.6
        frame = pd.DataFrame(values.astype(np.float32), columns=["m00", "m01", "m02"])
        if part == "test":
            frame["label"] = [int(EVENT.start <= row <= EVENT.end) for row in range(rows)]
        frame.to_parquet(folder / f"{name}.{part}.parquet")
        parts[part] = values
    causes = [{"start": EVENT.start, "end": EVENT.end + past, "metrics": [2]}]
    (folder / f"{name}.causes.json").write_text(json.dumps(causes))
    return parts["test"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("series")
    write_entity(made, "omi-1", past=0)
    write_entity(made, "machine-1", past=1)
    return made


@pytest.mark.parametrize(("name", "dataset", "seconds"), [("omi-1", "asd", 300.0), ("machine-1", "smd", 60.0)])
def test_an_entity_is_read_with_both_readings_of_its_causes(folder, name, dataset, seconds) -> None:
    found = read_series(folder / f"{name}.train.parquet")
    assert (found.dataset, found.interval_seconds) == (dataset, seconds)
    assert (found.train.shape, found.test.shape) == ((1440, 3), (600, 3))
    assert found.events == [EVENT]
    assert found.causes == ((EVENT, frozenset({1})),)
    assert read_series(folder / f"{name}.train.parquet", 10.0).rows_per_day == 8640.0


def test_a_folder_is_many_entities_and_a_file_is_one(folder: Path) -> None:
    assert [file.name for file in entities(folder)] == ["machine-1.train.parquet", "omi-1.train.parquet"]
    assert [file.name for file in entities(folder / "omi-1.test.parquet")] == ["omi-1.train.parquet"]
    assert [file.name for file in entities(folder / "omi-1")] == ["omi-1.train.parquet"]
    assert entities(folder / "nothing") == []


def test_the_command_measures_every_method_and_writes_the_figures(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(series, "METHODS", (OURS, "own-history z", "PCA"))
    out = tmp_path / "figures.json"
    result = CliRunner().invoke(app, ["evaluate", str(folder), "--json", str(out)])
    assert result.exit_code == 0, result.output
    told = json.loads(out.read_text())
    named = {figure["name"]: figure["value"] for figure in told["figures"]}
    assert told["methods"]["asd"][OURS]["recall"] == told["entities"]["omi-1"]["recall"] == 1.0
    assert named["asd.event_f1"] > 0.6
    assert named["asd.false_per_day"] <= 0.5  # the budget
    assert named["smd.vus_pr"] > 0.7
    assert named["smd.hit_rate"] == 1.0
    assert set(told["methods"]["asd"]) == {OURS, "own-history z", "PCA"}
    assert "own-history z" in result.output


@pytest.mark.parametrize("method", ["KNN", "own-history z"])
def test_every_method_answers_each_row_once(folder: Path, method: str) -> None:
    found = read_series(folder / "omi-1.train.parquet")
    said = answer(method, found.train, found.test, found.rows_per_day, 0.5)
    assert said.score.shape == said.alarmed.shape == (600,)
    assert np.isfinite(said.score).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda at: (at / "omi-9.test.parquet").unlink(), "beside the other part"),
        (lambda at: (at / "omi-9.test.parquet").write_text("no"), "cannot be read as Parquet"),
        (lambda at: rewrite(at, lambda frame: frame.drop(columns="label")), "no column 'label'"),
        (lambda at: rewrite(at, lambda frame: frame.rename(columns={"m00": "cpu"})), "different metrics"),
        (lambda at: rewrite(at, lambda frame: frame.assign(m00="high")), "not numeric"),
        (lambda at: (at / "omi-9.causes.json").write_text('[{"start": 1}]'), "no list of causes"),
        (lambda at: (at / "omi-9.causes.json").write_text('[{"start":1,"end":2,"metrics":[4]}]'), "has not"),
    ],
    ids=["no test", "no parquet", "no label", "other columns", "text", "bad causes", "causes beyond"],
)
def test_a_folder_that_is_not_whole_is_said_in_a_sentence(tmp_path: Path, change, sentence: str) -> None:
    write_entity(tmp_path, "omi-9", past=0)
    change(tmp_path)
    with pytest.raises(CannotEvaluate, match=sentence):
        read_series(tmp_path / "omi-9.train.parquet")


def rewrite(folder: Path, change) -> None:
    file = folder / "omi-9.test.parquet"
    change(pd.read_parquet(file)).to_parquet(file)
