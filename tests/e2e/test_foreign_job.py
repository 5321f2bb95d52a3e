"""A job that torchrun launched and restarts: it reports by itself, is judged, and nothing is done to it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ingest.events import AttemptStarted, Metrics, NodeHeartbeat, RankExited
from recovery.action import Incident
from tests.embedded_chain import Chain, embedded_chain, eventually

TOKEN = secrets.token_hex(16)
WAIT_SECONDS = 240.0  # only for what never comes: four processes import torch, on a machine that may be busy
# Without it torch 2.15 keeps one store for all attempts, where gloo may find what the one before has left.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# Ranks of an attempt train until the test has seen them: how fast a machine is decides nothing.
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import transom

run = transom.init()
dist.init_process_group("gloo")
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
for step in range(1, 20_000):
    time.sleep(0.05)
    run.log(step=step, loss=1.0 / step)
    seen = torch.tensor(float(os.path.exists(f"{sys.argv[1]}.{restarts}")))
    dist.all_reduce(seen)
    if seen:
        break
if restarts == "0" and dist.get_rank() == 1:
    raise ZeroDivisionError("made by the test")
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def chain() -> Iterator[Chain]:
    port = free_port()
    with embedded_chain() as lab:
        token = lab.folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        lab.config.write_text(
            lab.config.read_text().replace(
                "[record]", f'[record]\nhost = "127.0.0.1"\nport = {port}\ntoken_file = "{token}"'
            )
        )
        lab.url = f"http://127.0.0.1:{port}"
        yield lab


def torchrun(chain: Chain) -> subprocess.Popen[bytes]:
    script = chain.folder / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend",
        "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "theirs", str(script), str(chain.folder / "seen"),
    ]  # fmt: skip
    environ = {
        **os.environ, "TRANSOM_REPORT_TO": chain.url, "TRANSOM_REPORT_TOKEN_FILE": str(chain.folder / "token"),
        "TRANSOM_NODE": "their-node", "OMP_NUM_THREADS": "1", OWN_STORE: "1", "CHAIN_MARK": str(chain.folder),
    }  # fmt: skip
    with (chain.folder / "torchrun.out").open("wb") as output:
        return subprocess.Popen(command, env=environ, cwd=chain.folder, stdout=output, stderr=output)


def attempt_seen(chain: Chain, process: subprocess.Popen[bytes], number: int) -> int:
    """The attempt with this place in the order of attempts, once it is known and both of its ranks have told steps."""

    def seen() -> int | None:
        assert process.poll() is None, chain.shown("torchrun")
        attempts = chain.attempts("theirs")
        if len(attempts) <= number:
            return None
        heard = [one for one in chain.messages(Metrics, job="theirs") if one.attempt == attempts[number]]
        return attempts[number] if {one.rank for one in heard if one.steps} == {0, 1} else None

    attempt = eventually(seen, f"attempt {number} {chain.messages(AttemptStarted)}", WAIT_SECONDS)
    assert attempt is not None
    return attempt


@pytest.mark.timeout(1_500)
def test_a_job_of_torchrun_is_watched_over_its_restart_and_left_to_torchrun(chain: Chain) -> None:
    chain.up(WAIT_SECONDS)
    process = torchrun(chain)
    try:
        first = attempt_seen(chain, process, 0)
        (chain.folder / "seen.0").touch()
        second = attempt_seen(chain, process, 1)
        (chain.folder / "seen.1").touch()
        assert process.wait(WAIT_SECONDS) == 0, chain.shown("torchrun")
    finally:
        process.kill()
        process.wait()
    assert first < second
    started = chain.messages(AttemptStarted, job="theirs")
    assert [one.attempt for one in started] == [first, second]
    assert [(place.rank, place.node) for place in started[0].places] == [(0, "their-node"), (1, "their-node")]
    assert {(one.world_size, one.restarts_by) for one in started} == {(2, "torchrun")}
    assert chain.messages(NodeHeartbeat, job="theirs")

    # Rank 0 of the first attempt is ended by torchrun with SIGTERM, of which no process can tell.
    def ends() -> set[tuple[int, int, str]]:
        exits = chain.messages(RankExited, job="theirs")
        return {(one.attempt, one.rank, one.error.type if one.error else "") for one in exits}

    told = {(first, 1, "ZeroDivisionError"), (second, 0, ""), (second, 1, "")}
    eventually(lambda: told <= ends(), f"the ends of the ranks {ends()}", WAIT_SECONDS)

    verdict = eventually(
        lambda: next((one for one in chain.verdicts("theirs") if one.attempt == first), None), "a verdict", WAIT_SECONDS
    )
    assert (verdict.fault_class, verdict.culprits[0].rank) == ("user_error", 1)
    assert verdict.restarts_by == "torchrun"
    observed = eventually(
        lambda: next((one for one in chain.messages(Incident, job="theirs") if one.state == "notified"), None),
        "recovery observes", WAIT_SECONDS,
    )  # fmt: skip
    assert "torchrun restarts this job" in observed.cause
    assert {action.verb for action in chain.actions("theirs")} <= {"notify"}
    assert eventually(lambda: chain.rows("events", "theirs"), "its events in the ledger", WAIT_SECONDS)
