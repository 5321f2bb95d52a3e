"""A launcher, its zygote and its ranks as real processes: who dies with whom, who is told what, in which order."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest.events import (
    AttemptEnded,
    AttemptStarted,
    DeviceMetrics,
    FaultInjected,
    Logs,
    Metrics,
    NodeHeartbeat,
    RankExited,
    RankStacks,
    RankStalled,
    RankStarted,
)
from recovery.backend import Ambiguous, Conflict, StartRequest, Unavailable
from recovery.launcher.procfs import is_alive, start_time_of, stat_of
from tests.launcher_lab import JOB, Lab, lab_in_short_folder, wait_for

SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
REPORTER = """
import itertools
s = connect(); hello(s)
for n in itertools.count():
    metrics(s, n, n); time.sleep(0.02)
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_in_short_folder(per_node=2) as lab:
        yield lab


def start(lab: Lab, attempt: int = 1, resume_step: int | None = None) -> Any:
    return lab.backend.start(StartRequest(JOB, attempt, f"token-{attempt}", resume_step=resume_step))


def exits(lab: Lab) -> dict[int, RankExited]:
    return {message.rank: message for message in lab.messages(RankExited)}


def all_exits(lab: Lab, count: int = 2) -> dict[int, RankExited]:
    return wait_for(lambda: len(found := exits(lab)) == count and found, "all exits are told")


def gone(pids: dict[int, int]) -> bool:
    return not any((stat := stat_of(pid)) and stat.state != "Z" for pid in pids.values())


# Death


def test_killing_the_launcher_kills_all_its_ranks(lab: Lab) -> None:
    launcher = lab.launch(lab.script(SLEEPER))
    start(lab)
    pids = lab.pids()
    zygote = lab.node_file().zygote
    os.kill(pids[1], signal.SIGSTOP)  # even one that cannot act
    launcher.kill()
    wait_for(lambda: gone(pids) and not is_alive(zygote.pid, zygote.start_time), "ranks and zygote are gone")
    assert [node.state for node in lab.backend.observe(JOB).nodes] == ["lost"]
    assert lab.backend.stop(JOB, 1, grace_seconds=0, deadline_seconds=5)


def test_a_killed_zygote_takes_its_ranks_and_another_serves_the_next_attempt(lab: Lab) -> None:
    lab.launch(lab.script(SLEEPER))
    start(lab)
    zygote = lab.node_file().zygote
    os.kill(zygote.pid, signal.SIGKILL)
    told = all_exits(lab)
    assert {(exit.exit_code, exit.signal, exit.stopped_by_launcher) for exit in told.values()} == {(None, 9, False)}
    assert lab.messages(AttemptEnded)[-1].outcome == "failed"
    start(lab, 2)
    assert lab.node_file().zygote.pid != zygote.pid
    assert len(lab.pids()) == 2


def test_sigterm_ends_launcher_ranks_and_node_file_after_telling_everything(lab: Lab) -> None:
    launcher = lab.launch(lab.script(SLEEPER))
    start(lab)
    pids = lab.pids()
    launcher.terminate()
    assert launcher.wait(20) == 0
    assert gone(pids)
    assert lab.node_file() is None
    told = exits(lab)
    assert {(exit.signal, exit.stopped_by_launcher) for exit in told.values()} == {(15, True)}
    assert lab.messages(AttemptEnded)[-1].outcome == "stopped"
    assert not (lab.folder / "node0.c").exists()
    assert not (lab.folder / "node0.t").exists()


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_with_its_children(lab: Lab) -> None:
    lab.launch(
        lab.script("""
        import os, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"], process_group=0)
        print("child", child.pid, flush=True)
        time.sleep(600)
    """)
    )
    start(lab)
    wait_for(lambda: len(lab.lines()) == 2, "both have a child")
    children = {number: int(line.split()[1]) for number, line in enumerate(lab.lines())}
    assert lab.backend.stop(JOB, 1, grace_seconds=0.2, deadline_seconds=10)
    assert {exit.signal for exit in all_exits(lab).values()} == {9}
    wait_for(lambda: gone(children), "children in groups of their own are gone with the session")


