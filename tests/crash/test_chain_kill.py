"""SIGKILL to each process of the joined-up system on the embedded bus, one after another, while jobs run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipelines.demo_job
from detectors.verdict import Verdict
from ingest.events import CheckpointEvent, NodeHeartbeat
from recovery.action import Action, Incident
from tests.embedded_chain import ENDLESS, Chain, embedded_chain, eventually

SETTINGS = '[recover.modes]\nnode_lost = "auto"\n'
DEMO_SCRIPT = Path(pipelines.demo_job.__path__[0]) / "train.py"


@pytest.fixture(scope="module")
def services() -> Iterator[Chain]:
    with embedded_chain(SETTINGS) as lab:
        lab.up()
        yield lab


def test_one_attempt_for_each_incident_wherever_recover_was_killed(services: Chain) -> None:
    run = services.run("again", ENDLESS)
    services.await_steps("again", 1, 10)
    # before there is a verdict; between what was decided and what was done
    for attempt, seconds in enumerate((0.0, 0.15), 1):
        others = services.ranks("again")
        os.kill(others.pop(1), signal.SIGKILL)
        time.sleep(seconds)
        services.kill("recover")
        services.await_steps("again", attempt + 1, 10)
        eventually(lambda a=attempt: services.states("again").count("resolved") >= a, "the incident is resolved")
        assert services.attempts("again") == list(range(1, attempt + 2))
    assert len({action.action_id for action in services.actions("again")}) == 2
    assert run.poll() is None
    run.terminate()
    run.wait(30)


def test_killed_detect_and_record_lose_nothing_and_say_nothing_twice(services: Chain) -> None:
    run = services.run("told", ENDLESS)
    services.await_steps("told", 1, 10)
    for name in ("detect", "record"):
        os.kill(services.service(name), signal.SIGKILL)
    os.kill(services.ranks("told")[0], signal.SIGKILL)  # while nobody looks
    services.await_steps("told", 2, 10)
    eventually(lambda: "resolved" in services.states("told"), "the incident is resolved")
    services.kill("detect")  # with the verdict behind it
    services.await_steps("told", 2, 30)
    run.terminate()
    run.wait(30)
    assert {verdict.verdict_id for verdict in services.verdicts("told")} == {"told/1/0/events/1"}
    assert {incident.incident_id for incident in services.messages(Incident, job="told")} == {"told/1/0/events/1"}
    assert services.attempts("told") == [1, 2]
    for what, types in {"verdicts": (Verdict,), "actions": (Action,), "transitions": (Incident,)}.items():
        said = {message.message_id for message in services.messages(*types, job="told")}
        eventually(lambda w=what, s=said: {m.message_id for m in services.rows(w, "told")} == s, f"all {what}")


def test_a_killed_launchers_node_is_replaced_by_the_spare_and_a_killed_front_leaves_nothing(services: Chain) -> None:
    run = services.run("node", ENDLESS, ranks=1, nodes=2, more=("--spares", "1"))
    services.await_steps("node", 1, 10)
    lost = services.ranks("node")[1]
    os.kill(services.launcher("node", "node1"), signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{lost}").exists(), "the ranks of that launcher are gone")
    services.await_steps("node", 2, 10)
    (action,) = services.actions("node")
    assert (action.verb, action.excluded_nodes) == ("exclude_and_restart", ("node1",))
    run.kill()
    run.wait()
    eventually(lambda: not services.pids("node"), "no process of the job is left")
    eventually(lambda: not services.pids(str(services.folder / "node.py")), "no rank is left")
    assert {verdict.fault_class for verdict in services.verdicts("node")} == {"node_lost"}


def test_training_goes_on_without_its_engine_and_saves_again_with_the_next_one(services: Chain) -> None:
    arguments = ("--save-every", "3")
    run = services.run("trains", DEMO_SCRIPT, torch=True, checkpoints=True, arguments=arguments)

    def sealed_after(step: int) -> list[CheckpointEvent]:
        events = services.messages(CheckpointEvent, job="trains")
        return [event for event in events if event.state == "sealed" and event.step > step and event.rank == 0]

    eventually(lambda: sealed_after(3), "a step is saved", 120)
    (engine,) = services.pids("serve", "trains")
    keeper = services.pids("-S", "trains")  # it runs without site-packages, and so do no others
    ranks = services.ranks("trains")
    os.kill(engine, signal.SIGKILL)
    at = services.steps("trains", 1)
    services.await_steps("trains", 1, at + 6)
    eventually(lambda: sealed_after(at + 3), "a later step is saved")
    assert services.ranks("trains") == ranks
    assert services.attempts("trains") == [1]
    assert "trains-node0-ckpt ended with exit code -9; starting it again" in services.shown("run")
    assert [verdict.fault_class for verdict in services.verdicts("trains") if verdict.severity == "critical"] == []
    assert services.pids("-S", "trains") == keeper, "one, and the same for both engines"
    assert len(keeper) == 1
    run.terminate()
    run.wait(60)
    assert not services.pids("trains"), "the keeper has gone with the job"


def test_a_launcher_that_was_stopped_for_a_while_is_heard_again(services: Chain) -> None:
    run = services.run("pauses", ENDLESS)
    services.await_steps("pauses", 1, 10)
    os.kill(services.launcher("pauses"), signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(services.launcher("pauses"), signal.SIGCONT)
    beats = len(services.messages(NodeHeartbeat, job="pauses"))
    eventually(lambda: len(services.messages(NodeHeartbeat, job="pauses")) > beats + 5, "the launcher is heard again")
    services.await_steps("pauses", 1, 40)
    assert services.attempts("pauses") == [1]
    assert services.verdicts("pauses") == []
    run.terminate()
    run.wait(30)
