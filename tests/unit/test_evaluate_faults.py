"""`transom evaluate faults` over a corpus made of numbers and over the recorded runs of the repository."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

import pipelines.evaluate.faults as faults
from ingest.bus import Record
from ingest.codec import Codec
from ingest.events import FaultInjected
from pipelines.evaluate.evaluation import CannotEvaluate, EvaluateOptions, Evaluation
from pipelines.evaluate.faults import evaluate
from pipelines.fault_corpus.corpus import CorpusRun, read_corpus_run, write_corpus_run
from pipelines.recording import RecordingWriter
from recovery.action import RECOVERY_TYPES, Command
from tests.synthetic_job import SyntheticJob

SIX_FAULTS = Path(__file__).resolve().parents[2] / "data" / "six-faults"


def shown(evaluation: Evaluation) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for part in evaluation.shown:
        console.print(part)
    return console.export_text()


def options() -> EvaluateOptions:
    return EvaluateOptions(console=Console(quiet=True))


class Distance:
    """As much of a PyOD model as is needed here."""

    def fit(self, rows: np.ndarray) -> None:
        self.middle, self.spread = rows.mean(axis=0), rows.std(axis=0)

    def decision_function(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray((np.abs(rows - self.middle) / self.spread).max(axis=1))


def write_run(folder: Path, part: str, seed: int, *, slow: float | None) -> None:
    """A run of 60 steps, eight seconds of a slow rank 2 where that is wanted, and 20 steps more."""
    job = SyntheticJob(seed=seed, job="faults", burst_share=0.0).start().train(60)
    began = job.at
    if slow is not None:
        label = FaultInjected(**job.stamp(2, "events", job.at), fault="slow", parameters={"seconds": 8.0})  # type: ignore[arg-type]
        job.say(label)
        job.train(40, slow={2: slow})
    ended = job.at
    job.train(20).end()
    place = folder / part / f"run-{seed}"
    codec, offsets = Codec(), dict.fromkeys(("metrics", "logs", "events"), 0)
    with RecordingWriter(place, "faults", now=1.0) as writer:
        for message in job.ordered():
            encoded = codec.encode(message)
            writer.write(
                Record(encoded.topic, 0, offsets[encoded.topic], "faults", encoded.headers, encoded.value, message.at)
            )
            offsets[encoded.topic] += 1
        if slow is None:
            writer.write(feedback(began))
    write_corpus_run(
        place,
        CorpusRun(
            part=part, kind="slow" if slow else "clean", level="middle", severity=0.5 if slow else 0.0, size="w64x3",  # type: ignore[arg-type]
            seed=seed, step_seconds=0.17, fault=label if slow is not None else None, ended_at=ended if slow else None,
        ),
    )  # fmt: skip


def feedback(at: float) -> Record:
    command = Command(command_id="c", job="faults", at=at, verb="feedback", incident_id="gone", author="ada",
                      feedback="false_positive")  # fmt: skip
    encoded = Codec(RECOVERY_TYPES).encode(command)
    return Record(encoded.topic, 0, 0, "faults", encoded.headers, encoded.value, at)


def test_the_demos_recorded_faults_are_all_found_and_their_culprits_named() -> None:
    evaluation = evaluate(SIX_FAULTS, options())
    figures = {figure.name: figure for figure in evaluation.figures}
    assert (figures["faults.recall"].value, figures["faults.recall"].n) == (1.0, 6)
    assert figures["faults.culprit"].value == 1.0
    assert figures["faults.false_per_1k"].value == 0.0
    assert figures["faults.delay_p50_seconds"].value < 10.0
    assert "Without baselines" in shown(evaluation)


def test_figures_are_of_the_held_out_part_and_baselines_are_tuned_on_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "MODELS", ("PCA",))
    monkeypatch.setattr(faults, "load_model", lambda name: Distance())  # PyOD itself takes seconds to import
    for part, seeds in (("tuning", (1, 2)), ("held-out", (3, 4))):
        write_run(tmp_path, part, seeds[0], slow=1.6)
        write_run(tmp_path, part, seeds[1], slow=None)
    evaluation = evaluate(tmp_path, options())
    figures = {figure.name: figure for figure in evaluation.figures}
    assert (figures["faults.recall"].value, figures["faults.recall"].n) == (1.0, 1)
    assert 80 <= figures["faults.false_per_1k"].n < 200
    text = shown(evaluation)
    for expected in ("k × median", "own history, z", "PCA alone", "straggler 1", "What people said", "1.00"):
        assert expected in text
    assert msgspec.json.encode(evaluation.details)
    assert evaluation.details["feedback"] == {
        "(an incident that is not in the run)": {"right": 0, "wrong": 2, "unknown": 0}
    }


def test_what_is_said_after_the_job_was_told_to_stop_is_not_scored(tmp_path: Path) -> None:
    write_run(tmp_path, "held-out", 3, slow=1.6)
    (place,) = (tmp_path / "held-out").iterdir()
    run = read_corpus_run(place)
    assert run.fault is not None
    write_corpus_run(place, msgspec.structs.replace(run, stopped_at=run.fault.at + 0.1))
    (recall, *_) = evaluate(tmp_path, options()).figures
    assert (recall.name, recall.value) == ("faults.recall", 0.0)


def test_what_is_no_folder_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(CannotEvaluate, match="transom record-faults"):
        evaluate(tmp_path / "none", options())
