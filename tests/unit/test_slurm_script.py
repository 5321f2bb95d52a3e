"""The batch script: what sbatch reads of it, and that bash takes it as it is meant."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import msgspec
import pytest

from ingest.clock import SystemClock
from pipelines.run import RunOptions
from pipelines.run_scheduled import ScheduledRun
from pipelines.settings import Settings
from recovery.backends.slurm_script import SlurmOptions, batch_script
from recovery.launcher.protocol import JobSpec

COMMAND = ("/opt/my env/python", "-m", "pipelines", "launcher", "--job", "llama")


def script(folder: Path = Path("/shared/jobs/llama"), **options: object) -> str:
    chosen = msgspec.convert(options, SlurmOptions)
    return batch_script("llama", nodes_min=2, nodes_max=3, command=COMMAND, folder=folder, options=chosen)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_it_asks_for_what_recovery_needs() -> None:
    asked = directives(script())
    assert asked[:7] == [
        "--job-name=llama", "--comment=t:llama:0:", "--nodes=2-3", "--dependency=singleton", "--requeue", "--no-kill",
        "--open-mode=append",
    ]  # fmt: skip
    assert "--signal=TERM@120" in asked


def test_a_sites_own_options_come_last_and_are_quoted_where_they_must() -> None:
    asked = directives(script(sbatch=["--partition=gpu", "--constraint=a100 & nvlink"], notice_seconds=60))
    assert asked[-2:] == ["--partition=gpu", '--constraint="a100 & nvlink"']
    assert "--signal=TERM@60" in asked


def run(folder: Path, text: str, outcome: str = "") -> tuple[int, str]:
    """The script under bash with an srun that says what it was told; the exit code and that."""
    srun = folder / "srun"
    outcome_file = folder / "job's folder" / "outcome.json"
    outcome_file.parent.mkdir(exist_ok=True)
    srun.write_text(
        f"#!/bin/bash\nprintf '%s\\n' \"$@\"\n[ -z '{outcome}' ] || echo '{outcome}' > \"{outcome_file}\"\n"
    )
    srun.chmod(0o700)
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=False,
        env={"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NUM_NODES": "3"},
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("outcome", "code"), [('{"outcome": "finished"}', 0), ('{"outcome": "failed", "reason": "finished"}', 1), ("", 75)]
)
def test_its_exit_code_is_the_outcome_of_the_job(tmp_path: Path, outcome: str, code: int) -> None:
    text = script(tmp_path / "job's folder")
    found, told = run(tmp_path, text, outcome)
    assert found == code
    assert "--nodes=3" in told.splitlines()
    assert told.splitlines()[-len(COMMAND) :] == list(COMMAND)


def test_a_job_that_is_over_runs_nothing_although_somebody_has_requeued_it(tmp_path: Path) -> None:
    text = script(tmp_path / "job's folder")
    run(tmp_path, text, '{"outcome": "finished"}')
    assert run(tmp_path, text) == (1, "")


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="sbach"):
        script(sbach=[])


def test_the_front_prints_what_it_would_submit_and_registers_the_job(tmp_path: Path) -> None:
    settings = Settings.model_validate({"state_dir": tmp_path / "s"})
    spec = JobSpec(job="llama", script="x.py", nodes=2, nproc_per_node=2, backend="slurm")
    front = ScheduledRun(settings, spec, RunOptions(spares=1), SystemClock(), random.Random(1), [])
    text = front.script()
    assert "--nodes=2-3" in directives(text)
    assert "launcher --job llama --listen auto --with-engine" in text
    assert (tmp_path / "s" / "jobs" / "llama" / "token").exists()
