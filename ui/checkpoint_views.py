"""Checkpoint events of a job → steps by tier: what is complete, where, how big, how old, and what could be resumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ingest.events import CheckpointEvent
from pipelines.ledger.shapes import Row
from ui.words import age_words, seconds_words

STEPS_SHOWN_MAX = 60
TIERS = ("memory", "peer", "disk", "object")
GONE = frozenset({"evicted", "damaged"})
HEADS = ("Step", "State", "Memory", "Peer", "Disk", "Object store", "Size", "Took", "Age", "Notes")
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(slots=True)
class StepStory:
    """What was said about one step; `shards` by tier are ranks that have told of theirs."""

    step: int
    at: float = 0.0
    attempt: int = 0  # the newest that saved it: what a later attempt saves anew is not what was rejected
    complete: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    shards: dict[str, dict[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    verified: bool = False
    rejected: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        if self.rejected:
            return "✕ rejected"
        if self.verified:
            return "✓ verified"
        if self.complete - self.gone:
            return "● complete"
        return "○ let go" if self.complete else "… not complete"

    @property
    def size_bytes(self) -> int:
        return max((sum(sizes.values()) for sizes in self.shards.values()), default=0)


def steps_of(rows: Iterable[Row]) -> tuple[StepStory, ...]:
    """The newest steps first."""
    stories: dict[int, StepStory] = {}
    rejections: list[CheckpointEvent] = []  # each is of its step and of all later ones that had been saved by then
    for row in rows:
        event = row.message
        if isinstance(event, CheckpointEvent) and event.state == "rejected":
            rejections.append(event)
        elif isinstance(event, CheckpointEvent):
            _take(stories.setdefault(event.step, StepStory(event.step)), event)
    for bad in rejections:
        for story in stories.values():
            if story.step >= bad.step and story.attempt <= bad.attempt:
                story.rejected = True
                story.notes.append(f"rejected: {bad.reason}" if bad.reason else "rejected")
    return tuple(stories[step] for step in sorted(stories, reverse=True)[:STEPS_SHOWN_MAX])


def restorable(steps: Sequence[StepStory]) -> StepStory | None:
    """The newest complete step that is not rejected."""
    return next((one for one in steps if one.complete - one.gone and not one.rejected), None)


def table_rows(steps: Sequence[StepStory], now: float) -> tuple[tuple[str, ...], ...]:
    """One line for each step."""
    return tuple(
        (
            f"{one.step:,}", one.state, *(_tier_words(one, tier) for tier in TIERS), size_words(one.size_bytes),
            seconds_words(one.seconds) if one.seconds else "–", age_words(one.at or None, now),
            "; ".join(dict.fromkeys(one.notes)) or "–",
        )
        for one in steps
    )  # fmt: skip


def size_words(size_bytes: int) -> str:
    """Bytes as a person says them."""
    if size_bytes <= 0:
        return "–"
    for unit, name in _SIZES:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes} B"


def _take(story: StepStory, event: CheckpointEvent) -> None:
    if event.state in {"sealed", "backed_up", "durable", "complete"}:
        story.at = max(story.at, event.at)
        story.attempt = max(story.attempt, event.attempt)
    if event.state == "complete":
        story.complete.add(event.tier)
        story.gone.discard(event.tier)
    if event.state in GONE:
        story.gone.add(event.tier)
    if event.rank >= 0 and event.state in {"sealed", "backed_up", "durable"}:
        story.shards.setdefault(event.tier, {})[event.rank] = event.size_bytes
        story.seconds = max(story.seconds, event.seconds)
    story.verified |= event.state == "verified"
    if event.reason and event.state in {"damaged", "failed", "fallback"}:
        story.notes.append(f"{event.state}: {event.reason}")


def _tier_words(story: StepStory, tier: str) -> str:
    if tier in story.gone:
        return "✕ gone"
    if tier in story.complete:
        return "✓ complete"
    shards = len(story.shards.get(tier, ()))
    return f"{shards} shard{'s' if shards != 1 else ''}" if shards else "–"
