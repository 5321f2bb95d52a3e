"""A node that is taken on purpose, on real launchers: said first, paid by no budget, and the job goes on without it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ingest.events import AttemptStarted, RankExited, StopNotice
from recovery.backend import StartRequest
from tests.embedded_chain import STEPS, TOGETHER, embedded_chain, eventually
from tests.launcher_lab import JOB, Lab, lab_in_short_folder, wait_for

SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
# What torch's `@record` does, without torch: the file says why, the exit code says nothing.
RECORDED = """
import json, os
extra = {"py_callstack": "…", "timestamp": "1790000000"}
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as stream:
    json.dump({"message": {"message": "ValueError: bad label", "extraInfo": extra}}, stream)
os._exit(42)
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_in_short_folder() as lab:
        yield lab


def test_a_launcher_that_is_told_to_stop_says_so_before_its_ranks_end(lab: Lab) -> None:
    process = lab.launch(lab.script(SLEEPER), grace_seconds=3.0)
    lab.backend.start(StartRequest(JOB, 1, "token"))
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    said = [type(one) for one in lab.messages(StopNotice, RankExited)]
    assert said == [StopNotice, RankExited]
    (notice,) = lab.messages(StopNotice)
    assert (notice.attempt, notice.node, notice.grace_seconds) == (1, "node0", 3.0)


def test_a_launcher_that_ends_with_its_job_takes_nothing_from_anybody(lab: Lab) -> None:
    process = lab.launch(lab.script(SLEEPER))
    lab.backend.start(StartRequest(JOB, 1, "token"))
    lab.backend.finish(JOB, "stopped", "enough")
    process.wait(30)
    assert lab.messages(StopNotice) == []


def test_what_torch_leaves_in_the_error_file_is_the_reason_of_the_exit(lab: Lab) -> None:
    lab.launch(lab.script(RECORDED))
    lab.backend.start(StartRequest(JOB, 1, "token"))
    (exited,) = wait_for(lambda: lab.messages(RankExited), "its exit is told")
    assert (exited.exit_code, exited.error.type, exited.error.text) == (42, "ValueError", "bad label")
    (view,) = lab.backend.observe(JOB).ranks
    assert view.error == "ValueError: bad label"
    assert view.ended_at is not None
    assert not view.stopped_by_us


def test_a_job_goes_on_without_a_node_that_was_taken_and_no_budget_pays() -> None:
    with embedded_chain() as chain:
        chain.up()
        run = chain.run("taken", TOGETHER, ranks=1, nodes=2, more=("--spares", "1"))
        chain.await_steps("taken", 1, 20)
        os.kill(chain.launcher("taken", "node1"), signal.SIGTERM)
        chain.await_steps("taken", 2, 5)
        (action,) = [one for one in chain.actions("taken") if one.verb == "restart"]
        assert action.fault_class == "preempted"
        assert "no budget pays for it" in action.rule
        newest = chain.messages(AttemptStarted, job="taken")[-1]
        assert {place.node for place in newest.places} == {"node0", "node2"}
        eventually(lambda: "resolved" in chain.states("taken"), "the incident is over")
        chain.call("abort", "taken", "--note", "seen enough")
        assert run.wait(60) == 1
        assert "abort by" in chain.shown("run")


def test_an_exit_that_nobody_explains_is_stopped_with_the_words_of_its_error_file() -> None:
    with embedded_chain(exit_grace_seconds=0.5) as chain:
        chain.up()
        os.kill(chain.service("detect"), signal.SIGSTOP)
        script = STEPS + "for step in steps(40): pass\n" + RECORDED
        run = chain.run("silent", script, ranks=1)
        assert run.wait(60) == 1
        os.kill(chain.service("detect"), signal.SIGCONT)
        (verdict,) = [one for one in chain.verdicts("silent") if one.detector == "recovery"]
        assert (verdict.fault_class, verdict.settled) == ("user_error", True)
        assert "ValueError: bad label" in chain.shown("run")
