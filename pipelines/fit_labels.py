"""What is known of a recorded run beside its messages: labelled faults, and what people said of its verdicts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from detectors.ensemble.feedback import Judged
from detectors.ensemble.says import METRIC
from detectors.verdict import VERDICT_TYPES, Verdict
from ingest.codec import Codec, Undecodable
from pipelines.evaluate.fault_runs import labels_of
from pipelines.evaluate.matching import TOLERANCE_SECONDS
from pipelines.fault_corpus.corpus import CORPUS_FILE, read_corpus_run
from pipelines.recording import read_recording
from pipelines.simulation.labels import LABELS_FILE
from pipelines.simulation.recorded import read_labels
from recovery.action import RECOVERY_TYPES, Command

OF_ENSEMBLE = frozenset(("straggler", "data_stall"))


class Span(NamedTuple):
    """A fault that was really there. Times in UTC seconds, `ended_at` infinite where it lasted to the end."""

    fault_class: str
    rank: int | None
    onset_at: float
    ended_at: float


def spans_of(folder: Path) -> tuple[Span, ...]:
    """Labelled faults of a run: labels.json of a simulated one, otherwise what was injected."""
    if (folder / LABELS_FILE).is_file():
        return tuple(
            Span(
                label.fault_class, label.ranks[0] if len(label.ranks) == 1 else None, label.onset_at,
                math.inf if label.end_at is None else label.end_at,
            )
            for label in read_labels(folder).labels
        )  # fmt: skip
    corpus = read_corpus_run(folder) if (folder / CORPUS_FILE).is_file() else None
    return tuple(
        Span(
            min(label.right.classes), label.ranks[0] if len(label.ranks) == 1 else None, label.onset_at,
            math.inf if label.ended_at is None else label.ended_at,
        )
        for label in labels_of(folder, corpus)
    )  # fmt: skip


def judged_of(folder: Path) -> list[Judged]:
    """People's last words on the verdicts of a recording that carry the ensemble's score."""
    verdicts = _verdicts(folder)
    codec = Codec(RECOVERY_TYPES)
    last: dict[tuple[str, str], Command] = {}
    for record in read_recording(folder):
        if record.topic != "commands":
            continue
        try:
            message = codec.decode(record.headers, record.value)
        except Undecodable:
            continue
        if isinstance(message, Command) and message.verb == "feedback" and message.feedback:
            known = last.get((message.incident_id, message.author))
            if known is None or message.at >= known.at:
                last[message.incident_id, message.author] = message
    found = []
    for command in last.values():
        verdict = verdicts.get(command.incident_id)
        scores = [] if verdict is None else [one.value for one in verdict.evidence if one.metric == METRIC]
        if verdict is not None and command.feedback and scores and scores[0] is not None:
            found.append(Judged(verdict.fault_class, command.feedback, scores[0]))
    return found


def missed_spans(folder: Path) -> tuple[Span, ...]:
    """Labelled faults of one rank, of classes that the ensemble may speak of, that no recorded verdict tells of."""
    verdicts = _verdicts(folder).values()
    if not verdicts:
        return ()  # nothing was listening
    return tuple(
        span for span in spans_of(folder)
        if span.fault_class in OF_ENSEMBLE and span.rank is not None and not any(
            verdict.fault_class == span.fault_class
            and span.onset_at - TOLERANCE_SECONDS <= verdict.onset_at <= span.ended_at + TOLERANCE_SECONDS
            for verdict in verdicts
        )
    )  # fmt: skip


def _verdicts(folder: Path) -> dict[str, Verdict]:
    """The first revision of each recorded verdict, by id: its evidence is what opened it; class as it was last."""
    codec = Codec(VERDICT_TYPES)
    found: dict[str, Verdict] = {}
    for record in read_recording(folder):
        if record.topic == "verdicts":
            try:
                verdict = codec.decode(record.headers, record.value)
            except Undecodable:
                continue
            if isinstance(verdict, Verdict):
                found.setdefault(verdict.verdict_id, verdict)
    return found
