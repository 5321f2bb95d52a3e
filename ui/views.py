"""Ledger rows → what a page shows: key figures, tables, filters. Pure: no page, no clock, no request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import pandas as pd

from detectors.verdict import Evidence
from pipelines.ledger.measures import measures_in_words
from pipelines.ledger.shapes import Health, IncidentStory, IncidentView, JobView, LogRow, Series
from recovery.action import Action
from ui.words import (
    CLASS_WORDS,
    JOB_STATE_MARKS,
    METRICS,
    OUTCOME_WORDS,
    SEVERITIES,
    SEVERITY_MARKS,
    VERB_WORDS,
    age_words,
    class_words,
    culprit_words,
    number_words,
    precise_clock,
    seconds_words,
    severity_words,
    state_words,
)

STALE_SECONDS = 10.0
NEWEST_INCIDENTS_MAX = 6
LOG_BEFORE_SECONDS = 10.0
LOG_LINES_BEFORE_MAX = 8  # shown before the onset, so that the onset is in sight
LOG_AFTER_SECONDS = 12.0
BUNDLE_SECONDS = 60.0  # of series before the onset and after the end
ERROR_LINE = re.compile(
    r"error|exception|traceback|fatal|\bxid\b|abort|killed|sig(?:kill|segv|bus)|\bnan\b|out of memory"
    r"|watchdog|panic|timed? ?out",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One key figure of the overview."""

    label: str
    value: str
    note: str
    help: str


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a job."""

    attempt: int
    at: float
    resume_step: int | None
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Filters:
    """What the incidents table is narrowed to; an empty tuple lets everything through."""

    jobs: tuple[str, ...] = ()
    severities: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    states: tuple[str, ...] = ()


def figures(
    jobs: Sequence[JobView],
    incidents: Sequence[IncidentView],
    recoveries: Sequence[float],
    health: Health,
    now: float,
) -> tuple[Figure, ...]:
    """The overview's key figures; `recoveries`: seconds from the onset of a fault to the first new step."""
    running = [job for job in jobs if job.state == "running"]
    opened = [row for row in incidents if row.status == "open"]
    goodputs = [job.goodput for job in running or jobs if job.goodput is not None]
    checkpoints = [job.checkpoint for job in running or jobs if job.checkpoint is not None]
    newest = max(checkpoints, key=lambda checkpoint: checkpoint.event_at, default=None)
    seconds = sorted(recoveries)
    return (
        Figure("Jobs running", str(len(running)), f"of {len(jobs)} known", "Jobs whose ranks are training now."),
        Figure(
            "Open incidents",
            str(len(opened)),
            _worst_words(opened),
            "Incidents that are not over yet. The mark shows the worst severity among them.",
        ),
        Figure(
            "Goodput",
            f"{100.0 * sum(goodputs) / len(goodputs):.1f} %" if goodputs else "–",
            "time spent on steps kept",
            "Share of the job's wall time that went into steps that were not lost to a fault or a restart.",
        ),
        Figure(
            "Median to recover",
            seconds_words(median(seconds)) if seconds else "–",
            _restart_words(len(seconds), jobs),
            "From the onset of a fault to the first step of the next attempt; and how long a job runs from one failure "
            "to the next (MTTF), on average.",
        ),
        Figure(
            "Newest checkpoint",
            age_words(newest.event_at, now).removesuffix(" ago") if newest else "–",
            f"step {newest.step:,}, {newest.tier}" if newest else "none complete yet",
            "Age of the newest complete checkpoint: what a fault now would cost.",
        ),
        Figure(
            "Data age",
            age_words(health.data_at, now).removesuffix(" ago"),
            _lag_words(health),
            "How old the newest message is that the record service has written down.",
        ),
    )


def _restart_words(restarts: int, jobs: Sequence[JobView]) -> str:
    if not restarts:
        return "no restart yet"
    words = f"{restarts} restart{'s' if restarts != 1 else ''}"
    known = [job.measures for job in jobs if job.measures.mttf_seconds is not None]
    failures = sum(one.failures for one in known)
    between = sum((one.mttf_seconds or 0.0) * one.failures for one in known)
    return f"{words} · MTTF {seconds_words(between / failures)}" if failures else words