def test_stopping_a_sigstopped_rank_does_not_wait_for_the_grace(lab: Lab) -> None:
    lab.launch(lab.script(SLEEPER))
    start(lab)
    os.kill(lab.pids()[0], signal.SIGSTOP)
    wait_for(lambda: {view.state for view in lab.backend.observe(JOB).ranks} == {"stopped", "running"}, "seen")
    assert lab.backend.stop(JOB, 1, grace_seconds=3600, deadline_seconds=20)
    told = all_exits(lab)
    assert (told[0].signal, told[1].signal) == (9, 15)
    assert all(exit.stopped_by_launcher for exit in told.values())


def test_a_launcher_that_hangs_is_killed_by_stop_and_its_ranks_with_it(lab: Lab) -> None:
    launcher = lab.launch(lab.script(SLEEPER))
    start(lab)
    pids = lab.pids()
    launcher.send_signal(signal.SIGSTOP)
    assert not gone(pids)
    with pytest.raises(Unavailable, match="cannot be said"):
        start(lab, 2)
    assert lab.backend.stop(JOB, 1, grace_seconds=0, deadline_seconds=0.5)
    assert gone(pids)


def test_a_rank_that_crashes_takes_its_workers_along(lab: Lab) -> None:
    lab.launch(
        lab.script("""
        import os, subprocess
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
        os.kill(os.getpid(), 11)
    """)
    )
    start(lab)
    told = all_exits(lab)
    assert {exit.signal for exit in told.values()} == {11}
    workers = {rank: int(exit.last_lines[0]) for rank, exit in told.items()}
    wait_for(lambda: gone(workers), "workers are gone")


def test_a_child_that_outlives_a_finished_rank_delays_its_exit_only_a_while(lab: Lab) -> None:
    lab.launch(lab.script("import subprocess\nsubprocess.Popen(['sleep', '600'])\n"))
    start(lab)
    assert {exit.exit_code for exit in all_exits(lab).values()} == {0}
    assert lab.backend.observe(JOB).phase == "finished"


# Starting


def test_ranks_are_started_once_whoever_asks_again(lab: Lab) -> None:
    lab.launch(lab.script(SLEEPER))
    start(lab)
    before = lab.pids()
    start(lab)
    assert lab.pids() == before
    with pytest.raises(Conflict):
        lab.backend.start(StartRequest(JOB, 1, "another"))
    with pytest.raises(Conflict):
        start(lab, 2)
    assert len(lab.messages(AttemptStarted)) == 1


def test_a_launcher_that_replaces_a_killed_one_refuses_what_that_one_had_run(lab: Lab) -> None:
    script = lab.script(SLEEPER)
    lab.launch(script).kill()
    lab.processes["node0"].wait()
    lab.launch(script)
    start(lab, 3)
    lab.processes["node0"].kill()
    lab.processes["node0"].wait()
    lab.launch(script)
    assert lab.node_file().attempt == 3
    (lab.files.folder / "placement.json").unlink()  # even where the backend has forgotten
    with pytest.raises(Conflict):
        start(lab, 3)
    start(lab, 4)


def test_a_zygote_that_cannot_start_is_a_failure_in_words(lab: Lab) -> None:
    lab.launch(lab.script(SLEEPER), python="/nonexistent/python")
    with pytest.raises(Ambiguous, match="cannot be started"):
        start(lab)
    assert {exit.error.type for exit in all_exits(lab).values()} == {"StartFailure"}


def test_a_rank_is_given_what_the_documentation_says(lab: Lab) -> None:
    lab.launch(lab.script("import json, os\nprint(json.dumps(dict(os.environ)))\n"), env={"TRANSOM_CKPT_DIR": "/c"})
    start(lab, 3, resume_step=40)
    all_exits(lab)
    given = [json.loads(line) for line in lab.lines()]
    assert {(env["RANK"], env["LOCAL_RANK"]) for env in given} == {("0", "0"), ("1", "1")}
    wanted = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "2", "TRANSOM_JOB": JOB, "TRANSOM_ATTEMPT": "3", "TRANSOM_NODE": "node0",
        "TRANSOM_SOCKET": str(lab.folder / "node0.t"), "TRANSOM_RESUME_STEP": "40", "TRANSOM_TOKEN": "token-3",
        "TRANSOM_ALLOW_INJECT": "0", "TRANSOM_CKPT_DIR": "/c", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for env in given:
        assert {name: env.get(name) for name in wanted} == wanted
        assert 20_000 <= int(env["MASTER_PORT"]) < 30_000


