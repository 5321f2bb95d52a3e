"""What runs on one node of a scheduler's job: its launcher and, beside it, a checkpoint engine that outlives ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ingest.clock import Clock
from pipelines.children import ENGINE_STOP_SECONDS_MAX, Children
from pipelines.errors import StatedError
from pipelines.launcher_key import needed_key
from pipelines.open_bus import own_command
from pipelines.places import Places, checked_name
from pipelines.run import RunOptions, register_job
from pipelines.settings import NODE_VARIABLES, host_given, node_given
from recovery.launcher.address import host_and_port
from recovery.launcher.config import Listen
from recovery.launcher.protocol import JobSpec

AUTO = "auto"
EVERYWHERE = ("", "0.0.0.0", "::")
LOOK_SECONDS = 0.25


class NodeRefused(StatedError):
    """This node cannot take part as asked."""


def own_node(given: str | None) -> str:
    """This node's name: as given, or as the scheduler tells it. Raises NodeRefused or NameRefused."""
    name = given or node_given()
    if name is None:
        raise NodeRefused(f"which node this is cannot be told; give --node or set one of {', '.join(NODE_VARIABLES)}")
    return checked_name("node", name)


def listen_of(text: str | None, advertise: str | None, places: Places, job: str) -> tuple[Listen | None, str]:
    """Where to listen for other machines, and how they reach this host. Raises NodeRefused or KeyRefused.

    `auto`: any free port of every address; `host:port`: that one, whose host is also what others are told.
    """
    own = advertise or host_given() or socket.gethostname()
    if text is None:
        return None, advertise or host_given() or ""
    try:
        host, port = ("", 0) if text == AUTO else host_and_port(text)
    except ValueError as error:
        raise NodeRefused(f"--listen takes {AUTO} or HOST:PORT, and {error}") from error
    shown = own if host in EVERYWHERE or advertise else host
    return Listen(host=host, port=port, key=needed_key(places.jobs, job)), shown


def take_registration(places: Places, job: str, folder: Path) -> None:
    """Register a job here from job.json and run.json in `folder`, where no state folder is shared. Idempotent."""
    if (places.job(job) / "job.json").exists():
        return
    try:
        spec = msgspec.json.decode((folder / "job.json").read_bytes(), type=JobSpec)
        options = msgspec.json.decode((folder / "run.json").read_bytes(), type=RunOptions)
    except (OSError, msgspec.DecodeError) as error:
        raise NodeRefused(f"{folder} does not hold job.json and run.json of a job ({error})") from error
    if spec.job != job:
        raise NodeRefused(f"{folder} holds the job {spec.job}, not {job}")
    register_job(places, spec, options, token=False)


def run_node(
    places: Places,
    job: str,
    node: str,
    launcher_arguments: Sequence[str],
    arguments: Sequence[str],
    clock: Clock,
    stop: threading.Event,
    tell: Callable[[str], None],
    environ: Mapping[str, str],
) -> int:
    """Engine and launcher of one node until the launcher ends or `stop`; the launcher's exit code, 0 at `stop`.

    An engine that falls is started again: ranks hand over to it what they hold.
    """
    with Children(places.logs, clock) as children:
        engine = own_command("ckpt", "serve", "--job", job, "--node", node, *arguments)
        children.start(f"{job}-{node}-ckpt", engine, environ=environ, stop_seconds_max=ENGINE_STOP_SECONDS_MAX)
        command = own_command("launcher", "--job", job, "--node", node, *launcher_arguments, *arguments)
        launcher = children.start(f"{job}-{node}", command, environ=environ, show=True)
        while not stop.wait(LOOK_SECONDS):
            children.revive(tell, but=[launcher])
            code = launcher.process.poll()
            if code is not None:
                return code if code >= 0 else 128 - code
        return 0