def _lag_words(health: Health) -> str:
    behind = sum(health.lag.values())
    return f"{behind:,} record{'s' if behind != 1 else ''} behind" if behind else "record is up to date"


def _worst_words(opened: Sequence[IncidentView]) -> str:
    for severity in SEVERITIES:
        count = sum(1 for row in opened if row.severity == severity)
        if count:
            return f"{SEVERITY_MARKS[severity]} {count} {severity}"
    return "all quiet"


def stale_words(health: Health | None, jobs: Sequence[JobView], now: float, reason: str = "") -> str | None:
    """The sentence of the stale banner, or None while the data are fresh enough."""
    if reason:
        known = health.data_at if health is not None else 0.0
        age = f"What you see is {seconds_words(max(0.0, now - known))} old. " if known else ""
        sentence = reason[:1].upper() + reason[1:].rstrip(".") + "."
        advice = "" if "transom record" in reason else " Is `transom record` running?"
        return age + sentence + advice
    if health is None:
        return None
    if health.status != "ok":
        return f"The record service says: {health.reason or health.status}"
    running = any(job.state == "running" for job in jobs)
    if running and now - health.data_at > STALE_SECONDS:
        return (
            f"The data are {seconds_words(now - health.data_at)} old although a job is running. "
            "Are `transom record` and the job's launchers alive?"
        )
    return None


def jobs_table(jobs: Sequence[JobView], now: float) -> pd.DataFrame:
    """One line for each job, the ones in trouble first."""
    order = sorted(
        jobs, key=lambda job: (job.state != "running", -job.open_incidents, -(job.started_at or 0.0), job.job)
    )
    return pd.DataFrame(
        {
            "Job": [job.job for job in order],
            "State": [f"{JOB_STATE_MARKS.get(job.state, '○')} {job.state}" for job in order],
            "Attempt": [job.attempt for job in order],
            "Ranks": [job.world_size for job in order],
            "Step": [f"{job.last_step:,}" if job.last_step is not None else "–" for job in order],
            "Goodput": [100.0 * job.goodput if job.goodput is not None else None for job in order],
            "Newest checkpoint": [_checkpoint_words(job, now) for job in order],
            "Open incidents": [job.open_incidents for job in order],
            "Last heard": [age_words(job.last_seen_at, now) for job in order],
        }
    )


def _checkpoint_words(job: JobView, now: float) -> str:
    if job.checkpoint is None:
        return "none yet"
    return f"step {job.checkpoint.step:,} · {job.checkpoint.tier} · {age_words(job.checkpoint.event_at, now)}"


def narrowed(incidents: Sequence[IncidentView], filters: Filters) -> tuple[IncidentView, ...]:
    """The incidents that pass, in their order."""
    return tuple(
        row
        for row in incidents
        if (not filters.jobs or row.job in filters.jobs)
        and (not filters.severities or row.severity in filters.severities)
        and (not filters.classes or row.fault_class in filters.classes)
        and (not filters.states or row.status in filters.states)
    )


def incidents_table(incidents: Sequence[IncidentView], now: float) -> pd.DataFrame:
    """One line for each incident, as the incidents page shows it."""
    return pd.DataFrame(
        {
            "Severity": [[severity_words(row.severity)] for row in incidents],
            "Class": [class_words(row.fault_class) for row in incidents],
            "Culprit": [culprit_words(pairs(row)) for row in incidents],
            "What happened": [row.summary for row in incidents],
            "Onset": [pd.Timestamp(onset(row), unit="s").round("s") for row in incidents],
            "Age": [age_words(onset(row), now) for row in incidents],
            "State": [state_words(row.state, row.status) for row in incidents],
            "Done": [action_words(row) for row in incidents],
            "Acknowledged": [row.acknowledged_by or "" for row in incidents],
            "Job": [row.job for row in incidents],
        }
    )


