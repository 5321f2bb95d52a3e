"""What people said of verdicts, by class."""

from __future__ import annotations

from typing import Any

from detectors.verdict import Verdict
from ingest.bus import Record
from ingest.codec import Codec
from pipelines.evaluate.feedback import UNNAMED, Counts, added, count_feedback
from recovery.action import RECOVERY_TYPES, Command


def record(message: Any, offset: int = 0) -> Record:
    encoded = Codec(RECOVERY_TYPES).encode(message)
    return Record(encoded.topic, 0, offset, encoded.key, encoded.headers, encoded.value, 1.0)


def says(incident: str, word: str, *, at: float = 1.0, author: str = "ada", verb: str = "feedback") -> Record:
    return record(
        Command(
            command_id=f"{incident}{at}{author}", job="job", at=at, verb=verb, incident_id=incident,  # type: ignore[arg-type]
            author=author, feedback=word,  # type: ignore[arg-type]
        )
    )  # fmt: skip


def verdict(name: str, fault_class: str, revision: int = 0) -> Verdict:
    return Verdict(
        verdict_id=name, revision=revision, job="job", attempt=1, fault_class=fault_class,  # type: ignore[arg-type]
        severity="warning", onset_at=1.0, at=1.0, advice="notify", summary="s",
    )  # fmt: skip


def test_words_are_counted_by_the_newest_class_of_their_incident() -> None:
    verdicts = [verdict("a", "unknown"), verdict("a", "rank_lost", 1), verdict("b", "straggler")]
    counts = count_feedback(
        [says("a", "true_positive"), says("b", "false_positive"), says("b", "unknown", author="bob"),
         says("c", "true_positive"), says("b", "", verb="acknowledge")],
        verdicts,
    )  # fmt: skip
    assert counts == {"rank_lost": Counts(right=1), "straggler": Counts(wrong=1, unknown=1), UNNAMED: Counts(right=1)}


def test_only_a_persons_last_word_counts() -> None:
    records = [says("a", "true_positive", at=1.0), says("a", "false_positive", at=2.0)]
    assert count_feedback(records, [verdict("a", "hang")]) == {"hang": Counts(wrong=1)}
    assert count_feedback(records[::-1], [verdict("a", "hang")]) == {"hang": Counts(wrong=1)}


def test_counts_of_runs_are_added() -> None:
    assert added([{"hang": Counts(1, 0, 2)}, {"hang": Counts(0, 3, 0)}, {}]) == {"hang": Counts(1, 3, 2)}
