"""Real processes of a rank without torch: how they begin, fork, raise and end, and what their launcher hears."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_launcher import FakeLauncher

TIMEOUT_SECONDS = 60


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[FakeLauncher]:
    launcher = FakeLauncher(tmp_path / "t.sock")
    yield launcher
    launcher.close()


def run_rank(
    program: str, environment: dict[str, str], *, timeout: float = TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment, capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip


def test_a_normal_end_reports_the_last_step_and_finished(launcher: FakeLauncher) -> None:
    program = "import transom\nrun = transom.init()\nassert run is transom.init()\nrun.log(step=1, loss=0.5)\n"
    environment = launcher.environment(SLURM_JOB_ID="77", TRANSOM_RESUME_STEP="0")
    result = run_rank(program, environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    launcher.wait_for(lambda: launcher.metrics() and launcher.metrics()[-1].phase == "finished")
    assert launcher.rows() == {1: {"train.loss": 0.5}}
    (hello,) = launcher.hellos
    assert (hello.job, hello.attempt, hello.rank, hello.token) == ("job", 3, 0, "secret")
    assert hello.scheduler_ids["SLURM_JOB_ID"] == "77"


def test_an_exception_is_printed_reported_without_finished_and_ends_the_process_at_once(
    launcher: FakeLauncher,
) -> None:
    program = """
import atexit, threading, transom
run = transom.init()
atexit.register(print, "exit functions run")
run.log(step=1, loss=0.5)
threading.Thread(target=threading.Event().wait).start()  # Python would wait for it for ever
raise KeyError("weights")
"""
    result = run_rank(program, launcher.environment())
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.endswith("KeyError: 'weights'\n")
    assert result.stdout == "exit functions run\n"
    launcher.wait_for(launcher.rows)
    assert "finished" not in {message.phase for message in launcher.metrics()}


WRAPPER = """
import io, sys, transom
transom.init()
inner = sys.excepthook
def wrapped(*error):  # as torch.distributed does it in init_process_group
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        inner(*error)
    finally:
        text, sys.stderr = sys.stderr.getvalue(), stderr
    sys.stderr.write(text.replace("KeyError", "[rank0]: KeyError"))
sys.excepthook = wrapped
"""


@pytest.mark.parametrize("again", [False, True])
def test_the_traceback_survives_a_hook_around_ours(launcher: FakeLauncher, again: bool) -> None:
    hook_again = "from _transom_ingest.run import hook_exceptions_again\nhook_exceptions_again()\n" if again else ""
    program = WRAPPER + hook_again + "raise KeyError('weights')\n"
    result = run_rank(program, launcher.environment())
    assert result.returncode == 1
    assert result.stderr.endswith("[rank0]: KeyError: 'weights'\n")


def test_an_exit_function_that_hangs_does_not_hold_a_rank_that_raised(launcher: FakeLauncher) -> None:
    program = "import atexit, time, transom\ntransom.init()\natexit.register(time.sleep, 1_000)\n1 / 0\n"
    assert run_rank(program, launcher.environment()).returncode == 1


def test_an_interrupt_keeps_pythons_own_way_out(launcher: FakeLauncher) -> None:
    program = "import os, signal, transom\ntransom.init()\nos.kill(os.getpid(), signal.SIGINT)\n"
    assert run_rank(program, launcher.environment()).returncode == -signal.SIGINT


def test_a_launcher_that_takes_nothing_does_not_hold_up_the_end(tmp_path: Path, launcher: FakeLauncher) -> None:
    program = "import transom\ntransom.init().log(step=1, loss=0.5)\nprint('done')\n"
    environment = launcher.environment(TRANSOM_SOCKET=str(tmp_path / "nobody.sock"))
    result = run_rank(program, environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_a_forked_child_reports_nothing_and_does_not_disturb_the_rank(launcher: FakeLauncher) -> None:
    program = """
import os, sys, transom
run = transom.init()
run.log(step=1, loss=0.5)
child = os.fork()
if child == 0:
    assert not transom.init().active
    run.log(step=666, loss=0.0)
    with run.phase("eval"):
        pass
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
child = os.fork()
if child == 0:
    raise RuntimeError("in the child")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
run.log(step=2, loss=0.25)
"""
    result = run_rank(program, launcher.environment())
    assert result.returncode == 0, result.stderr
    launcher.wait_for(lambda: launcher.metrics() and launcher.metrics()[-1].phase == "finished")
    assert launcher.rows() == {1: {"train.loss": 0.5}, 2: {"train.loss": 0.25}}
    assert len(launcher.hellos) == 1
    assert len({message.sequence for message in launcher.metrics()}) == len(launcher.metrics())


def test_a_zygote_that_has_asked_for_a_run_still_forks_ranks_that_report(launcher: FakeLauncher) -> None:
    program = """
