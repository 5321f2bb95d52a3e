"""Who keeps the controller's lease: at once, again and again, told once, and given back at the end."""

from __future__ import annotations

import pytest

from pipelines import lease_keeper
from pipelines.lease_keeper import LeaseKeeper
from pipelines.places import NameRefused, checked_name
from recovery.backend import Unavailable
from tests.launcher_lab import wait_for


class ScriptedLease:
    """Answers as told, the last answer for ever."""

    def __init__(self, *answers: bool | Exception) -> None:
        self._answers = list(answers)
        self.taken = 0
        self.released = 0
        self.epoch = 1

    def take(self) -> bool:
        self.taken += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def renew(self) -> None:
        self.take()

    def is_ours(self) -> bool:
        return True

    def release(self) -> None:
        self.released += 1


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_keeper, "KEEP_SECONDS", 0.001)


def test_it_is_taken_before_anything_else_and_renewed_until_the_end() -> None:
    lease, told = ScriptedLease(True), []
    keeper = LeaseKeeper(lease, told.append)
    keeper.start()
    assert lease.taken >= 1
    wait_for(lambda: lease.taken > 3, "it is renewed")
    keeper.close()
    assert lease.released == 1
    assert told == ["recover: has the lease"]


def test_what_changes_is_told_once_and_an_outage_ends_nothing() -> None:
    lease, told = ScriptedLease(False, False, Unavailable("no answer"), Unavailable("no answer"), True), []
    keeper = LeaseKeeper(lease, told.append)
    keeper.start()
    wait_for(lambda: len(told) == 3, "it has the lease in the end")
    keeper.close()
    assert told == [
        "recover: waits: another controller has the lease",
        "recover: cannot keep its lease: no answer",
        "recover: has the lease",
    ]


def test_a_cloud_may_give_its_nodes_long_names_and_a_job_may_not_have_one() -> None:
    name = "gke-training-a3-mega-pool-1-7c3e964f-x1y2.europe-west4-b.c.project.internal"
    assert checked_name("node", name) == name
    for kind, wrong in (("job", name), ("node", "x" * 129), ("node", "a/b")):
        with pytest.raises(NameRefused):
            checked_name(kind, wrong)