# Telling


def test_the_exit_is_told_after_the_last_line_even_in_a_flood(lab: Lab) -> None:
    lab.launch(
        lab.script("""
        import os, sys
        for n in range(60_000):
            print("line", n, "x" * 80)
        print("last words")
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
    """)
    )
    start(lab)
    told = all_exits(lab)
    for rank, exit in told.items():
        messages = [message for message in lab.messages() if message.rank == rank]
        assert messages[-1] == exit
        logs = [message for message in messages if isinstance(message, Logs)]
        assert logs[-1].lines[-1].text == "last words"
        assert [message.sequence for message in logs] == list(range(len(logs)))
        assert exit.last_lines[-1] == "last words"
    assert any("were dropped here" in line for line in lab.lines())
    assert wait_for(lambda: lab.messages(NodeHeartbeat)[-1].dropped, "the drops are counted") > 1000


def test_a_traceback_is_one_record_and_the_error_of_the_exit(lab: Lab) -> None:
    lab.launch(
        lab.script("""
        def inner():
            raise RuntimeError("no such layer\\nsecond line")
        try:
            inner()
        except RuntimeError as error:
            raise ValueError("wrapped") from error
    """)
    )
    start(lab)
    exit = all_exits(lab)[0]
    assert (exit.exit_code, exit.error.type, exit.error.text) == (1, "ValueError", "wrapped")
    assert "no such layer\nsecond line" in exit.error.traceback
    assert "zygote" not in exit.error.traceback
    records = [line for line in lab.lines() if "direct cause" in line or "ValueError" in line]
    assert all("train.py" in record for record in records)


def test_events_come_in_the_order_of_a_life(lab: Lab) -> None:
    lab.launch(
        lab.script(
            """
        s = connect(); hello(s)
        metrics(s, 0, 7)
        print("hello")
    """,
            client=True,
        )
    )
    start(lab, resume_step=5)
    wait_for(lambda: lab.messages(AttemptEnded), "the end")
    beside = NodeHeartbeat | DeviceMetrics  # those come by the clock
    kinds = [type(m) for m in lab.messages() if m.rank in (-1, 0) and not isinstance(m, beside)]
    assert kinds[0] is AttemptStarted
    assert kinds[-2:] == [RankExited, AttemptEnded]
    assert {RankStarted, Metrics, Logs} == set(kinds[1:-2])
    first = lab.messages(AttemptStarted)[0]
    assert (first.world_size, first.resume_step, [p.rank for p in first.places]) == (2, 5, [0, 1])
    started = lab.messages(RankStarted)[0]
    assert (started.scheduler_ids, started.pid > 0) == ({"slurm": "7"}, True)
    assert lab.messages(AttemptEnded)[0].outcome == "finished"
    assert lab.backend.observe(JOB).phase == "finished"


def test_a_heartbeat_covers_everything_received_before_it(lab: Lab) -> None:
    lab.launch(lab.script(REPORTER, client=True))
    start(lab)
    wait_for(lambda: len(lab.messages(Metrics)) > 100, "metrics flow")
    watermark, late = 0.0, 0
    messages = lab.messages()
    for message in messages:
        if isinstance(message, NodeHeartbeat):
            watermark = max(watermark, message.at)
        elif isinstance(message, Metrics):
            late += message.at < watermark - 0.02  # between a rank's stamp and its send
    assert late == 0
    alive = [m.ranks_alive for m in messages if isinstance(m, NodeHeartbeat) and m.attempt == 1]
    assert alive[-1] == (0, 1)


def test_a_stopped_rank_is_told_and_holds_up_nobody(lab: Lab) -> None:
    lab.launch(lab.script(REPORTER, client=True))
    start(lab)
    wait_for(lambda: {m.rank for m in lab.messages(Metrics)} == {0, 1}, "both report")
    pid = lab.pids()[0]
    for _ in range(5):  # at any instant
        os.kill(pid, signal.SIGSTOP)
        count = len([m for m in lab.messages(Metrics) if m.rank == 1])
        wait_for(
            lambda count=count: len([m for m in lab.messages(Metrics) if m.rank == 1]) > count + 5, "rank 1 goes on"
        )
        os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: [m for m in lab.messages(RankStalled) if m.state == "T"], "the stop is told")
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: lab.messages(RankStalled)[-1].state in "SR", "and the awakening")
    assert {m.rank for m in lab.messages(RankStalled)} == {0}


