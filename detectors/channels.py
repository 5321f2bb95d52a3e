"""Which channels watch an attempt beside the rank channel, in the order in which the judge hears them."""

from __future__ import annotations

from detectors.channel import Channel
from detectors.config import DetectorConfig


def make_channels(config: DetectorConfig) -> dict[str, Channel]:
    """New channels for a new attempt, by the name under which their state is kept."""
    return {}
