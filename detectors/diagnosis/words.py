"""How a diagnosis says what it found, in a sentence that a tired person understands, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from detectors.diagnosis.first_cause import MACHINE, TIMED_OUT, Behind
from detectors.diagnosis.sightings import Sighting
from detectors.diagnosis.symptoms import words

if TYPE_CHECKING:
    from detectors.diagnosis.diagnosis import Diagnosis

SAID_MAX = 3
CLOCKS_SECONDS = 0.05  # in which two nodes' times tell no order


def sentence(found: Diagnosis, cause: Sighting | None, behind: Behind | None, reporters: int = 0) -> str:
    """What happened, to whom, when, and who only suffered from it."""
    if cause is None:
        return _nothing(found)
    if cause.symptom.name in TIMED_OUT:
        return _waited(found, behind, reporters) + _progress(found)
    text = f"{_subject(found, cause)} {cause.symptom.what}{_when(found)}"
    if cause.symptom.group == "sufferer":
        if found.suspects:
            text += f"; the peer it names, {' and '.join(found.suspects[:SAID_MAX])}, is the suspect, not who says so"
        else:
            text += "; that is what a victim says, and no line names the cause"
    return f"{text}.{_progress(found)}{_victims(found)}"


def confidence_of(found: Diagnosis, cause: Sighting, ordered: Sequence[Sighting], behind: Behind | None) -> float:
    """How sure the first cause is, 0 to 1, by what kind of line it rests on and whether its time is known."""
    kind = cause.symptom.group
    if kind == "sufferer":
        return (
            0.7
            if behind is not None and found.rank is not None
            else 0.5
            if found.rank is not None or found.suspects
            else 0.3
        )
    sure = {"kernel": 0.95, "scheduler": 0.95, "program": 0.85, "user": 0.85, "exit": 0.5, "warning": 0.5}[kind]
    rivals = {
        one.symptom.name for one in ordered
        if one.symptom.group in ("kernel", "scheduler", "program", "user") and one.symptom.name != cause.symptom.name
        and not one.weak and _in_no_order(one, cause)
    }  # fmt: skip
    return round(sure / (1 + 0.5 * len(rivals)), 2)


def _in_no_order(one: Sighting, cause: Sighting) -> bool:
    """Two sources whose times, if they are known, lie no further apart than clocks of two nodes do."""
    if one.source_order == cause.source_order:
        return False
    if one.at is None or cause.at is None:
        return True
    one_clock = one.speaker.node != "" and one.speaker.node == cause.speaker.node
    return not one_clock and abs(one.at - cause.at) < CLOCKS_SECONDS


def _subject(found: Diagnosis, cause: Sighting) -> str:
    if found.workload:
        return "Every rank that speaks"
    place = f" on {found.node}" if found.node else ""
    if found.rank is not None:
        return f"Rank {found.rank}{place}"
    if cause.symptom.group == "scheduler" and cause.symptom.name not in MACHINE:
        return "The job"
    if found.node:
        device = (
            f" (GPU {found.device})"
            if found.device
            else f" (local {found.local_rank})"
            if found.local_rank is not None
            else ""
        )
        return f"Node {found.node}{device}"
    if found.device:
        return f"The node of GPU {found.device}"
    if found.local_rank is not None:
        return f"Local rank {found.local_rank}"
    return "A node that the log does not name" if cause.symptom.group == "kernel" else "The job"


def _waited(found: Diagnosis, behind: Behind | None, reporters: int) -> str:
    said = f"{reporters} ranks" if reporters > 1 else "One rank" if reporters == 1 else "Some rank"
    waited = f"{said} waited for a collective until it timed out{_when(found)}"
    if behind is not None and found.rank is not None:
        gap = behind.others - behind.completed
        return (
            f"{waited}: rank {found.rank}{_on(found)} is {gap:,} collective{'s' if gap > 1 else ''} behind the others "
            f"({behind.completed:,} completed, they {behind.others:,}), and they waited for it."
        )
    if behind is not None:
        named = ", ".join(str(rank) for rank in behind.ranks[: 2 * SAID_MAX])
        return f"{waited}: ranks {named} are behind the others, and one of them is the cause."
    if found.rank is not None:
        return f"{waited}: only rank {found.rank}{_on(found)} did not say so, and is the suspect."
    return f"{waited}. Who waits is a victim; no line tells which rank did not come."


def _on(found: Diagnosis) -> str:
    return f" on {found.node}" if found.node else ""


def _when(found: Diagnosis) -> str:
    return f" at {found.at}" if found.at else ""


def _progress(found: Diagnosis) -> str:
    if found.last_step is None:
        return ""
    loss = "" if found.last_loss is None else f" (loss {found.last_loss:.4g})"
    return f" The last step seen was {found.last_step:,}{loss}."


def _victims(found: Diagnosis) -> str:
    if not found.victims:
        return ""
    return f" {found.victims:,} other rank{'s' if found.victims > 1 else ''} only suffered from it."


def _nothing(found: Diagnosis) -> str:
    looked = found.looked
    if looked.sources == 0:
        return "Nothing was read: there is no log in what was given."
    files = "one source" if looked.sources == 1 else f"{looked.sources:,} sources"
    lines = "one line" if looked.lines == 1 else f"{looked.lines:,} lines"
    text = f"No cause found in {lines} of {files}."
    if looked.last_step is not None:
        text += f" The last step seen was {looked.last_step:,}."
    if found.recovered:
        named = ", ".join(_said(one.symptom) for one in found.recovered[:SAID_MAX])
        text += f" The job went on after: {named}."
    if found.consequences:
        text += " Some lines tell of trouble that somebody else had; none tells what it was."
    return text


def _said(name: str) -> str:
    return name if name in words() else f"rule {name}"
