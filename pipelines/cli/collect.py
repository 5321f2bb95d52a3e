"""The command `transom collect`: what a node tells beside its ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ingest.clock import SystemClock
from pipelines.cli.options import Bootstrap, BusKind, Config, StateDir, settings_from


def collect(
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
    node: Annotated[
        str | None, typer.Option("--node", help="This node's name, as jobs have it (default: scheduler's, host's).")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option("--kernel", help="auto, kmsg, journal, off, or the path of a syslog file.")
    ] = None,
    logs: Annotated[
        list[str] | None, typer.Option("--logs", help="Files to follow: a glob, torchrun's --log-dir, slurm-%j-%t.out.")
    ] = None,
    job: Annotated[str, typer.Option("--job", help="Whose the files of --logs are (default: who runs here).")] = "",
    to: Annotated[
        str | None, typer.Option("--to", help="http://host:port of a `record`, where this node has no bus.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File with the token for --to.")] = None,
) -> None:
    """Kernel log, log files, exporters, GPUs and host of one node, told to the bus, until Ctrl-C."""
    from pipelines.collect.start import collector_node, run_collect
    from pipelines.own_process import go_with_parent, step_back, stop_on_signal, tell
    from pipelines.places import Places

    stop = stop_on_signal()
    go_with_parent(os.environ)
    step_back()
    given: dict[str, Any] = {"node": node, "kernel": kernel, "to": to, "token_file": token_file}
    chosen = {name: value for name, value in given.items() if value is not None}
    if logs:
        chosen["logs"] = [{"path": str(Path(path).absolute()), "job": job} for path in logs]
    settings = settings_from(config, state_dir, bus, bootstrap_servers, collect=chosen or None)
    run_collect(settings, Places.of(settings), collector_node(settings, node), SystemClock(), stop, tell)
