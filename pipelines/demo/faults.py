"""The faults of the demo, what right means for each, and how a run is judged against it."""

from __future__ import annotations

from dataclasses import dataclass, field

from detectors.verdict import Verdict
from pipelines.demo.story import AttemptStory, Story
from pipelines.errors import StatedError
from recovery.action import Action


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is done to the job, and the only right answer to it."""

    name: str
    title: str
    rank: int
    inject: str  # what `transom inject` is told
    fault_class: str
    culprit_is_node: bool
    verb: str
    parameters: dict[str, float] = field(default_factory=dict)
    at_step: bool = False
    restarts: bool = True
    needs_memory: bool = False  # the resume must come from memory alone


FAULTS: tuple[Fault, ...] = (
    Fault("slow", "rank 2 computes slower for 8 s", 2, "slow", "straggler", False, "notify",
          {"factor": 3.0, "seconds": 8.0}, restarts=False),
    Fault("kill", "SIGKILL of rank 1", 1, "kill", "rank_lost", False, "restart", needs_memory=True),
    Fault("stop", "SIGSTOP of rank 3", 3, "stop", "hang", False, "restart", needs_memory=True),
    Fault("nan", "loss of rank 0 becomes NaN", 0, "nan", "nan", False, "restart", at_step=True),
    Fault("xid", "GPU Xid 79 on rank 2, which dies", 2, "xid", "gpu_lost", True, "exclude_and_restart"),
    Fault("raise", "an exception in user code of rank 1", 1, "raise", "user_error", False, "stop",
          at_step=True, restarts=False),
)  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """How one fault was handled; each of the four answers is right or wrong."""

    fault: Fault
    injected_at: float
    step_before: int  # newest step that every rank had ended when the fault was done
    bad_step: int | None = None
    node: str = ""
    verdict: Verdict | None = None
    action: Action | None = None
    verdict_seconds: float | None = None
    step_seconds: float | None = None
    resume_step: int | None = None
    steps_lost: int | None = None
    tier: str = ""
    unexpected: list[Verdict] = field(default_factory=list)
    class_right: bool = False
    culprit_right: bool = False
    action_right: bool = False
    resume_right: bool = False
    why: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return (
            self.class_right and self.culprit_right and self.action_right and self.resume_right and not self.unexpected
        )


def judge(outcome: Outcome, story: Story, before: AttemptStory, known: set[str]) -> None:
    """Fill in what was right, from what the bus told; `known` are verdicts of before this fault."""
    fault = outcome.fault
    fresh = [revisions for verdict_id, revisions in story.verdicts.items() if verdict_id not in known]
    # an open straggler of before may get a closing revision now; a new one of another class is a false verdict
    matching = [revisions for revisions in fresh if revisions[-1].fault_class == fault.fault_class]
    outcome.unexpected = [revisions[-1] for revisions in fresh if revisions not in matching[:1]]
    if outcome.unexpected:
        outcome.why.append("unexpected: " + "; ".join(verdict.summary for verdict in outcome.unexpected))
    if not matching:
        outcome.why.append(f"no verdict {fault.fault_class}")
        return
    revisions = matching[0]
    outcome.verdict = revisions[-1]
    outcome.class_right = True
    outcome.verdict_seconds = story.seen_at[revisions[0].verdict_id] - outcome.injected_at
    named = [(culprit.rank, culprit.node) for culprit in revisions[-1].culprits]
    expected = [(None, outcome.node)] if fault.culprit_is_node else [(fault.rank, outcome.node)]
    outcome.culprit_right = named == expected
    if outcome.bad_step is not None and revisions[-1].first_bad_step != outcome.bad_step:
        outcome.class_right = False
        outcome.why.append(f"first bad step {revisions[-1].first_bad_step}, not {outcome.bad_step}")
    if not outcome.culprit_right:
        outcome.why.append(f"culprit {named}, not {expected}")
    _judge_action(outcome, story, revisions)
    _judge_resume(outcome, story, before)


def _judge_action(outcome: Outcome, story: Story, revisions: list[Verdict]) -> None:
    fault = outcome.fault
    taken = [action for action in story.actions.values() if action.verdict_id == revisions[-1].verdict_id]
    outcome.action = taken[-1] if taken else None
    verbs = [action.verb for action in taken if action.mode == "auto" or action.verb == "notify"]
    outcome.action_right = verbs == [fault.verb]
    if fault.verb == "exclude_and_restart" and outcome.action is not None:
        outcome.action_right = outcome.action_right and outcome.action.excluded_nodes == (outcome.node,)
    if fault.verb == "notify" and revisions[-1].status != "closed":
        outcome.action_right = False
        outcome.why.append("it did not close by itself")
    if not outcome.action_right:
        outcome.why.append(f"actions {verbs}, not [{fault.verb!r}]")


def _judge_resume(outcome: Outcome, story: Story, before: AttemptStory) -> None:
    fault = outcome.fault
    if not fault.restarts:
        outcome.resume_right = True
        return
    now = story.current
    if now is None or now is before:
        outcome.why.append("no new attempt")
        return
    outcome.resume_step = now.started.resume_step
    outcome.tier = "+".join(sorted(set(story.loaded_tiers.get(now.started.attempt, {}).values()), reverse=True))
    expected = expected_resume(outcome, story, before)
    checks: list[tuple[bool, str]] = [
        (now.first_step_at is not None, "the new attempt made no step"),
        (outcome.resume_step == expected, f"resumed from {outcome.resume_step}, not {expected}"),
        (not fault.needs_memory or outcome.tier == "memory", f"loaded from {outcome.tier or 'nowhere'}, not memory"),
        (outcome.bad_step is None or _rejected(outcome, story), "the bad checkpoints were not rejected"),
    ]
    failed = [text for right, text in checks if not right]
    outcome.why += failed
    outcome.resume_right = not failed
    if now.first_step_at is not None:
        outcome.step_seconds = now.first_step_at - outcome.injected_at
    if outcome.resume_step is not None:
        outcome.steps_lost = max(before.step, outcome.step_before) - outcome.resume_step


def expected_resume(outcome: Outcome, story: Story, before: AttemptStory) -> int | None:
    """The newest step that all ranks could load when it was decided: sealed by all, or complete on disk.

    Where a node was lost, what its ranks had in memory is lost with it, and only the disk counts for all of them.
    """
    decided_at = outcome.action.at if outcome.action is not None else outcome.injected_at
    bound = outcome.bad_step
    on_disk = [step for step in story.complete_on_disk(decided_at) if bound is None or step < bound]
    in_memory = None if outcome.fault.verb == "exclude_and_restart" else before.newest_sealed(bound)
    found = [*on_disk, *([] if in_memory is None else [in_memory])]
    return max(found, default=None)


def _rejected(outcome: Outcome, story: Story) -> bool:
    return any(event.step == outcome.bad_step for event in story.rejected_from)


def chosen_faults(names: str) -> tuple[Fault, ...]:
    """The faults that a person named, in the demo's order. Raises StatedError for an unknown one."""
    if names in ("all", "none"):
        return FAULTS if names == "all" else ()
    wanted = {name.strip() for name in names.split(",")}
    unknown = wanted - {fault.name for fault in FAULTS}
    if unknown:
        raise StatedError(
            f"there is no fault {sorted(unknown)[0]!r}; known: {', '.join(fault.name for fault in FAULTS)}, all, none"
        )
    return tuple(fault for fault in FAULTS if fault.name in wanted)
