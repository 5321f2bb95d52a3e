"""One launcher of one node, as `transom run` starts it: its job file and the environment become its configuration."""

from __future__ import annotations

from collections.abc import Mapping

from ingest.bus import Bus
from ingest.clock import Clock
from pipelines.places import Places
from pipelines.run import read_job
from pipelines.settings import RING_TOKEN_VARIABLE
from recovery.launcher.config import LauncherConfig
from recovery.launcher.launcher import Launcher

STANDARD_OUTPUT = 1


def run_launcher(places: Places, job: str, node: str, bus: Bus, clock: Clock, inherited: Mapping[str, str]) -> int:
    """Run until the job is over or SIGTERM comes; `inherited` is the environment that the ranks are to see."""
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
        base_env={name: value for name, value in inherited.items() if name != RING_TOKEN_VARIABLE},
        pin_cpus=options.pin_cpus,
        allow_inject=options.allow_inject,
        show_output=STANDARD_OUTPUT if options.show_output else None,
        die_with_parent=True,
    )
    try:
        return Launcher(config, bus, clock).run()
    finally:
        bus.close()
