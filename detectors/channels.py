"""Which channels watch an attempt beside the rank channel, in the order in which the judge hears them."""

from __future__ import annotations

from detectors.channel import Channel
from detectors.checkpoint_clues import CheckpointChannel
from detectors.config import DetectorConfig
from detectors.devices import DeviceChannel
from detectors.loss import LossChannel
from detectors.pace import PaceChannel
from detectors.stack_channel import StackChannel
from detectors.telemetry import TelemetryChannel


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
