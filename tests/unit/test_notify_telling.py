"""What people are told, and what they are spared."""

import pytest

from pipelines.notify.notice import LEVELS, TOLD, Notice, Subject, Telling, compose
from recovery.action import Incident
from recovery.incident import STATES, TERMINAL, State

ABOUT = Subject("rank_lost", ("rank 1 on n0",), "", 1000.0)


def told(state: str, sequence: int = 1, incident_id: str = "v", at: float = 1000.0) -> Incident:
    return Incident(
        incident_id=incident_id, job="llm", attempt=1, at=at, state=state, cause="SECRET=log line", sequence=sequence
    )


def notice(state: str, sequence: int = 1, incident_id: str = "v", at: float = 1000.0, plan: str = "") -> Notice:
    about = Subject("rank_lost", ("rank 1 on n0",), plan, 1000.0)
    made = compose(told(state, sequence, incident_id, at), about, "http://console:8501/")
    assert made is not None
    return made


def telling(least: str = "info") -> Telling:
    return Telling(least, again_seconds=3600.0, cooldown_seconds=300.0)  # type: ignore[arg-type]


def test_every_state_is_told_or_on_the_way_and_every_end_is_told() -> None:
    assert set(TOLD) <= set(STATES)
    assert set(TOLD) >= TERMINAL


@pytest.mark.parametrize("state", sorted(TOLD))
def test_a_notice_says_who_and_leads_to_the_console_and_carries_no_text_of_the_job(state: State) -> None:
    made = notice(state)
    assert "llm: rank_lost (rank 1 on n0)" in made.title
    assert made.link == "http://console:8501/incident?id=v"
    assert "SECRET" not in str(made)


def test_a_plan_that_waits_is_told_with_the_command_that_approves_it() -> None:
    assert "transom approve v --plan abc" in notice("awaiting_approval", plan="abc").text


def test_what_is_published_again_is_not_new() -> None:
    people = telling()
    assert people.new(told("held", 3))
    assert not people.new(told("held", 3))
    assert not people.new(told("stopping", 2))
    assert people.new(told("resolved", 4))


def test_who_is_held_is_told_again_each_hour_and_not_in_between() -> None:
    people = telling()
    sent = [people.choose(notice("held", n, at=1000.0 + 600.0 * n)) is not None for n in range(13)]
    assert [n for n, was in enumerate(sent) if was] == [0, 6, 12]


def test_the_same_story_of_another_incident_is_kept_back_and_counted() -> None:
    people = telling()
    assert people.choose(notice("stopping", incident_id="a"))
    assert people.choose(notice("stopping", incident_id="b", at=1010.0)) is None
    assert people.choose(notice("stopping", incident_id="c", at=1020.0)) is None
    later = people.choose(notice("stopping", incident_id="d", at=1400.0))
    assert later is not None
    assert later.like_it == 2


def test_another_plan_is_another_story() -> None:
    people = telling()
    assert people.choose(notice("awaiting_approval", incident_id="a", plan="p1"))
    assert people.choose(notice("awaiting_approval", incident_id="b", at=1010.0, plan="p2"))


def test_an_end_is_told_to_those_who_heard_of_the_beginning() -> None:
    people = telling("page")
    assert people.choose(notice("stopping")) is None
    assert people.choose(notice("resolved", 2, at=1500.0)) is None
    assert people.choose(notice("held", 1, "w", plan="a"))
    assert people.choose(notice("held", 1, "x", plan="b"))
    assert people.choose(notice("resolved", 2, "w", at=1500.0))
    assert people.choose(notice("resolved", 2, "x", at=1501.0))  # whose end is no less of an end


def test_levels_are_ordered() -> None:
    assert LEVELS == ("info", "warning", "page")
    assert compose(told("deciding"), ABOUT, "http://c") is None
