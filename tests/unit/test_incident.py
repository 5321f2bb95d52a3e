"""The incident table: every state can be reached and left, and no terminal state is ever left."""

import pytest

from recovery.incident import (
    ACTING,
    DRIVEN,
    EVENTS,
    IN_HAND,
    SAFE_TO_HOLD,
    STATES,
    TERMINAL,
    TRANSITIONS,
    WAITS_LONG,
    allows,
    transition,
)


def reachable(start: str) -> set[str]:
    found, todo = {start}, [start]
    while todo:
        here = todo.pop()
        for (state, _), after in TRANSITIONS.items():
            if state == here and after not in found:
                found.add(after)
                todo.append(after)
    return found


def test_every_state_is_reachable_from_open() -> None:
    assert reachable("open") == set(STATES)


def test_no_terminal_state_is_ever_left() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] in TERMINAL]


def test_a_terminal_state_is_reachable_from_every_state() -> None:
    for state in STATES:
        assert reachable(state) & TERMINAL


def test_every_event_has_a_row_and_every_row_a_known_event() -> None:
    assert {event for _, event in TRANSITIONS} == set(EVENTS)
    assert {state for state, _ in TRANSITIONS} | TERMINAL == set(STATES)


def test_unreachable_concludes_nothing() -> None:
    for (state, event), after in TRANSITIONS.items():
        if event == "unreachable":
            assert after == state


def test_nothing_is_started_but_from_selecting_and_nothing_selected_before_the_old_ranks_are_gone() -> None:
    assert {pair for pair, after in TRANSITIONS.items() if after == "starting"} == {
        ("selecting", "selected"),
        ("starting", "unreachable"),
    }
    into_selecting = {pair for pair, after in TRANSITIONS.items() if after == "selecting"}
    assert into_selecting == {
        ("stopping", "gone"), ("fence_failed", "gone"), ("backing_off", "due"), ("selecting", "unreachable"),
        ("waiting_capacity", "capacity"), ("starting", "smaller"),  # both come from a start that started nothing
        ("checking", "checked"),
    }  # fmt: skip
    into_checking = {pair for pair, after in TRANSITIONS.items() if after == "checking"}
    assert into_checking == {
        ("stopping", "gone_to_check"), ("fence_failed", "gone_to_check"), ("checking", "unreachable"),
    }  # fmt: skip


def test_an_unknown_transition_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="no transition for 'due' in state 'resolved'"):
        transition("resolved", "due")
    assert not allows("resolved", "approved")


def test_the_groups_of_states_agree() -> None:
    assert ACTING < DRIVEN < set(STATES)
    assert ACTING < IN_HAND
    assert not TERMINAL & (DRIVEN | IN_HAND | WAITS_LONG)
    assert ACTING > SAFE_TO_HOLD


def test_what_waits_long_reminds_and_what_may_be_held_can_be() -> None:
    assert all(allows(state, "reminded") for state in WAITS_LONG)
    assert all(transition(state, "hold") == "held" for state in SAFE_TO_HOLD)
