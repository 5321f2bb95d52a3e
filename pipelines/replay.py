"""`transom replay`: the live pipeline's detection over a recorded run, under the recording's own clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from detectors.clues import Place
from detectors.verdict import VERDICT_TYPES, Verdict
from ingest.bus import Record
from ingest.codec import Codec
from ingest.events import JOB_TOPICS
from pipelines.detection import Detection
from pipelines.recorded_messages import RecordedMessage, read_messages
from pipelines.recording import in_bus_order
from pipelines.room_configs import detector_config
from pipelines.rule_folder import rules_for
from pipelines.settings import Settings

CONCLUDE_SECONDS = 0.05  # as often as the service looks
AFTERWARDS_SECONDS = 10.0  # what only time decides (silence, coalescing) is decided within it


@dataclass(frozen=True, slots=True)
class Difference:
    """Two sets of verdicts, compared by id: the newest revision of each counts."""

    same: tuple[Verdict, ...] = ()
    changed: tuple[tuple[Verdict, Verdict], ...] = ()
    gone: tuple[Verdict, ...] = ()
    new: tuple[Verdict, ...] = ()


@dataclass(slots=True)
class Replayed:
    """What came out, and what the live run had said."""

    verdicts: list[Verdict] = field(default_factory=list)
    said_at: list[float] = field(default_factory=list)  # when each verdict came out, by the recording's clock
    live: list[Verdict] = field(default_factory=list)
    unreadable: int = 0

    def say(self, verdicts: list[Verdict], at: float) -> None:
        self.verdicts += verdicts
        self.said_at += [at] * len(verdicts)

    def lines(self) -> bytes:
        """One JSON a line, in order: the same recording gives the same bytes."""
        encoder = msgspec.json.Encoder()
        return b"".join(encoder.encode(verdict) + b"\n" for verdict in self.verdicts)


def replay_records(records: Iterable[Record], settings: Settings) -> Replayed:
    """Replay the records of a recording as they were recorded."""
    return replay_messages(in_bus_order(records), settings)


def replay_messages(messages: Iterable[RecordedMessage | Record], settings: Settings) -> Replayed:
    """Feed what a recording holds, in the order of the bus; time is what the bus had stamped on it."""
    detection = Detection(detector_config(settings), rules_for(settings.detect.rules_dir))
    codec = Codec(VERDICT_TYPES)
    result = Replayed()
    concluded_at = now = 0.0
    for record in messages:
        if isinstance(record, Record) and record.topic == "verdicts":
            result.live.append(codec.decode(record.headers, record.value))
        if record.topic not in JOB_TOPICS:
            continue
        at = record.appended_at
        if at > now:
            now = at
        if isinstance(record, Record):
            trouble = detection.feed(record)
        else:
            place = Place(record.topic, record.partition, record.offset, at)
            trouble = detection.hear(record.value, place, at)
        result.unreadable += trouble is not None
        if now - concluded_at >= CONCLUDE_SECONDS:
            result.say(detection.conclude(now), now)
            concluded_at = now
    for tick in range(int(AFTERWARDS_SECONDS / CONCLUDE_SECONDS)):
        at = now + tick * CONCLUDE_SECONDS
        result.say(detection.conclude(at), at)
    return result


def compare(live: Iterable[Verdict], replayed: Iterable[Verdict]) -> Difference:
    """What differs between two sets of verdicts, apart from offsets on the bus."""
    before, after = _newest(live), _newest(replayed)
    both = [name for name in before if name in after]
    equal = [name for name in both if _told(before[name]) == _told(after[name])]
    return Difference(
        same=tuple(after[name] for name in equal),
        changed=tuple((before[name], after[name]) for name in both if name not in equal),
        gone=tuple(verdict for name, verdict in before.items() if name not in after),
        new=tuple(verdict for name, verdict in after.items() if name not in before),
    )


def _newest(verdicts: Iterable[Verdict]) -> dict[str, Verdict]:
    newest: dict[str, Verdict] = {}
    for verdict in verdicts:
        known = newest.get(verdict.verdict_id)
        if known is None or verdict.revision >= known.revision:
            newest[verdict.verdict_id] = verdict
    return newest


def _told(verdict: Verdict) -> Verdict:
    evidence = tuple(
        msgspec.structs.replace(item, topic=None, partition=None, offset=None) for item in verdict.evidence
    )
    return msgspec.structs.replace(verdict, evidence=evidence)


def replay_recording(recording: Path, output: Path | None, settings: Settings, console: Console) -> Difference:
    """Replay a run directory, print the verdicts and how they differ from the live ones. Raises NotARecording."""
    messages = read_messages(recording)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replaying", total=None)

        def counted(records: Iterable[RecordedMessage | Record]) -> Iterator[RecordedMessage | Record]:
            for number, record in enumerate(records):
                if number % 500 == 0:
                    progress.update(task, completed=number, description=f"replaying, {number} messages")
                yield record

        result = replay_messages(counted(messages), settings)
    for verdict in _newest(result.verdicts).values():
        told = f"attempt {verdict.attempt}  [bold]{verdict.fault_class}[/]  {escape(verdict.summary)}"
        console.print(told, soft_wrap=True)
    if not result.verdicts:
        console.print("No verdicts: nothing is wrong with this run.")
    difference = compare(result.live, result.verdicts)
    if result.live:
        console.print(
            f"Against the live run: {len(difference.same)} the same, {len(difference.changed)} changed, "
            f"{len(difference.gone)} gone, {len(difference.new)} new."
        )
    if result.unreadable:
        console.print(f"[yellow]{result.unreadable} messages could not be read.[/]")
    if output is not None:
        output.write_bytes(result.lines())
    return difference
