"""A simulated run as a recording on disk: what `transom replay` reads, with labels.json beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from ingest.bus import Record
from ingest.codec import Codec
from ingest.events import MESSAGE_TYPES
from pipelines.recording import RUN_FILE, RecordingWriter
from pipelines.simulation.labels import LABELS_FILE, LabelsFile
from pipelines.simulation.scenario import BadScenario, Scenario
from pipelines.simulation.simulation import Simulation
from pipelines.simulation.transport import SimulatedMessage


class Bus:
    """Gives messages the offsets that a bus of one partition would give them."""

    def __init__(self) -> None:
        self._codec = Codec(MESSAGE_TYPES)
        self._offsets: Counter[str] = Counter()

    def record(self, simulated: SimulatedMessage) -> Record:
        """The record of one message as it arrives."""
        encoded = self._codec.encode(simulated.message)
        offset = self._offsets[encoded.topic]
        self._offsets[encoded.topic] += 1
        return Record(
            encoded.topic, 0, offset, encoded.key, encoded.headers, encoded.value, simulated.arrives_at
        )  # fmt: skip


def write_simulated_recording(
    scenario: Scenario, folder: Path, tell: Callable[[int, float], None] = lambda count, at: None
) -> LabelsFile:
    """Write the run to `folder` (run.json, messages.jsonl.gz, labels.json) and return its labels.

    `tell` hears the number of messages and the job's time, every thousand. Raises BadScenario where the folder holds a
    recording already, NotARecording where the noise cannot be read.
    """
    folder = Path(folder)
    if (folder / RUN_FILE).exists():
        raise BadScenario(f"{folder} holds a recorded run already; give another folder")
    simulation = Simulation(scenario)
    bus = Bus()
    with RecordingWriter(folder, scenario.job, now=scenario.start_at) as writer:
        for count, simulated in enumerate(simulation.messages()):
            writer.write(bus.record(simulated))
            if count % 1000 == 0:
                tell(count, simulated.arrives_at - scenario.start_at)
    labels = simulation.labels_file()
    (folder / LABELS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(labels), indent=2) + b"\n")
    return labels


def read_labels(folder: Path) -> LabelsFile:
    """labels.json of a simulated recording. Raises BadScenario where there is none."""
    path = Path(folder) / LABELS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=LabelsFile)
    except (OSError, msgspec.DecodeError) as error:
        raise BadScenario(
            f"{path} cannot be read ({error}); give a folder that `transom simulate telemetry` wrote"
        ) from error
