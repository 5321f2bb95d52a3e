"""The handle of a training script: what it takes, what becomes of it, and that it never disturbs."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingest.run
from ingest.clock import SystemClock
from ingest.devices import Gpu
from ingest.events import LogLine
from ingest.identity import RankIdentity
from ingest.run import LoggingHandler, Run
from tests.fake_launcher import FakeLauncher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[FakeLauncher]:
    launcher = FakeLauncher(tmp_path / "t.sock")
    yield launcher
    launcher.close()


@pytest.fixture
def run(launcher: FakeLauncher) -> Iterator[Run]:
    run = Run(
        RankIdentity(job="job", attempt=3, rank=1, node="node-0", socket=str(launcher.path), token="secret"),
        SystemClock(),
    )
    run.start()
    yield run
    run.stop()


def sent_rows(launcher: FakeLauncher, run: Run) -> dict[int, dict[str, float]]:
    run.finish()
    launcher.wait_for(lambda: launcher.metrics() and launcher.metrics()[-1].phase == "finished")
    return launcher.rows()


def test_numbers_of_all_kinds_arrive_under_train_unless_their_name_has_a_dot(launcher: FakeLauncher, run: Run) -> None:
    run.log(step=4, loss=np.float32(0.5), accuracy=1, good=True, bad=math.nan, **{"hw.gpu.power": 300.0})
    (row,) = sent_rows(launcher, run).items()
    step, samples = row
    assert step == 4
    assert math.isnan(samples.pop("train.bad"))
    assert samples == {"train.loss": 0.5, "train.accuracy": 1.0, "train.good": 1.0, "hw.gpu.power": 300.0}


def test_what_is_no_number_is_left_out_and_said_once(
    launcher: FakeLauncher, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        run.log(step=1, text="much", many=np.zeros(3), none=None, huge=10**400, loss=1.0)
    run.log(step="last", loss=2.0)  # type: ignore[arg-type]
    run.step("last")  # type: ignore[arg-type]
    run.step(10**30)
    assert sent_rows(launcher, run) == {1: {"train.loss": 2.0}}
    assert sorted(record.message.split()[1] for record in caplog.records) == [
        "huge",
        "many",
        "none",
        "text",
        "the",
    ]


def test_phases_nest_and_go_before_what_hooks_see(run: Run) -> None:
    assert run.current_phase == "init"
    run.see_phase("train")
    with run.phase("eval"):
        run.see_phase("collective")
        assert run.current_phase == "eval"
        with contextlib.suppress(KeyError), run.phase("checkpoint"):
            assert run.current_phase == "checkpoint"
            raise KeyError
        assert run.current_phase == "eval"
    assert run.current_phase == "collective"


def test_a_phase_that_does_not_exist_is_said_and_changes_nothing(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with run.phase("lunch"):  # type: ignore[arg-type]
        assert run.current_phase == "init"
    assert "the phase 'lunch' is not one of init, warmup, train" in caplog.text


def test_finishing_sends_the_last_row_and_the_phase_and_ends_reporting(launcher: FakeLauncher, run: Run) -> None:
    run.log(step=1, loss=1.0)
    with run.phase("eval"):
        assert sent_rows(launcher, run) == {1: {"train.loss": 1.0}}
    assert not run.active
    run.log(step=2, loss=1.0)
    run.finish()
    assert list(launcher.rows()) == [1]


def test_a_crash_does_not_say_finished(launcher: FakeLauncher, run: Run) -> None:
    run.see_phase("train")
    run.log(step=1, loss=1.0)
    run.stop()
    launcher.wait_for(launcher.rows)
    assert "finished" not in {message.phase for message in launcher.metrics()}


def test_a_run_without_a_launcher_takes_every_call_and_does_nothing() -> None:
    run = Run(None, SystemClock())
    run.log(step=1, loss=1.0)
    run.step(2)
    with run.phase("eval"):
        pass
    run.log_line(LogLine(at=0.0, stream="logging", text="x"))
    run.see_gpu(Gpu(None, "0000:3b:00.0"))
    run.finish()
    assert not run.active
    assert run.resume_step is None


def test_the_gpu_that_torch_opened_is_told_by_a_second_hello(launcher: FakeLauncher, run: Run) -> None:
    launcher.wait_for(lambda: launcher.hellos)
    run.see_gpu(Gpu("GPU-1", "0000:3b:00.0"))
    run.see_gpu(Gpu("GPU-1", "0000:3b:00.0"))
    launcher.wait_for(lambda: len(launcher.hellos) == 2)
    assert launcher.hellos[1].gpu_uuid == "GPU-1"
    assert launcher.hellos[1].token == launcher.hellos[0].token == "secret"


def test_the_role_that_the_job_gives_is_told_by_a_second_hello_and_stays_with_the_gpu(
    launcher: FakeLauncher, run: Run
) -> None:
    launcher.wait_for(lambda: launcher.hellos)
    run.take_role("stage1")
    run.take_role("stage1")
    launcher.wait_for(lambda: len(launcher.hellos) == 2)
    run.see_gpu(Gpu("GPU-1", "0000:3b:00.0"))
    launcher.wait_for(lambda: len(launcher.hellos) == 3)
    assert [hello.role for hello in launcher.hellos] == ["", "stage1", "stage1"]


def test_the_first_step_after_a_resume_is_the_one_after_the_checkpoint() -> None:
    run = Run(
        RankIdentity(job="job", attempt=3, rank=1, node="node-0", socket="/nowhere", resume_step=30),
        SystemClock(),
    )
    run.rows.begin()
    assert (run.resume_step, run.current_step) == (30, 31)


def test_log_records_arrive_with_level_and_traceback(
    launcher: FakeLauncher, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest.run._process, "run", run)
    logger = logging.getLogger("a user's model")
    handler = LoggingHandler()
    logger.addHandler(handler)
    logger.warning("gradient of %s is odd", "layer 3")
    try:
        raise KeyError("weights")
    except KeyError:
        logger.exception("lost")
    logger.removeHandler(handler)
    run.finish()
    launcher.wait_for(lambda: len(launcher.lines()) == 2)
    first, second = launcher.lines()
    assert first == "WARNING a user's model: gradient of layer 3 is odd"
    assert second.startswith("ERROR a user's model: lost\nTraceback (most recent call last):")
    assert second.endswith("KeyError: 'weights'")


def test_a_logging_handler_outside_a_launcher_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest.run._process, "run", None)
    logger = logging.getLogger("a user's model")
    handler = LoggingHandler("WARNING")
    logger.addHandler(handler)
    logger.error("nobody hears")
    logger.removeHandler(handler)
