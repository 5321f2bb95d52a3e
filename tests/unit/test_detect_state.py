"""Saving and loading: a detector goes on where it stopped, through JSON and npz, and says the same from there on."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest

from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.job_detector import JobDetector
from detectors.merge import Merge
from tests.synthetic_job import SyntheticJob, drain, with_places

PLAIN = DetectorConfig(ensemble=EnsembleConfig(on=False))
SMALL = EnsembleConfig(fit_steps=60, refit_steps=30, hold_steps=2, members=("top1", "PCA"), votes=())
FITTED = DetectorConfig(ensemble=SMALL)


def eventful() -> SyntheticJob:
    job = SyntheticJob(seed=11).start().train(50).train(15, slow={1: 1.8}).train(20)
    job.norms[(3, job.step + 2)] = math.nan
    job.train(6).kill(2)
    job.norms.clear()
    job.restart(70)
    return job.train(40).stop(0, seconds=4.0).train(10).end()


def through_files(detector: JobDetector, merge: Merge, config: DetectorConfig) -> tuple[JobDetector, Merge]:
    state, arrays = detector.to_state()
    text = json.dumps([state, merge.to_state()], allow_nan=False)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    buffer.seek(0)
    with np.load(buffer, allow_pickle=False) as loaded:
        back = {name: loaded[name] for name in loaded.files}
    told, merged = json.loads(text)
    return JobDetector.from_state("job", config, None, told, back), Merge.from_state(merged)


@pytest.mark.parametrize("config", [PLAIN, FITTED], ids=["plain", "ensemble"])
def test_a_detector_saved_and_loaded_at_many_points_says_the_same_as_one_that_never_stopped(
    config: DetectorConfig,
) -> None:
    arrivals = with_places(eventful().ordered())
    detector, merge, said = JobDetector("job", config), Merge(), []
    for message, place in arrivals:
        merge.put(message, place)
        said += drain(merge, detector)
    assert {verdict.fault_class for verdict in said} == {"straggler", "nan", "hang"}  # the death is the NaN's echo

    detector, merge, again, index = JobDetector("job", config), Merge(), [], 0
    offsets = {topic: 0 for topic in ("metrics", "logs", "events")}
    while index < len(arrivals):
        for message, place in arrivals[index : index + 600]:
            merge.put(message, place)
            again += drain(merge, detector)
            offsets[place.topic] = place.offset + 1
        held = merge.held_offsets()
        detector, merge = through_files(detector, merge, config)
        back = {topic: held.get((topic, 0), after) for topic, after in offsets.items()}
        for message, place in arrivals[: index + 600]:  # the bus delivers again from the stored offsets on
            if place.offset >= back[place.topic]:
                merge.put(message, place)
        index += 600
    assert again == said


def test_a_state_of_another_version_is_refused_and_says_what_to_do() -> None:
    state, arrays = JobDetector("job", PLAIN).to_state()
    with pytest.raises(ValueError, match="remove it"):
        JobDetector.from_state("job", PLAIN, None, {**state, "version": 99}, arrays)


def test_injected_labels_are_never_read() -> None:
    from ingest.events import FaultInjected

    job = SyntheticJob(seed=2).start().train(40)
    detector = JobDetector("job", PLAIN)
    detector.observe(FaultInjected(**job.stamp(1, "events", job.at), fault="kill"))
    assert detector.counts.messages == 0
    assert detector.attempt is None


def test_a_pause_of_days_between_attempts_costs_no_ticks() -> None:
    job = SyntheticJob(seed=2).start().train(40)
    job.at += 5 * 86_400.0
    job.attempt += 1
    detector = JobDetector("job", PLAIN)
    for message in job.start(39).train(5).ordered():
        detector.observe(message)
    verdicts = detector.advance(job.at)
    assert [verdict.fault_class for verdict in verdicts][:1] == ["node_lost"]
    assert verdicts[-1].status == "closed"
