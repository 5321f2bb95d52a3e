"""The life of an incident as one table: which event leads from which state to which.

Two rules. Everything that decides where an incident may go stands in `TRANSITIONS`; nobody sets a state any
other way. An event that has no row is our own mistake: whatever the world may say in a state has a row.

    open ── coalescing ── deciding ─┬─ notified ── resolved
      │                      ▲      ├─ awaiting_approval, held    (a person's turn; approved, resumed: deciding again)
      ├─ exited ─────────────┤      ├─ finishing ── stopped, gave_up
      └─ blind ── resolved   └──────┤  ignored
                                    └─ stopping ─ checking ─ backing_off ─ selecting ─ starting ─ probation ─┬─ resolved
                                          └─ fence_failed ─────────────────────┘  └─ waiting_capacity        └─ relapsed

What an incident waits for in each driven state is a call to the backend (`recovery/calls.py`), except in
coalescing, backing_off and exited, which wait for time. `unreachable` is written down and changes nothing: cannot
reach is never gone. A terminal state is never left; a relapse opens an incident of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

State = Literal[
    "open", "coalescing", "exited", "blind", "deciding", "awaiting_approval", "stopping", "fence_failed",
    "checking", "backing_off", "selecting", "waiting_capacity", "starting", "probation", "finishing", "notified",
    "held", "resolved", "relapsed", "superseded", "stopped", "gave_up", "ignored",
]  # fmt: skip
Event = Literal[
    "unsettled",  # the first verdict may still change: wait for its next revision
    "settled",  # no more evidence is awaited, or the window for it is over
    "exited",  # the backend says that it ended, and no verdict says why: wait for one
    "explained", "unexplained",  # one came; none came, and recovery has made its own
    "runs_again",  # it was no end, or somebody has started it anew
    "blind", "seen",  # the backend has not answered for long; it answers again
    "abort",  # a person ends the job
    "dropped",  # nothing may be done: stale attempt, job over, job unknown
    "closed",  # detection says that it is over
    "notify", "propose", "restart", "stop", "hold",  # what the policy decided; hold: also a person at any safe point
    "approved", "rejected", "refused", "revised", "timed_out", "resumed",  # a person's turn
    "reminded",  # it still waits for a person, or for nodes
    "gone", "gone_but_early", "due",  # the old attempt lives no more; its successor may start (now, later)
    "gone_to_check", "checked", "checked_early",  # the same, but its nodes are tried out first
    "not_gone",  # ranks of the old attempt may live, and our patience is over
    "older_alive",  # ranks of the old attempt live after all
    "selected", "no_checkpoint", "started", "start_rejected", "steady", "stuck", "failed_again",
    "short", "smaller", "capacity",  # too few nodes: wait; start on fewer; there may be enough now
    "ended", "budget_spent_and_ended",  # the backend has been told that the job is over
    "attempt_over",  # somebody started a newer attempt
    "job_over",  # the job has finished
    "unreachable",  # the backend does not answer
]  # fmt: skip

STATES: tuple[State, ...] = get_args(State)
EVENTS: tuple[Event, ...] = get_args(Event)
TERMINAL: frozenset[State] = frozenset({"resolved", "relapsed", "superseded", "stopped", "gave_up", "ignored"})
# In these something is being done to the job: no second incident of the job may be decided meanwhile.
ACTING: frozenset[State] = frozenset({
    "deciding", "stopping", "fence_failed", "checking", "backing_off", "selecting", "waiting_capacity", "starting",
    "finishing",
})  # fmt: skip
# An incident in one of these has the job's attempt in hand: a further verdict of that attempt joins it.
IN_HAND: frozenset[State] = ACTING | {"coalescing", "awaiting_approval", "held"}
# In these `tick` has something to do by itself.
DRIVEN: frozenset[State] = ACTING | {"coalescing", "exited", "awaiting_approval", "probation"}
# In these it waits for people, who are told again now and then.
WAITS_LONG: frozenset[State] = frozenset({"held", "waiting_capacity", "blind"})
# In these nothing is under way at the backend, so a person's hold takes effect at once.
SAFE_TO_HOLD: frozenset[State] = frozenset({"checking", "backing_off", "selecting", "waiting_capacity"})

_TABLE: dict[State, dict[Event, State]] = {
    "open": {
        "unsettled": "coalescing",
        "settled": "deciding",
        "dropped": "ignored",
        "exited": "exited",
        "blind": "blind",
        "abort": "finishing",
    },
    "coalescing": {"settled": "deciding", "closed": "resolved", "dropped": "ignored", "job_over": "ignored"},
    "exited": {
        "explained": "superseded",
        "unexplained": "deciding",
        "runs_again": "superseded",
        "attempt_over": "superseded",
        "job_over": "resolved",
    },
    "blind": {"seen": "resolved", "reminded": "blind", "job_over": "resolved"},
    "deciding": {
        "notify": "notified",
        "propose": "awaiting_approval",
        "restart": "stopping",
        "stop": "finishing",
        "hold": "held",
        "dropped": "ignored",
        "closed": "resolved",
        "job_over": "ignored",
        "unreachable": "deciding",
    },
    "notified": {
        "closed": "resolved",
        "revised": "deciding",
        "approved": "deciding",
        "refused": "notified",
        "rejected": "notified",
        "attempt_over": "resolved",
        "job_over": "resolved",
    },
    "awaiting_approval": {
        "approved": "deciding",
        "revised": "deciding",
        "rejected": "held",
        "refused": "awaiting_approval",
        "timed_out": "held",
        "closed": "resolved",
        "attempt_over": "superseded",
        "job_over": "ignored",
    },
    "held": {
        "approved": "deciding",
        "resumed": "deciding",
        "rejected": "held",
        "refused": "held",
        "reminded": "held",
        "closed": "resolved",
        "attempt_over": "superseded",
        "job_over": "resolved",
    },
    "stopping": {
        "gone": "selecting",
        "gone_but_early": "backing_off",
        "gone_to_check": "checking",
        "not_gone": "fence_failed",
        "unreachable": "stopping",
        "job_over": "resolved",
    },
    "fence_failed": {
        "gone": "selecting",
        "gone_to_check": "checking",
        "not_gone": "held",
        "unreachable": "fence_failed",
        "job_over": "resolved",
    },
    "checking": {
        "checked": "selecting",
        "checked_early": "backing_off",
        "hold": "held",
        "older_alive": "stopping",
        "attempt_over": "superseded",
        "job_over": "resolved",
        "unreachable": "checking",
    },
    "backing_off": {"due": "selecting", "hold": "held", "job_over": "resolved"},
    "selecting": {
        "selected": "starting",
        "no_checkpoint": "held",
        "hold": "held",
        "older_alive": "stopping",
        "attempt_over": "superseded",
        "job_over": "resolved",
        "unreachable": "selecting",
    },
    "waiting_capacity": {
        "capacity": "selecting",
        "hold": "held",
        "reminded": "waiting_capacity",
        "older_alive": "stopping",
        "attempt_over": "superseded",
        "job_over": "resolved",
        "unreachable": "waiting_capacity",
    },
    "starting": {
        "started": "probation",
        "short": "waiting_capacity",
        "smaller": "selecting",
        "start_rejected": "held",
        "older_alive": "stopping",
        "attempt_over": "superseded",
        "job_over": "resolved",
        "unreachable": "starting",
    },
    "probation": {
        "steady": "resolved",
        "stuck": "held",
        "failed_again": "relapsed",
        "attempt_over": "superseded",
        "job_over": "resolved",
        "unreachable": "probation",
    },
    "finishing": {"ended": "stopped", "budget_spent_and_ended": "gave_up", "unreachable": "finishing"},
}
TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (state, event): after for state, row in _TABLE.items() for event, after in row.items()
}


def transition(state: State, event: Event) -> State:
    """Where `event` leads from `state`. An unknown pair is our own mistake."""
    after = TRANSITIONS.get((state, event))
    assert after is not None, f"no transition for {event!r} in state {state!r}"
    return after


def allows(state: State, event: Event) -> bool:
    """Does `event` mean anything in `state`? For what may come at any time, such as a person's command."""
    return (state, event) in TRANSITIONS
