"""Jobs whose nodes a scheduler gives, before anything runs: keys, names, addresses, registrations, and who attends."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.clock import SystemClock
from pipelines.attend import Attendance
from pipelines.backends import BackendRefused, JobBackends, backend_names, over_launchers, submit
from pipelines.cli.torchrun_flags import FlagRefused, node_counts
from pipelines.launcher_key import KeyRefused, key_of, make_token, needed_key
from pipelines.node import NodeRefused, listen_of, own_node, take_registration
from pipelines.places import NameRefused, Places
from pipelines.run import JobRefused, RunOptions, nodes_of, read_job, register_job
from pipelines.settings import HOST_VARIABLES, LAUNCHER_TOKEN_VARIABLE, NODE_VARIABLES, Settings, load_settings
from recovery.backend import Rejected, StartRequest, Unavailable
from recovery.backends.local import LocalBackend
from recovery.backends.memory import MemoryBackend
from recovery.backends.scheduled import ScheduledBackend
from recovery.backends.simulated_allocation import SimulatedAllocation
from recovery.launcher.protocol import JobSpec
from tests.simulated_launchers import SimulatedLauncher, key

JOB = "job"
SPEC = JobSpec(job=JOB, script="train.py", nodes=2, nproc_per_node=2, backend="slurm")


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (LAUNCHER_TOKEN_VARIABLE, *NODE_VARIABLES, *HOST_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path, tmp_path)


def settings(tmp_path: Path, **recover: object) -> Settings:
    return load_settings(None, {"state_dir": tmp_path, "recover": recover})


def test_a_token_is_made_once_for_the_owner_alone_and_never_shown(places: Places) -> None:
    register_job(places, SPEC, RunOptions())
    file = places.job(JOB) / "token"
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_text()
    make_token(places.jobs, JOB)
    assert file.read_text() == before
    made = needed_key(places.jobs, JOB)
    assert made.token == before.strip().encode()
    assert before.strip() not in repr(made)


def test_a_job_of_this_machine_has_no_token(places: Places) -> None:
    register_job(places, JobSpec(job=JOB, script="x"), RunOptions())
    assert key_of(places.jobs, JOB) is None
    with pytest.raises(KeyRefused, match="TRANSOM_LAUNCHER_TOKEN_FILE"):
        needed_key(places.jobs, JOB)


def test_a_token_that_others_can_read_is_refused(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    register_job(places, SPEC, RunOptions())
    mine = places.state / "mounted"
    mine.write_text("f" * 64)
    mine.chmod(0o644)
    monkeypatch.setenv(LAUNCHER_TOKEN_VARIABLE, str(mine))
    with pytest.raises(KeyRefused, match="chmod 600"):
        key_of(places.jobs, JOB)
    mine.chmod(0o400)
    made = key_of(places.jobs, JOB)
    assert made is not None
    assert made.token == b"f" * 64


def test_the_node_is_named_as_its_scheduler_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NodeRefused, match="SLURMD_NODENAME"):
        own_node(None)
    monkeypatch.setenv("NODE_NAME", "pod-node")
    assert own_node(None) == "pod-node"
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert own_node(None) == "n7"
    assert own_node("given") == "given"
    with pytest.raises(NameRefused):
        own_node("../x")


def test_where_a_launcher_listens_and_what_others_are_told(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    register_job(places, SPEC, RunOptions())
    assert listen_of(None, None, places, JOB) == (None, "")
    listen, host = listen_of("auto", None, places, JOB)
    assert listen is not None
    assert (listen.host, listen.port, host) == ("", 0, socket.gethostname())
    listen, host = listen_of("10.0.0.1:7000", None, places, JOB)
    assert listen is not None
    assert (listen.host, listen.port, host) == ("10.0.0.1", 7000, "10.0.0.1")
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    assert listen_of("0.0.0.0:7000", None, places, JOB)[1] == "10.1.2.3"
    assert listen_of("auto", "told", places, JOB)[1] == "told"
    with pytest.raises(NodeRefused, match="auto or HOST:PORT"):
        listen_of("nonsense", None, places, JOB)


def test_without_a_token_nobody_listens(places: Places) -> None:
    register_job(places, JobSpec(job=JOB, script="x"), RunOptions())
    with pytest.raises(KeyRefused):
        listen_of("auto", None, places, JOB)


def test_a_registration_travels_in_two_files_and_is_taken_once(places: Places, tmp_path: Path) -> None:
    register_job(places, SPEC, RunOptions(spares=1))
    elsewhere = Places(tmp_path / "pod", tmp_path / "pod")
    elsewhere.state.mkdir()
    for _ in range(2):
        take_registration(elsewhere, JOB, places.job(JOB))
    assert read_job(elsewhere, JOB) == (SPEC, RunOptions(spares=1))
    assert not (elsewhere.job(JOB) / "token").exists()
    with pytest.raises(NodeRefused, match="not other"):
        take_registration(elsewhere, "other", places.job(JOB))
    with pytest.raises(NodeRefused, match=r"job\.json"):
        take_registration(elsewhere, "third", tmp_path / "nowhere")
    with pytest.raises(JobRefused):
        read_job(elsewhere, "third")


def test_the_nodes_of_a_schedulers_job_are_those_whose_launchers_are_known(places: Places) -> None:
    register_job(places, SPEC, RunOptions())
    assert nodes_of(places, SPEC, RunOptions()) == ()
    assert nodes_of(places, JobSpec(job=JOB, script="x", nodes=2), RunOptions(spares=1)) == ("node0", "node1", "node2")


def test_each_job_is_asked_of_its_own_backend(places: Places, tmp_path: Path) -> None:
    register_job(places, JobSpec(job=JOB, script="x"), RunOptions())
    register_job(places, JobSpec(job="far", script="x", backend="no-such"), RunOptions())
    backends = JobBackends(settings(tmp_path), places, SystemClock(), random.Random(1))
    assert isinstance(backends.of(JOB), LocalBackend)
    assert backends.observe(JOB).phase == "stopped"
    with pytest.raises(Unavailable, match="no backend 'no-such'; there are local, slurm, kubernetes"):
        backends.observe("far")
    with pytest.raises(Rejected):
        backends.observe("nobody")


def test_a_default_that_does_not_exist_is_said_at_once(places: Places, tmp_path: Path) -> None:
    with pytest.raises(BackendRefused, match=r"transom\.recovery\.backends"):
        JobBackends(settings(tmp_path, backend="no-such"), places, SystemClock(), random.Random(1))
    assert backend_names()[:3] == ("local", "slurm", "kubernetes")


def test_what_a_backend_cannot_do_is_said(places: Places) -> None:
    memory = MemoryBackend(SystemClock())
    with pytest.raises(BackendRefused, match="no launchers"):
        over_launchers(memory)
    with pytest.raises(BackendRefused, match="its own way"):
        submit(memory, JOB, nodes=2, command=())
    local = LocalBackend(places.jobs, SystemClock())
    assert over_launchers(local) is local


@pytest.mark.parametrize(("text", "counts"), [("1", (1, 0)), ("16", (16, 0)), ("4:4", (4, 0)), ("6:8", (8, 6))])
def test_a_scheduler_is_asked_for_so_many_nodes_and_the_job_may_go_on_with_fewer(
    text: str, counts: tuple[int, int]
) -> None:
    assert node_counts("slurm", text, 1, 0) == counts


@pytest.mark.parametrize("text", ["0", "4:2", "many", "-1", "", ":", "x:2"])
def test_what_is_no_number_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(FlagRefused):
        node_counts("slurm", text, 1, 0)


def test_on_this_machine_nodes_are_virtual_and_no_more_are_the_fewest() -> None:
    assert node_counts("local", "1", 4, 3) == (4, 3)
    with pytest.raises(FlagRefused, match="--virtual-nodes"):
        node_counts("local", "2", 1, 0)
    with pytest.raises(FlagRefused, match="more than the job's 4"):
        node_counts("local", "1", 4, 5)


class Attended:
    """A submitted job of two nodes, whose launchers come up when told to."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.scheduler = SimulatedAllocation(("n1", "n2"), clock)
        self.records = self.scheduler.register(JobSpec(job=JOB, script="x", nodes=2, backend="s"))
        self.launchers = {node: SimulatedLauncher(node, slots=1) for node in ("n1", "n2")}
        self.backend = ScheduledBackend(self.scheduler, lambda job: key(), clock, random.Random(1))
        self.backend.submit(JOB, nodes=2, command=())
        self.said: list[str] = []
        self.stop = threading.Event()
        self.clock = clock

    def up(self, *nodes: str) -> None:
        for node in nodes:
            self.scheduler.tell(JOB, self.launchers[node].where)

    def look(self) -> None:
        """One look of somebody who has just come."""
        Attendance(self.backend, JOB, self.clock)._look(self.said.append)

    @property
    def starts(self) -> int:
        return sum(len(launcher.starts) for launcher in self.launchers.values())