import os, sys, transom
socket = os.environ.pop("TRANSOM_SOCKET")
assert not transom.init().active  # a preloaded module of the user's does that
if os.fork() == 0:
    os.environ["TRANSOM_SOCKET"] = socket
    transom.init().log(step=1, loss=0.5)
    sys.exit()
os.wait()
"""
    assert run_rank(program, launcher.environment()).returncode == 0
    launcher.wait_for(lambda: launcher.rows() == {1: {"train.loss": 0.5}})


def test_a_process_that_a_rank_starts_is_not_that_rank(launcher: FakeLauncher) -> None:
    program = """
import subprocess, sys, transom
transom.init()
child = "import transom; run = transom.init(); run.log(step=666, loss=0.0); print(run.active)"
print(subprocess.run([sys.executable, "-P", "-c", child], capture_output=True, text=True, check=True).stdout)
"""
    result = run_rank(program, launcher.environment())
    assert result.stdout.strip() == "False"
    launcher.wait_for(lambda: launcher.metrics() and launcher.metrics()[-1].phase == "finished")
    assert len(launcher.hellos) == 1


def test_a_rank_outlives_its_launchers_socket_and_says_hello_to_the_next(tmp_path: Path) -> None:
    program = """
import sys, transom
run = transom.init()
for line in sys.stdin:
    run.log(step=int(line), loss=1.0)
    print(line, end="", flush=True)
"""
    path = tmp_path / "t.sock"
    first = FakeLauncher(path)
    rank = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        env=first.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdin.write("1\n")
    rank.stdin.flush()
    first.wait_for(first.rows)
    first.close()
    rank.stdin.write("2\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "1\n"
    assert rank.stdout.readline() == "2\n"
    second = FakeLauncher(path)
    second.wait_for(lambda: 2 in second.rows())
    assert second.hellos == first.hellos
    rank.communicate(timeout=TIMEOUT_SECONDS)
    assert rank.returncode == 0
    second.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"TRANSOM_SOCKET": ""}, ""),
        ({"TRANSOM_JOB": None}, "'TRANSOM_JOB' is not set; start with `transom run`"),
        ({"TRANSOM_ATTEMPT": "two"}, "the environment is wrong"),
    ],
)
def test_a_process_without_a_whole_identity_trains_unreported(
    launcher: FakeLauncher, change: dict[str, str | None], said: str
) -> None:
    environment = launcher.environment()
    for name, value in change.items():
        environment.pop(name)
        if value is not None:
            environment[name] = value
    result = run_rank("import transom\nrun = transom.init()\nrun.log(step=1, loss=1.0)\n", environment)
    assert result.returncode == 0
    assert said in result.stderr
    assert bool(said) == bool(result.stderr)
    assert launcher.packets == []


def test_importing_the_face_loads_nothing_heavy_and_first_use_loads_rooms_privately() -> None:
    program = """
import json, sys, transom
after_import = sorted(sys.modules)
transom.init()
transom.LoggingHandler
after_use = sorted(sys.modules)
print(json.dumps([after_import, after_use]))
"""
    result = run_rank(program, {"PATH": os.environ["PATH"]})
    assert result.returncode == 0, result.stderr
    after_import, after_use = json.loads(result.stdout)
    for name in ("torch", "numpy", "msgspec", "asyncio", "pathlib", "ingest", "_transom_ingest", "ckpt_engine"):
        assert name not in after_import
    for name in ("torch", "numpy", "ingest", "ckpt_engine", "detectors", "pandas"):
        assert name not in after_use
    assert "_transom_ingest.run" in after_use


def test_integrations_get_the_ordinary_names() -> None:
    program = """
import transom
from detectors.verdict import Verdict
from ingest.codec import Codec
from ingest.events import TOPICS, Metrics
assert transom.Verdict is Verdict
assert transom.TOPICS is TOPICS
message = Metrics(job="j", attempt=1, rank=0, node="n", sequence=0, at=1.0, phase="train", step=1, steps=(1,),
                  ended_at=(1.0,), columns={"train.loss": (2.0,)})
encoded = Codec().encode(message)
assert transom.decode(encoded.headers, encoded.value) == message
try:
    transom.Chekpointer
except AttributeError as error:
    assert "Checkpointer" in str(error)
else:
    raise AssertionError
"""
    result = run_rank(program, {"PATH": os.environ["PATH"]})
    assert result.returncode == 0, result.stderr
