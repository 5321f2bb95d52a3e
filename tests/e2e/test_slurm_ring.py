"""Real jobs on real Slurm through the whole ring: verdict, restart in the allocation, then without the bad node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.events import AttemptStarted
from tests.embedded_chain import STEPS, Chain, embedded_chain, eventually
from tests.slurm_lab import SlurmLab

DEADLINE_SECONDS = 150.0  # imports of torch in five processes on a busy machine
TRAIN = Path(__file__).resolve().parents[2] / "pipelines" / "demo_job" / "train.py"
SMALL = ("--width", "32", "--layers", "1", "--context", "16", "--batch", "2", "--save-every", "5")
SETTINGS = """
[recover.modes]
gpu_lost = "auto"
"""


@pytest.fixture(scope="module")
def services(slurm_of_the_session: SlurmLab) -> Iterator[Chain]:
    """Services and jobs that know the lab's Slurm, on nodes that are all this machine."""
    with pytest.MonkeyPatch.context() as patch, embedded_chain(SETTINGS) as chain:
        patch.setenv("SLURM_CONF", str(slurm_of_the_session.config))
        patch.setenv("TRANSOM_HOST", "127.0.0.1")
        chain.up()
        yield chain
        slurm_of_the_session.clear()  # before the folder goes, in which launchers write


@pytest.fixture
def chain(services: Chain, slurm: SlurmLab) -> Chain:
    return services


def numbers(slurm: SlurmLab, job: str) -> list[int]:
    return [number for number, _, _ in slurm.commands.jobs_named(job)]


def run(chain: Chain, job: str, script: str, *arguments: str, torch: bool) -> object:
    return chain.transom(
        "run", "--config", str(chain.config), "--job", job, "--backend", "slurm", "--nnodes", "2",
        "--nproc-per-node", "2", "--allow-inject", "--quiet", script, *arguments, torch=torch,
    )  # fmt: skip


def await_steps(chain: Chain, attempt: int, steps: int) -> AttemptStarted:
    """How that attempt began, once all of its ranks are so far."""
    try:
        eventually(lambda: chain.steps("ring", attempt) >= steps, f"step {steps} of {attempt}", DEADLINE_SECONDS)
    except AssertionError as error:
        error.add_note(f"{chain.shown('run')}\n{chain.log('recover')}")
        raise
    return next(one for one in chain.messages(AttemptStarted, job="ring") if one.attempt == attempt)


def test_a_torch_job_comes_back_in_its_allocation_and_then_without_the_bad_node(chain: Chain, slurm: SlurmLab) -> None:
    run(chain, "ring", str(TRAIN), *SMALL, torch=True)
    await_steps(chain, 1, 12)
    (number,) = numbers(slurm, "ring")

    chain.call("inject", "kill", "--job", "ring", "--rank", "1")
    second = await_steps(chain, 2, 20)
    assert second.resume_step is not None
    assert second.resume_step >= 5
    assert slurm.job(number).restarts == 0, "the first rung needs no scheduler"
    first_nodes = slurm.commands.hostnames(slurm.job(number).nodes)
    assert {place.node for place in second.places} == set(first_nodes)

    bad = next(place.node for place in second.places if place.rank == 3)
    chain.call("inject", "xid", "--job", "ring", "--rank", "3")
    third = await_steps(chain, 3, 30)
    seen = slurm.job(number)
    assert (seen.restarts, seen.phase) == (1, "running")
    assert bad not in {*slurm.commands.hostnames(seen.nodes), *(place.node for place in third.places)}
    assert bad in slurm.commands.hostnames(seen.excluded)
    assert third.resume_step is not None
    assert third.resume_step >= second.resume_step
    assert chain.attempts("ring") == [1, 2, 3]


def test_a_job_that_finishes_is_completed_for_slurm_too(chain: Chain, slurm: SlurmLab) -> None:
    script = chain.folder / "finishes.py"
    script.write_text(STEPS + "for step in steps(20): pass\n")
    front = run(chain, "short", str(script), torch=False)
    assert front.wait(DEADLINE_SECONDS) == 0, chain.shown("run")
    (number,) = numbers(slurm, "short")
    assert slurm.wait_for_phase(number, "ended").state == "COMPLETED"


def test_a_job_that_cannot_start_is_given_up_with_its_error_and_slurm_sees_a_failure(
    chain: Chain, slurm: SlurmLab
) -> None:
    script = chain.folder / "doomed.py"
    script.write_text("import no_such_module_anywhere\n")
    front = run(chain, "doomed", str(script), torch=False)
    assert front.wait(DEADLINE_SECONDS) == 1, chain.shown("run")
    assert "no_such_module_anywhere" in chain.shown("run")
    assert len(chain.attempts("doomed")) <= 3, "two restarts at the most"
    (number,) = numbers(slurm, "doomed")
    job = slurm.wait_for_phase(number, "ended")
    assert (job.state, job.restarts) == ("FAILED", 0)
