"""Which channels watch an attempt beside the rank channel, in the order in which the judge hears them."""

from __future__ import annotations

from detectors.channel import Channel
from detectors.config import DetectorConfig
from detectors.devices.channel import DeviceChannel
from detectors.job.checkpoints import CheckpointChannel
from detectors.job.loss import LossChannel
from detectors.job.pace import PaceChannel
from detectors.ranks.telemetry import TelemetryChannel
from detectors.silence.stack_channel import StackChannel


def make_channels(config: DetectorConfig) -> dict[str, Channel]:
    """New channels for a new attempt, by the name under which their state is kept."""
    return {
        "stacks": StackChannel(),
        "devices": DeviceChannel(config.devices),
        "checkpoints": CheckpointChannel(),
        "pace": PaceChannel(config.pace),
        "loss": LossChannel(config.loss),
        "telemetry": TelemetryChannel(config.telemetry),
    }
