"""All thresholds of detection in one frozen value; each part owns its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from detectors.devices.channel import DevicesConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.job.loss import LossConfig
from detectors.job.numbers import JobChannelConfig
from detectors.job.pace import PaceConfig
from detectors.judge.judge import JudgeConfig
from detectors.merge import MergeConfig
from detectors.ranks.config import RankChannelConfig
from detectors.ranks.telemetry import TelemetryConfig
from detectors.silence.liveness import LivenessConfig
from detectors.steps import StepsConfig


@dataclass(frozen=True, slots=True)
class DetectorConfig:
    """The default is what was measured on a small machine; `dataclasses.replace` changes a part."""

    merge: MergeConfig = field(default_factory=MergeConfig)
    steps: StepsConfig = field(default_factory=StepsConfig)
    rank: RankChannelConfig = field(default_factory=RankChannelConfig)
    job: JobChannelConfig = field(default_factory=JobChannelConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    pace: PaceConfig = field(default_factory=PaceConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