def test_stacks_are_had_of_those_that_answer(lab: Lab) -> None:
    lab.launch(
        lab.script("""
        import time
        def waits_here():
            print("up", flush=True)
            time.sleep(600)
        waits_here()
    """)
    )
    start(lab)
    wait_for(lambda: len(lab.lines()) == 2, "both are up")
    os.kill(lab.pids()[1], signal.SIGSTOP)
    stacks = lab.backend.collect_evidence(JOB, 1, deadline_seconds=0.5)
    assert set(stacks) == {0}
    assert "waits_here" in stacks[0]
    wait_for(lambda: len(lab.messages(RankStacks)) == 2, "both are told of")
    told = {message.rank: message for message in lab.messages(RankStacks)}
    assert "waits_here" in told[0].stacks
    assert (told[1].stacks, told[1].state) == ("", "T")  # no answer is evidence too


def test_faults_are_done_only_where_allowed_and_are_labelled_first(lab: Lab) -> None:
    lab.launch(lab.script(SLEEPER), allow_inject=True)
    start(lab)
    assert lab.backend.inject(JOB, 1, "kill", {}) == ""
    told = wait_for(lambda: exits(lab), "the exit")
    assert (told[1].signal, told[1].stopped_by_launcher) == (9, False)
    kinds = [type(m) for m in lab.messages(FaultInjected, RankExited)]
    assert kinds == [FaultInjected, RankExited]
    assert "does not listen" in lab.backend.inject(JOB, 0, "nan", {"at_step": 3})
    assert "does not run" in lab.backend.inject(JOB, 1, "stop", {})


def test_faults_are_refused_by_default(lab: Lab) -> None:
    lab.launch(lab.script(SLEEPER))
    start(lab)
    assert "--allow-inject" in lab.backend.inject(JOB, 0, "kill", {})
    assert len(lab.pids()) == 2


def test_a_fault_that_a_rank_does_itself_reaches_it(lab: Lab) -> None:
    lab.launch(
        lab.script(
            """
        s = connect(); hello(s)
        print("got", s.recv(65536).decode(), flush=True)
        time.sleep(600)
    """,
            client=True,
        ),
        allow_inject=True,
    )
    start(lab)
    wait_for(lambda: len(lab.messages(RankStarted)) == 2, "both said hello")
    assert lab.backend.inject(JOB, 1, "slow", {"factor": 4.0, "seconds": 2.0}) == ""
    line = wait_for(lambda: [x for x in lab.lines() if x.startswith("got")], "it arrives")[0]
    assert line.startswith("got inject.v1")
    assert "parameters are" in lab.backend.inject(JOB, 1, "slow", {"fcator": 4.0})


def test_output_is_shown_with_the_rank_before_each_line(lab: Lab) -> None:
    lab.launch(lab.script("print('a'); print('b')\n"))
    start(lab)
    all_exits(lab)
    wait_for(lambda: all(f"[rank{rank}]: a\n[rank{rank}]: b\n" in lab.shown() for rank in (0, 1)), lab.shown())


def test_a_dead_bus_is_not_noticed_by_ranks(lab: Lab) -> None:
    lab.launch(lab.script(REPORTER, client=True))
    start(lab)
    wait_for(lambda: lab.messages(Metrics), "metrics flow")
    connection = sqlite3.connect(lab.bus_file, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")  # nobody can write now
    before = lab.backend.observe(JOB).step
    wait_for(lambda: lab.backend.observe(JOB).step > before + 20, "steps go on")
    connection.execute("ROLLBACK")
    connection.close()
    wait_for(lambda: max(m.step for m in lab.messages(Metrics)) > before + 20, "what was kept arrives")
    steps = [m.step for m in lab.messages(Metrics) if m.rank == 0]
    assert steps == list(range(len(steps)))


def test_start_time_tells_a_process_from_a_later_one_of_its_id() -> None:
    assert is_alive(os.getpid(), start_time_of(os.getpid()))
    assert not is_alive(os.getpid(), start_time_of(os.getpid()) + 1)
    assert Path(f"/proc/{os.getpid()}").exists()
