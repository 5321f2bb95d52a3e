"""An incident in time: its moments in order, the stretch it was felt, and the marks that a chart bears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.ledger.shapes import IncidentStory, IncidentView, JobView
from ui.charts import AMBER, RED, SLATE, Mark, Span
from ui.views import Start, onset
from ui.words import SEVERITY_MARKS, VERB_WORDS, class_words

CHART_MARKS_MAX = 40
AROUND_SECONDS = 25.0  # of a chart before the onset and after the end


@dataclass(frozen=True, slots=True)
class Moment:
    """One point of an incident's timeline; `since` is the seconds from the moment before."""

    label: str
    at: float
    since: float | None
    text: str = ""


STATE_MOMENTS = {  # a state of recovery.incident → what a person sees there
    "awaiting_approval": "Asked",
    "held": "Held",
    "stopping": "Stop",
    "checking": "Ranks gone",  # and their nodes are tried out
    "selecting": "Ranks gone",
    "starting": "Start",
    "resolved": "Resolved",
    "relapsed": "Relapsed",
    "superseded": "Superseded",
    "stopped": "Stopped",
    "gave_up": "Gave up",
    "ignored": "Ignored",
}


_MOMENT_ORDER = ("Onset", "Verdict", "Decision", *dict.fromkeys(STATE_MOMENTS.values()), "First step", "Over")
_ENDS = frozenset({"Resolved", "Relapsed", "Superseded", "Stopped", "Gave up", "Ignored"})


def timeline(
    story: IncidentStory, starts: Sequence[Start] = (), first_step_at: float | None = None
) -> tuple[Moment, ...]:
    """Onset → verdict → decision → stop → start → first step → resolved, with the seconds between them."""
    row = story.incident
    step = f"step {row.onset_step:,}" if row.onset_step is not None else ""
    found: dict[str, tuple[float, str]] = {"Onset": (onset(row), step)}
    settled = [verdict for verdict in story.verdicts if verdict.settled] or list(story.verdicts)
    if settled:
        first = min(settled, key=lambda verdict: verdict.revision)
        found["Verdict"] = (first.at, class_words(first.fault_class))
    else:
        found["Verdict"] = (row.opened_at, class_words(row.fault_class))
    if story.actions:
        action = story.actions[0]
        found["Decision"] = (action.at, VERB_WORDS.get(action.verb, action.verb))
    for transition in story.transitions:
        label = STATE_MOMENTS.get(transition.state)
        if label is not None and label not in found:
            found[label] = (transition.at, transition.cause.replace("_", " "))
    following = next((start for start in starts if row.action and start.attempt == row.action.next_attempt), None)
    if following is not None:
        found["Start"] = (following.at, f"attempt {following.attempt}")
    if first_step_at is not None:
        found["First step"] = (first_step_at, "training again")
    if row.closed_at is not None and not _ENDS & set(found):
        found["Over"] = (row.closed_at, "as detection sees it")
    ordered = sorted(found.items(), key=lambda entry: (entry[1][0], _MOMENT_ORDER.index(entry[0])))
    moments: list[Moment] = []
    for label, (at, text) in ordered:
        moments.append(Moment(label, at, at - moments[-1].at if moments else None, text))
    return tuple(moments)


def recover_seconds(moments: Sequence[Moment]) -> float | None:
    """From the onset to the first step of the next attempt; None where there is none (yet)."""
    at = {moment.label: moment.at for moment in moments}
    return at["First step"] - at["Onset"] if {"First step", "Onset"} <= set(at) else None


def restart_marks(starts: Sequence[Start], begin: float | None = None) -> tuple[Mark, ...]:
    """A mark where each attempt but the first was started; only those since `begin`."""
    shown = [start for start in starts[1:] if begin is None or start.at >= begin]
    return tuple(Mark(start.at, f"attempt {start.attempt}", SLATE) for start in shown[-CHART_MARKS_MAX:])


def job_window(job: JobView, starts: Sequence[Start], seconds: float | None, now: float) -> tuple[float | None, float]:
    """What a job's chart shows: the last `seconds` of it (None: all), up to now or to when it was last heard."""
    end = now if job.state == "running" else job.last_seen_at or now
    first = starts[0].at if starts else job.started_at
    if seconds is None:
        return first, end
    return max(first or 0.0, end - seconds), end


def colour_of(row: IncidentView) -> str:
    return AMBER if row.severity in {"warning", "info"} else RED


def incident_marks(incidents: Sequence[IncidentView]) -> tuple[Mark, ...]:
    """A mark with the class at the onset of each incident."""
    rows = sorted(incidents, key=onset)[-CHART_MARKS_MAX:]
    return tuple(
        Mark(
            onset(row),
            f"{SEVERITY_MARKS.get(row.severity, '○')} {class_words(row.fault_class)}",
            colour_of(row),
            top=True,
        )
        for row in rows
    )


def incident_span(row: IncidentView, moments: Sequence[Moment]) -> Span:
    """The stretch in which the fault was felt: to the first step of the next attempt, or to its end."""
    at = {moment.label: moment.at for moment in moments}
    end = at.get("First step", row.closed_at)
    return Span(onset(row), end, class_words(row.fault_class), colour_of(row))


def chart_window(row: IncidentView, moments: Sequence[Moment], now: float) -> tuple[float, float]:
    """What the incident's chart shows: some time around the fault."""
    end = max([moment.at for moment in moments if moment.label not in _ENDS], default=onset(row))
    felt = end - onset(row)
    return onset(row) - AROUND_SECONDS - 0.3 * felt, min(now, end + AROUND_SECONDS + 0.3 * felt)
