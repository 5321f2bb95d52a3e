"""`transom fit`: what is normal is learned from recordings, written as a file, and detection starts from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from detectors.ensemble.config import EnsembleConfig
from detectors.ensemble.feedback import Judged
from detectors.ensemble.stored import StoredModel
from detectors.verdict import Culprit
from ingest.codec import Codec
from pipelines.__main__ import app
from pipelines.errors import StatedError
from pipelines.evaluate.brought import told_brought
from pipelines.evaluate.matching import Label, Right, Story, match
from pipelines.fit import recordings_in
from pipelines.fit_labels import judged_of, missed_spans, spans_of
from pipelines.recording import RecordingWriter, read_recording
from pipelines.replay import replay_records
from pipelines.room_configs import ensemble_config
from pipelines.settings import Settings, SettingsError, load_settings
from pipelines.simulation.recorded import write_simulated_recording
from pipelines.simulation.scenario import Scenario, SimulatedFault
from recovery.action import RECOVERY_TYPES, Command

DATA = Path(__file__).resolve().parents[2] / "data"
LIGHT = {"members": ["top1", "top2", "PCA"], "votes": []}


def simulated(folder: Path, seed: int, *faults: SimulatedFault, steps: int = 130) -> Path:
    scenario = Scenario(
        ranks=16, steps=steps, seed=seed, faults=faults, stages=1, checkpoint_steps=0, recording=DATA / "clean"
    )
    write_simulated_recording(scenario, folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    slow = SimulatedFault(kind="straggler", onset_step=60, length_steps=40, severity=0.5, ranks=(5,))
    return {
        "clean": simulated(folder / "clean", 1),
        "slow": simulated(folder / "slow", 2, slow, steps=110),
        "model": folder / "model.npz",
        "config": folder / "transom.toml",
    }


@pytest.fixture(scope="module")
def fitted(runs: dict[str, Path]) -> dict[str, object]:
    runs["config"].write_text('[detect.ensemble]\nmembers = ["top1", "top2", "PCA"]\nvotes = []\n', encoding="utf-8")
    summary = runs["model"].with_suffix(".json")
    result = CliRunner().invoke(
        app,
        [
            "fit", str(runs["clean"]), str(runs["slow"]), "--output", str(runs["model"]), "--json", str(summary),
            "--config", str(runs["config"]),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(summary.read_text())
    assert "The budget: 0.5 alarms a day" in result.output
    return found


def started(runs: dict[str, Path], **more: object) -> Settings:
    return load_settings(overrides={"detect": {"ensemble": {**LIGHT, **more}, "model": runs["model"]}})


def test_labelled_faults_are_left_out_and_the_summary_says_what_was_learned(
    runs: dict[str, Path], fitted: dict[str, object]
) -> None:
    by_name = {run["run"]: run for run in fitted["runs"]}  # type: ignore[attr-defined]
    assert (by_name["clean"]["faults_left_out"], by_name["slow"]["faults_left_out"]) == (0, 1)
    assert by_name["slow"]["clean_steps"] < by_name["clean"]["clean_steps"]
    model = StoredModel.from_bytes(runs["model"].read_bytes())
    assert model.parts["many"].windows == fitted["parts"]["many"]["windows"] >= 50  # type: ignore[index]
    (span,) = spans_of(runs["slow"])
    assert (span.fault_class, span.rank) == ("straggler", 5)


def test_detection_that_starts_from_a_model_needs_no_learning_time(
    runs: dict[str, Path], fitted: dict[str, object]
) -> None:
    cold, hot = (
        replay_records(read_recording(runs["slow"]), settings).verdicts[0]
        for settings in (load_settings(overrides={"detect": {"ensemble": LIGHT}}), started(runs))
    )
    texts = [
        next(one.text for one in verdict.evidence if one.metric == "detect.ensemble") for verdict in (cold, hot)
    ]  # fmt: skip
    assert "not fitted yet" in texts[0]
    assert "PCA" in texts[1]


def test_a_model_of_another_making_is_refused_in_one_sentence(
    runs: dict[str, Path], fitted: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="other features"):
        ensemble_config(started(runs, features=["train.compute.own", "train.data.duration"]))
    with pytest.raises(SettingsError, match="other members"):
        ensemble_config(started(runs, members=["top1"]))
    with pytest.raises(SettingsError, match="cannot be read"):
        ensemble_config(load_settings(overrides={"detect": {"model": tmp_path / "nothing.npz"}}))
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(SettingsError, match="no model"):
        ensemble_config(load_settings(overrides={"detect": {"model": broken}}))


def test_words_of_people_are_read_from_the_recording_and_only_where_the_verdict_has_a_score(
    runs: dict[str, Path], fitted: dict[str, object], tmp_path: Path
) -> None:
    verdicts = replay_records(read_recording(runs["slow"]), started(runs)).verdicts
    codec = Codec(RECOVERY_TYPES)
    last = list(read_recording(runs["slow"]))[-1]
    said = [
        Command(
            command_id=f"c{index}", job=verdicts[0].job, at=2000.0 + index, verb="feedback",
            incident_id=verdicts[0].verdict_id, author="ada", feedback=word,
        )
        for index, word in enumerate(("true_positive", "false_positive"))
    ]  # fmt: skip
    with RecordingWriter(tmp_path / "run", verdicts[0].job, now=1.0) as writer:
        for offset, message in enumerate([verdicts[0], *said]):
            encoded = codec.encode(message)
            writer.write(
                replace(
                    last,
                    topic=encoded.topic,
                    offset=offset,
                    key=encoded.key,
                    headers=encoded.headers,
                    value=encoded.value,
                )
            )
    score = next(one.value for one in verdicts[0].evidence if one.metric == "detect.ensemble")
    assert judged_of(tmp_path / "run") == [Judged("straggler", "false_positive", score)]
    assert missed_spans(runs["slow"]) == ()  # nothing had listened to that run


def test_too_few_clean_steps_and_no_recordings_are_said() -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["fit", str(DATA / "clean"), "--output", "nowhere.npz"])
    assert isinstance(result.exception, StatedError)
    assert "too few clean steps" in str(result.exception)
    result = runner.invoke(app, ["fit"])
    assert "needs recorded runs" in str(result.exception)
    with pytest.raises(StatedError, match="no recorded run"):
        recordings_in([DATA / "logs"])


def test_a_models_suitability_is_said_in_words(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    result = CliRunner().invoke(app, ["fit", "--check", "KNN", "--check", "COPOD", "--json", str(out)])
    assert "KNN: may decide and vote." in result.output
    assert "COPOD: may not be a member" in result.output
    told = {one["model"]: one for one in json.loads(out.read_text())}
    assert told["KNN"]["decides"]
    assert "by the batch" in told["COPOD"]["reasons"][0]


def test_the_defaults_of_settings_are_those_of_the_ensemble_and_false_switches_it_off() -> None:
    assert ensemble_config(load_settings()) == EnsembleConfig()
    assert not ensemble_config(load_settings(overrides={"detect": {"ensemble": False}})).on
    for wrong, why in (
        ({"members": ["COPOD"]}, "COPOD cannot be in detect.ensemble.members"),
        ({"votes": ["Nothing"]}, "no detector 'Nothing'"),
        ({"features": ["a", "b"]}, "'a' is no timing"),
        ({"features": ["train.compute.own"]}, "at least two"),
        ({"persistence": [9, 8]}, "1 <= k <= n"),
    ):
        with pytest.raises(SettingsError, match=why):
            ensemble_config(load_settings(overrides={"detect": {"ensemble": wrong}}))


def test_evaluation_says_what_the_ensemble_brought() -> None:
    culprit = (Culprit(rank=3, node="n0"),)
    mine, rules = (Story(5.0, "straggler", culprit, detector=name) for name in ("ensemble", "rank_channel"))
    label = Label("slow", Right(frozenset({"straggler"})), 4.0, 9.0, ranks=(3,), node="n0")
    run = SimpleNamespace(stories=(mine, mine, rules), matched=match([label], [mine, mine]))
    assert told_brought([run]).startswith("The ensemble opened 2 incident(s)")
    assert told_brought([SimpleNamespace(stories=(rules,), matched=match([label], [rules]))]).endswith("by itself.")