@pytest.fixture
def attended() -> Iterator[Attended]:
    attended = Attended()
    yield attended
    for launcher in attended.launchers.values():
        launcher.kill()


def test_the_first_attempt_is_started_when_enough_launchers_answer_and_by_one(attended: Attended) -> None:
    attended.up("n1")
    attended.look()
    assert attended.said == ["job job: 1 of 2 launchers answer"]
    attended.up("n2")
    for _ in range(3):
        attended.look()
    assert attended.starts == 2
    assert attended.backend.observe(JOB).attempt == 1
    assert "job job: attempt 1 with 2 ranks has started" in attended.said


def test_a_start_that_somebody_began_and_did_not_end_goes_on_under_its_own_token(attended: Attended) -> None:
    attended.up("n1", "n2")
    write, tokens = attended.records.write_placement, []

    def write_and_die(placement) -> None:
        write(placement)
        tokens.append(placement.token)
        raise KeyboardInterrupt

    attended.records.write_placement = write_and_die
    with pytest.raises(KeyboardInterrupt):
        attended.look()
    attended.records.write_placement = write
    attended.look()
    seen = attended.backend.observe(JOB)
    assert (seen.phase, seen.token, attended.starts) == ("running", tokens[0], 2)


def test_later_attempts_are_recoverys(attended: Attended) -> None:
    attended.up("n1", "n2")
    attended.look()
    for launcher in attended.launchers.values():
        launcher.end_ranks(exit_code=1)
    attended.look()
    assert attended.starts == 2
    assert "`transom recover` restarts it" in attended.said[-1]
    attended.backend.start(StartRequest(JOB, 2, "recovery's"))
    attended.look()
    assert attended.said[-1] == "job job: attempt 2 is running"


def test_what_is_held_is_not_started(attended: Attended) -> None:
    attended.up("n1", "n2")
    attended.scheduler.hold(JOB, "JobHeldUser")
    attended.look()
    assert attended.starts == 0
    assert attended.said == ["job job: an operator holds it: JobHeldUser"]


def test_attended_to_its_end_the_exit_code_is_the_jobs(attended: Attended) -> None:
    attended.up("n1", "n2")
    attended.look()
    for launcher in attended.launchers.values():
        launcher.end_ranks(exit_code=0)
    assert Attendance(attended.backend, JOB, attended.clock).run(attended.stop, attended.said.append) == 0
    assert attended.said[-1] == "job job: finished; every rank ended with exit code 0"
    end = attended.backend.end(JOB)
    assert end is not None
    assert end.outcome == "finished"


def test_who_leaves_leaves_the_job_alone(attended: Attended) -> None:
    attended.up("n1", "n2")
    attended.look()
    attended.stop.set()
    assert Attendance(attended.backend, JOB, attended.clock).run(attended.stop, attended.said.append) == 0
    assert "goes on" in attended.said[-1]
    assert attended.backend.observe(JOB).phase == "running"
