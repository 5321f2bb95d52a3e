"""Whatever a replay can read behind one face: a recording of ours, or a historic run of anybody's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from detectors.step_block import StepBlock
from ingest.bus import Record
from ingest.codec import Codec, Encoded
from ingest.events import JOB_TOPICS, MESSAGE_TYPES, Message, Topic
from pipelines.errors import StatedError
from pipelines.evaluate.fault_runs import labels_of
from pipelines.evaluate.feedback import FeedbackCounts, count_feedback
from pipelines.evaluate.matching import Label
from pipelines.evaluate.sim_runs import right_label
from pipelines.historic.mapping import read_mapping
from pipelines.historic.open_run import Format, open_run
from pipelines.historic.replay import replay_historic
from pipelines.historic.run import HistoricRun, Told
from pipelines.recorded_messages import RecordedMessage, read_messages
from pipelines.recording import RUN_FILE, read_recording, read_run
from pipelines.replay import replay_messages
from pipelines.replayed import Replayed
from pipelines.room_configs import detector_config
from pipelines.rule_folder import rules_for
from pipelines.settings import Settings
from pipelines.simulation.labels import LABELS_FILE, LabelsFile, SimulatedLabel

Heard = Callable[[Told], None]


class BadLabels(StatedError):
    """A file of labels cannot be used; the text says why."""


class ReplaySource(Protocol):
    """One run that can be replayed, and read again."""

    @property
    def job(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...

    def replay(self, settings: Settings, heard: Heard) -> Replayed:
        """What detection says under these settings; `heard` is given all that it hears."""
        ...

    def told(self) -> Iterator[Told]:
        """The same messages again."""
        ...

    def records(self) -> Iterator[Record]:
        """The same as a bus would hold them, for a ledger; commands of people with them."""
        ...

    def labels(self) -> tuple[Label, ...]:
        """What was really wrong, where that is written down."""
        ...


class RecordedSource:
    """A recording of `transom record`, `record-faults` or `simulate telemetry`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.job = read_run(folder).job
        self.kind = "a recording of Transom"
        self.notes: tuple[str, ...] = ()

    def replay(self, settings: Settings, heard: Heard) -> Replayed:
        def listened() -> Iterator[RecordedMessage | Record]:
            for message in read_messages(self._folder):
                if isinstance(message, RecordedMessage):
                    heard(message.value)
                yield message

        return replay_messages(listened(), settings)

    def told(self) -> Iterator[Told]:
        return (message.value for message in read_messages(self._folder) if isinstance(message, RecordedMessage))

    def records(self) -> Iterator[Record]:
        return (record for record in read_recording(self._folder) if record.topic in (*JOB_TOPICS, "commands"))

    def labels(self) -> tuple[Label, ...]:
        simulated = self._folder / LABELS_FILE
        return read_labels(simulated) if simulated.is_file() else labels_of(self._folder, None)

    def feedback(self, verdicts: Replayed) -> FeedbackCounts:
        """What people said, by class: right, wrong, not known."""
        return count_feedback(read_recording(self._folder), [*verdicts.live, *verdicts.verdicts])


class HistoricSource:
    """A run that somebody else's program left behind."""

    def __init__(self, run: HistoricRun) -> None:
        self._run = run
        self.job = run.job
        self.kind = run.kind

    @property
    def notes(self) -> tuple[str, ...]:
        return self._run.notes

    def replay(self, settings: Settings, heard: Heard) -> Replayed:
        return replay_historic(self._run, detector_config(settings), rules_for(settings.detect.rules_dir), heard)

    def told(self) -> Iterator[Told]:
        return self._run.told()

    def records(self) -> Iterator[Record]:
        return on_a_bus(messages_of(self._run.told()))

    def labels(self) -> tuple[Label, ...]:
        return ()


def open_source(path: Path, mapping: Path | None, chosen: Format | None) -> ReplaySource:
    """What a path holds. Raises NotARun and NotARecording."""
    if chosen is None and (path / RUN_FILE).is_file():
        return RecordedSource(path)
    return HistoricSource(open_run(path, read_mapping(mapping), chosen))


def messages_of(told: Iterator[Told]) -> Iterator[Message]:
    """Every message by itself."""
    for one in told:
        if isinstance(one, StepBlock):
            yield from one.messages()
        else:
            yield one


def on_a_bus(messages: Iterator[Message]) -> Iterator[Record]:
    """Messages as they would lie on a bus of one partition that took each when it was stamped."""
    codec = Codec(MESSAGE_TYPES)
    offsets: dict[Topic, int] = {}
    for message in messages:
        yield placed(codec.encode(message), offsets, message.at)


def placed(encoded: Encoded, offsets: dict[Topic, int], at: float) -> Record:
    """The next record of its topic."""
    offset = offsets[encoded.topic] = offsets.get(encoded.topic, -1) + 1
    return Record(encoded.topic, 0, offset, encoded.key, encoded.headers, encoded.value, at)


def read_labels(path: Path) -> tuple[Label, ...]:
    """Labels as `simulate telemetry` writes them, or a list of such labels. Raises BadLabels."""
    try:
        text = path.read_bytes()
        if text.lstrip().startswith(b"["):
            found = tuple(msgspec.json.decode(text, type=tuple[SimulatedLabel, ...]))
        else:
            found = msgspec.json.decode(text, type=LabelsFile).labels
    except OSError as error:
        raise BadLabels(f"the labels {path} cannot be read ({error.strerror}); give another file") from error
    except msgspec.MsgspecError as error:
        raise BadLabels(f"{path} is no file of labels ({error}); docs/replay.md shows one") from error
    return tuple(right_label(label) for label in found)
