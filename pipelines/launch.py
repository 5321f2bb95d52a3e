"""One launcher of one node, as `transom run` starts it: its job file and the environment become its configuration."""

from __future__ import annotations

from collections.abc import Mapping

from ingest.bus import Bus
from ingest.clock import Clock
from pipelines.errors import StatedError
from pipelines.places import Places
from pipelines.run import read_job
from pipelines.settings import LAUNCHER_TOKEN_VARIABLE, RING_TOKEN_VARIABLE
from recovery.launcher.config import LauncherConfig, Listen
from recovery.launcher.control import CannotListen
from recovery.launcher.launcher import Launcher

STANDARD_OUTPUT = 1
OURS_ALONE = (RING_TOKEN_VARIABLE, LAUNCHER_TOKEN_VARIABLE)  # ranks do not see these


class LaunchRefused(StatedError):
    """The launcher cannot be started as asked; nothing was."""


def run_launcher(
    places: Places,
    job: str,
    node: str,
    bus: Bus,
    clock: Clock,
    inherited: Mapping[str, str],
    *,
    listen: Listen | None = None,
    host: str = "",
) -> int:
    """Run until the job is over or SIGTERM comes; `inherited` is the environment that the ranks are to see.

    `listen` and `host`: for a job whose controller, or other nodes, are on other machines. Raises LaunchRefused.
    """
    spec, options = read_job(places, job)
    given: dict[str, str] = {}
    if options.checkpoints:
        given["TRANSOM_CKPT_SOCKET"] = str(places.socket(job, node, "ckpt"))
        given["TRANSOM_CKPT_DIR"] = str(places.checkpoints(job))
    config = LauncherConfig(
        job=job,
        node=node,
        slots=spec.nproc_per_node,
        script=spec.script,
        module=spec.module,
        argv=spec.argv,
        preload=options.preload,
        control_socket=places.socket(job, node, "control"),
        telemetry_socket=places.socket(job, node, "telemetry"),
        node_file=places.node_file(job, node),
        env=given,
        host=host,
        listen=listen,
        base_env={name: value for name, value in inherited.items() if name not in OURS_ALONE},
        pin_cpus=options.pin_cpus,
        allow_inject=options.allow_inject,
        show_output=STANDARD_OUTPUT if options.show_output else None,
        die_with_parent=True,
    )
    try:
        return Launcher(config, bus, clock).run()
    except CannotListen as error:
        raise LaunchRefused(f"{error}; give another --listen") from error
    finally:
        bus.close()
