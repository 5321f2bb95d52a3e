"""The live pipeline's detector over a historic run: messages and blocks in their order, the clock is the run's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from detectors.config import DetectorConfig
from detectors.job_detector import JobDetector
from detectors.logs.rule_book import RuleBook
from detectors.step_block import StepBlock
from pipelines.replayed import Replayed

from .run import HistoricRun, Told

AFTERWARDS_SECONDS = 10.0  # what only time decides (coalescing) is decided within it; the end of a file is no silence
INTERVALS = 10.0  # between two reports that a rank may be late before its silence means anything

Heard = Callable[[Told], None]


def replay_historic(
    run: HistoricRun, config: DetectorConfig, rules: RuleBook, heard: Heard = lambda told: None
) -> Replayed:
    """Everything that detection says of the run. Raises NotARun."""
    result = Replayed()
    detector: JobDetector | None = None
    at = 0.0
    for told in run.told():
        if detector is None:  # once the first is there, it is known how often a rank reports
            detector = JobDetector(run.job, _patient(config, run.interval_seconds), rules)
        at = told.at
        if isinstance(told, StepBlock):
            detector.observe_block(told)
        else:
            detector.observe(told)
        result.say(detector.advance(None), at)
        heard(told)
    if detector is not None:
        result.say(detector.advance(at), at)
        result.say(detector.advance(at + AFTERWARDS_SECONDS), at + AFTERWARDS_SECONDS)
    return result


def _patient(config: DetectorConfig, interval_seconds: float) -> DetectorConfig:
    """Nobody sends heartbeats in a historic run: a rank that reports every minute is not silent after one."""
    patience, liveness = INTERVALS * interval_seconds, config.liveness
    return replace(
        config,
        liveness=replace(
            liveness,
            ceiling_seconds=max(liveness.ceiling_seconds, patience),
            long_ceiling_seconds=max(liveness.long_ceiling_seconds, patience),
            startup_ceiling_seconds=max(liveness.startup_ceiling_seconds, patience),
            frozen_seconds=max(liveness.frozen_seconds, interval_seconds),
        ),
    )
