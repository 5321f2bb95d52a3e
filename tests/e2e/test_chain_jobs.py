"""Jobs under real services on the embedded bus: each way that one can end, and what is said and done about it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ingest.events import Logs, RankExited
from recovery.action import Receipt
from tests.embedded_chain import ENDLESS, STEPS, TOGETHER, Chain, embedded_chain, eventually

MODES = '[recover.modes]\nhang = "approve"\n'
FLOOD = (
    STEPS
    + """
end = time.monotonic() + 3
if rank == 0:
    out = sys.stdout.buffer
    out.write(b"x" * 1_000_000 + b"\\n" + bytes(range(256)) * 400 + b"\\n")
    while time.monotonic() < end:
        out.write(b"a line that is printed as fast as it goes, again and again and again\\n" * 50)
    out.flush()
    print("THE LAST LINE", flush=True)
for step in steps(100 if rank else 10): pass
"""
)


@pytest.fixture(scope="module")
def services() -> Iterator[Chain]:
    with embedded_chain(MODES) as lab:
        lab.up()
        yield lab


def test_a_job_whose_ranks_all_finish_is_finished_and_blamed_on_nobody(services: Chain) -> None:
    run = services.run("good", STEPS + "for step in steps(30): pass\n")
    assert run.wait(60) == 0
    assert "job good: finished" in services.shown("run")
    assert len(services.messages(RankExited, job="good")) == 2
    again = services.run("good", ENDLESS)  # terminal stays terminal
    assert again.wait(60) == 1
    assert "there is already a job 'good'" in services.shown("run")
    assert services.attempts("good") == [1]
    assert services.verdicts("good") == []


def test_a_script_that_cannot_be_imported_is_a_user_error_and_shown(services: Chain) -> None:
    run = services.run("typo", "import transom\nimport no_such_module_at_all\n")
    assert run.wait(60) == 1
    assert "ModuleNotFoundError: No module named 'no_such_module_at_all'" in services.shown("run")
    assert len(services.attempts("typo")) <= 2
    assert services.verdicts("typo")[0].fault_class in ("user_error", "start_failure")
    assert "job typo: failed" in services.shown("run") or "job typo: stopped" in services.shown("run")


def test_of_two_jobs_at_once_only_the_broken_one_is_touched(services: Chain) -> None:
    names = ("experiment-a-2024-01", "experiment-b-2024-01")  # alike at both ends, as names are
    broken, whole = (services.run(name, ENDLESS) for name in names)
    for name in names:
        services.await_steps(name, 1, 10)
    untouched = services.ranks(names[1])
    os.kill(services.ranks(names[0])[1], signal.SIGKILL)
    services.await_steps(names[0], 2, 10)
    eventually(lambda: "resolved" in services.states(names[0]), "the incident is resolved")
    assert services.ranks(names[1]) == untouched
    assert services.attempts(names[1]) == [1]
    assert services.verdicts(names[1]) == []
    broken.terminate()
    whole.terminate()
    assert (broken.wait(30), whole.wait(30)) != (0, 0)


def test_a_flood_of_output_with_huge_lines_and_garbage_costs_lines_and_nothing_else(services: Chain) -> None:
    run = services.run("flood", FLOOD, more=("--quiet",))
    assert run.wait(60) == 0
    assert services.verdicts("flood") == []
    lines = [line.text for logs in services.messages(Logs, job="flood") for line in logs.lines]
    assert lines[-1] == "THE LAST LINE"
    assert any("were dropped here: too many at once" in line for line in lines)
    assert services.steps("flood", 1) >= 10


def test_a_plan_that_awaits_approval_is_carried_out_when_its_hash_is_approved(services: Chain) -> None:
    run = services.run("asks", TOGETHER)
    services.await_steps("asks", 1, 30)
    os.kill(services.ranks("asks")[0], signal.SIGSTOP)
    eventually(lambda: "awaiting_approval" in services.states("asks"), "the plan awaits approval")
    (action,) = eventually(lambda: services.rows("actions", "asks"), "the ledger knows the plan")
    services.call("ack", action.verdict_id, "--note", "seen")
    assert services.attempts("asks") == [1]
    services.call("approve", action.verdict_id, "--plan", action.plan_hash)
    services.await_steps("asks", 2, 10)
    eventually(lambda: "resolved" in services.states("asks"), "the incident is resolved")
    assert [receipt.outcome for receipt in services.messages(Receipt, job="asks")][-1] == "done"
    run.terminate()
    run.wait(30)


def test_a_second_up_is_refused_and_harms_nothing(services: Chain) -> None:
    before = {name: services.service(name) for name in ("record", "detect", "recover")}
    second = services.transom("up", "--no-console", "--config", str(services.config))
    assert second.wait(60) == 1
    assert "already run on" in services.shown("up")
    assert {name: services.service(name) for name in before} == before
    services.call("incidents")
