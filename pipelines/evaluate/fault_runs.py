"""One labelled run, replayed: what detection says of it, beside what was really done to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ingest.codec import Codec, Undecodable
from ingest.events import MESSAGE_TYPES, Metrics
from pipelines.evaluate.expectations import label_of
from pipelines.evaluate.feedback import FeedbackCounts, count_feedback
from pipelines.evaluate.matching import TOLERANCE_SECONDS, Label, Matched, Story, match, stories_of
from pipelines.evaluate.step_arrays import StepArrays, StepCollector
from pipelines.fault_corpus.corpus import CORPUS_FILE, CorpusRun, NoCorpus, corpus_runs, read_corpus_run
from pipelines.fault_corpus.kinds import PARTS
from pipelines.recording import RUN_FILE, read_recording, read_run
from pipelines.replay import replay_records
from pipelines.settings import Settings


@dataclass(frozen=True, slots=True)
class FaultRun:
    """One run: its labels, what was said, and how many of its steps had nothing wrong with them."""

    name: str
    part: str  # "" where a recording belongs to none
    size: str
    labels: tuple[Label, ...]
    stories: tuple[Story, ...]
    matched: Matched
    clean_steps: int
    arrays: StepArrays | None  # of a run of one attempt
    feedback: FeedbackCounts


def labelled_runs(folder: Path) -> list[tuple[Path, CorpusRun | None]]:
    """The runs of a corpus, or the recordings in a folder, or the one that it is. Raises NoCorpus."""
    if any((folder / part).is_dir() for part in PARTS):
        return list(corpus_runs(folder))
    if (folder / RUN_FILE).is_file():
        return [(folder, _corpus_run(folder))]
    found = [path.parent for path in sorted(folder.glob(f"*/{RUN_FILE}"))]
    if not found:
        raise NoCorpus(f"{folder} holds no recorded run; `transom record-faults {folder}` makes a corpus")
    return [(path, _corpus_run(path)) for path in found]


def _corpus_run(folder: Path) -> CorpusRun | None:
    return read_corpus_run(folder) if (folder / CORPUS_FILE).is_file() else None


def evaluate_run(folder: Path, corpus: CorpusRun | None, settings: Settings) -> FaultRun:
    """Replay one run through the live pipeline's code and hold it against its labels. Raises NotARecording."""
    records = list(read_recording(folder))
    replayed = replay_records(records, settings)
    codec = Codec(MESSAGE_TYPES)
    collectors: dict[int, StepCollector] = {}
    for record in records:
        if record.topic != "metrics":
            continue
        try:
            message = codec.decode(record.headers, record.value)
        except Undecodable:
            continue  # replay has counted it
        if isinstance(message, Metrics):
            collectors.setdefault(message.attempt, StepCollector()).take(message)
    labels = labels_of(folder, corpus)
    stopped_at = corpus.stopped_at if corpus is not None and corpus.stopped_at is not None else float("inf")
    # Ranks that are told to stop lose each other: what is said of that is no word on the fault.
    stories = [story for story in stories_of(replayed.verdicts, replayed.said_at) if story.opened_at <= stopped_at]
    ends = [at for collector in collectors.values() for at in collector.ended_at.values()]
    alone = next(iter(collectors.values())) if len(collectors) == 1 else None
    return FaultRun(
        name=folder.name,
        part=corpus.part if corpus is not None else "",
        size=corpus.size if corpus is not None else "",
        labels=labels,
        stories=tuple(stories),
        matched=match(labels, stories),
        clean_steps=sum(is_clean(at, labels) for at in ends),
        arrays=alone.arrays() if alone is not None else None,
        feedback=count_feedback(records, [*replayed.live, *replayed.verdicts]),
    )


def labels_of(folder: Path, corpus: CorpusRun | None) -> tuple[Label, ...]:
    """What was injected. A fault of a recording with several ends where the next one begins."""
    if corpus is not None:
        label = label_of(corpus.fault, corpus.severity) if corpus.fault is not None else None
        return () if label is None else (_named(label, corpus.kind),)
    found = [label for fault in read_run(folder).labels if (label := label_of(fault)) is not None]
    found.sort(key=lambda label: label.onset_at)
    return tuple(_ended(found))


def _named(label: Label, kind: str) -> Label:
    return Label(kind, label.right, label.onset_at, label.ended_at, label.ranks, label.node, label.severity)


def _ended(labels: Sequence[Label]) -> Iterator[Label]:
    for index, label in enumerate(labels):
        following = labels[index + 1].onset_at if index + 1 < len(labels) else None
        if label.ended_at is None and following is not None:
            ended_at = following - TOLERANCE_SECONDS - 0.1
            yield Label(
                label.kind, label.right, label.onset_at, max(label.onset_at, ended_at), label.ranks, label.node,
                label.severity,
            )  # fmt: skip
        else:
            yield label


def is_clean(at: float, labels: Sequence[Label]) -> bool:
    """A step that ended now had no fault in it, and none shortly before it."""
    return not any(label.covers(at, TOLERANCE_SECONDS) for label in labels)


def told(outcome_of: FaultRun) -> dict[str, object]:
    """The run in a form that JSON can carry."""
    return {
        "run": outcome_of.name,
        "part": outcome_of.part,
        "size": outcome_of.size,
        "clean_steps": outcome_of.clean_steps,
        "faults": [
            {
                "kind": outcome.label.kind, "severity": outcome.label.severity, "found": outcome.found,
                "said": outcome.said, "delay_seconds": outcome.delay_seconds, "culprit_right": outcome.culprit_right,
            }
            for outcome in outcome_of.matched.outcomes
        ],
        "false": [
            {"class": story.fault_class, "culprits": msgspec.to_builtins(story.culprits), "summary": story.summary}
            for story in outcome_of.matched.false
        ],
    }  # fmt: skip