def class_options(incidents: Sequence[IncidentView]) -> list[str]:
    """All classes that a filter can offer: those seen first."""
    seen = list(dict.fromkeys(row.fault_class for row in incidents))
    return seen + [name for name in CLASS_WORDS if name not in seen]


def onset(row: IncidentView) -> float:
    """When it began, as far as we know."""
    return row.onset_at if row.onset_at is not None else row.opened_at


def pairs(row: IncidentView) -> tuple[tuple[int | None, str | None], ...]:
    return tuple((culprit.rank, culprit.node) for culprit in row.culprits)


def action_words(row: IncidentView) -> str:
    """What was done about it, in a few words."""
    if row.action is None:
        return "–"
    words = VERB_WORDS.get(row.action.verb, row.action.verb.replace("_", " "))
    if row.outcome == "awaiting_approval":
        return f"waits for approval: {row.action.verb.replace('_', ' ')}"
    if row.action.mode == "observe" or row.outcome == "observed":
        return f"observed only: {row.action.verb.replace('_', ' ')}"
    return words


def facts(row: IncidentView, actions: Sequence[Action] = ()) -> tuple[tuple[str, str], ...]:
    """What was done and from where the job went on, as label and words."""
    action = row.action
    result = [("Advice", row.advice.replace("_", " ") or "–"), ("Action", action_words(row))]
    if action is not None:
        result.append(("Decided by", action.rule or "–"))
        if action.excluded_nodes:
            result.append(("Excluded", ", ".join(action.excluded_nodes)))
        if action.next_attempt is not None:
            where = f", from {action.resume_tier.replace('+', ' and ')}" if action.resume_tier else ""
            step = f"step {action.resume_step:,}{where}" if action.resume_step is not None else "from scratch"
            result += [("Next attempt", str(action.next_attempt)), ("Checkpoint", step)]
    rejected = [entry.reject_from_step for entry in actions if entry.reject_from_step is not None]
    if rejected:
        result.append(("Rejected", f"checkpoints of step {min(rejected):,} and later"))
    elif row.first_bad_step is not None:
        result.append(("First bad step", f"{row.first_bad_step:,}"))
    took = measures_in_words(row.measures)
    if took:
        result.append(("Took", took))
    lost = row.measures.lost_steps if row.measures.lost_steps is not None else steps_lost(row)
    if lost is not None:
        result.append(("Steps lost", str(lost)))
    if row.outcome_text:
        result.append(("Outcome", row.outcome_text))
    return tuple(result)


def steps_lost(row: IncidentView) -> int | None:
    """Steps that are trained again, where a restart resumes before the onset."""
    if row.action is None or row.action.resume_step is None or row.onset_step is None:
        return None
    return max(0, row.onset_step - row.action.resume_step)


def evidence_metrics(story: IncidentStory, present: Sequence[str] = ()) -> list[str]:
    """Metrics to offer for the chart: the evidence's own first, then ours, then what else the job reports."""
    named = [row.metric for row in latest_evidence(story) if row.metric]
    if not named and story.incident.fault_class in {"nan", "numeric"}:
        named = ["train.loss"]
    ours = [metric for metric in METRICS if not present or metric in present]
    return list(dict.fromkeys([*named, "train.step.duration", *ours, *present]))


def latest_evidence(story: IncidentStory) -> tuple[Evidence, ...]:
    """The evidence of the newest revision that has any."""
    for verdict in sorted(story.verdicts, key=lambda verdict: -verdict.revision):
        if verdict.evidence:
            return verdict.evidence
    return ()


def evidence_rows(story: IncidentStory) -> tuple[tuple[str, ...], ...]:
    """What we saw, who, value beside the peers' median, and the rule that took it for evidence."""
    return tuple(
        (
            row.kind,
            row.text,
            culprit_words(((row.rank, row.node),)) if row.rank is not None or row.node else "–",
            row.metric or "–",
            number_words(row.value, row.unit) if row.metric else "–",
            number_words(row.peers_median, row.unit) if row.metric else "–",
            row.rule or "–",
            f"{row.topic}[{row.partition}]@{row.offset}" if row.offset is not None else "–",
        )
        for row in latest_evidence(story)
        if row not in _stacks(story)[1:]
    )


def stack_groups(story: IncidentStory) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    """Where the ranks stood: the sentence, and for each group how many ranks, which and where, and their stack.

    Empty where nobody was asked, or nobody answered.
    """
    stacks = _stacks(story)
    rows = []
    for row in stacks[1:]:
        where, *frames = row.text.split("\n")
        rows.append((number_words(row.value), where[:1].upper() + where[1:], "\n".join(frames) or "no Python frames"))
    sentence = stacks[0].text if rows else ""
    return sentence[:1].upper() + sentence[1:], tuple(rows)


def _stacks(story: IncidentStory) -> tuple[Evidence, ...]:
    """The evidence that groups ranks by their stacks: the first is the sentence, the others are the groups."""
    return tuple(row for row in latest_evidence(story) if row.kind == "stack" and row.unit == "ranks")


STACK_HEADS = ("Ranks", "Which and where", "Stack, innermost first")
EVIDENCE_HEADS = ("Kind", "What we saw", "Who", "Metric", "Value", "Peers' median", "Rule", "Where")
AUDIT_HEADS = ("Time (UTC)", "What", "By", "In words")
ATTEMPT_HEADS = ("Attempt", "Started (UTC)", "Nodes", "From")


def audit_rows(story: IncidentStory) -> tuple[tuple[str, ...], ...]:
    """Decisions, receipts, transitions and people's commands in one order of time."""
    rows: list[tuple[float, str, str, str]] = []
    rows += [(a.at, f"action: {a.verb}", f"policy, {a.mode}", a.rule) for a in story.actions]
    rows += [(r.at, f"receipt: {OUTCOME_WORDS.get(r.outcome, r.outcome)}", "backend", r.text) for r in story.receipts]
    rows += [(t.at, f"state: {t.state}", "recover", t.cause) for t in story.transitions]
    rows += [(c.at, f"{c.verb} {c.feedback}".strip(), c.author, c.note or "–") for c in story.commands]
    return tuple(
        (precise_clock(at), what.replace("_", " "), who, words.replace("_", " "))
        for at, what, who, words in sorted(rows, key=lambda row: row[0])
    )


def attempt_rows(starts: Sequence[Start]) -> tuple[tuple[str, ...], ...]:
    """The starts of a job, newest first."""
    return tuple(
        (
            str(start.attempt),
            precise_clock(start.at),
            ", ".join(start.nodes) or "–",
            f"checkpoint of step {start.resume_step:,}" if start.resume_step is not None else "scratch",
        )
        for start in reversed(starts)
    )


def around_onset(lines: Sequence[LogRow], row: IncidentView) -> tuple[LogRow, ...]:
    """The log lines to show: the culprits' where they are known; a few before the onset, all after it."""
    ranks = culprit_ranks(row)
    nodes = {culprit.node for culprit in row.culprits if culprit.rank is None}
    mine = [line for line in lines if line.rank in ranks or line.node in nodes] if ranks or nodes else list(lines)
    before = [line for line in mine if line.event_at < onset(row)][-LOG_LINES_BEFORE_MAX:]
    return (*before, *(line for line in mine if line.event_at >= onset(row)))


def log_owner(row: IncidentView) -> str:
    """Whose log lines those are."""
    return culprit_words(pairs(row)) if row.culprits else "all ranks"


def is_error_line(line: LogRow) -> bool:
    """Whether a log record is shown as trouble."""
    return line.stream == "kernel" or bool(ERROR_LINE.search(line.text))


def culprit_ranks(row: IncidentView, series: Series | None = None) -> frozenset[int]:
    """Ranks to draw as culprits."""
    ranks = frozenset(culprit.rank for culprit in row.culprits if culprit.rank is not None)
    return ranks if series is None else frozenset(rank for rank in ranks if str(rank) in series.ranks)
