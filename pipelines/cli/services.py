"""Commands that are services: up, detect, recover, record, console, ckpt serve, and the launcher of one node."""

from __future__ import annotations

import os
import random
from threading import Event
from typing import Annotated

import typer

from ingest.clock import SystemClock
from pipelines.cli.options import Bootstrap, BusKind, Config, StateDir, settings_arguments, settings_from
from pipelines.settings import Settings

Job = Annotated[str, typer.Option("--job", help="The job.")]
Node = Annotated[str, typer.Option("--node", help="The node that this process serves.")]


def up(
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
    no_console: Annotated[bool, typer.Option("--no-console", help="Without the web console.")] = False,
) -> None:
    """Run all services of one machine: record, detect, recover, console."""
    from pipelines.children import Children
    from pipelines.console import console_address, console_command
    from pipelines.own_process import stop_on_signal
    from pipelines.places import Places
    from pipelines.up import keep_up, start_services

    settings = settings_from(config, state_dir, bus, bootstrap_servers)
    places, clock, stop = Places.of(settings), SystemClock(), stop_on_signal()
    arguments = settings_arguments(config, state_dir, bus, bootstrap_servers)
    with Children(places.logs, clock) as children:
        start_services(children, places, arguments, clock)
        typer.echo(f"record, detect and recover run; state in {places.state}")
        web = None if no_console else console_command(settings, places)
        if web is not None:
            children.start("console", web)
            typer.echo(f"console: {console_address(settings, places)}")
        keep_up(children, arguments, clock, stop, typer.echo)


def detect(
    config: Config = None, state_dir: StateDir = None, bus: BusKind = None, bootstrap_servers: Bootstrap = None
) -> None:
    """Metrics, logs and events in, verdicts out."""
    from pipelines.detect import Detect
    from pipelines.open_bus import open_bus
    from pipelines.places import Places

    settings, stop = _service(config, state_dir, bus, bootstrap_servers)
    clock = SystemClock()
    Detect(settings, Places.of(settings), open_bus(settings, clock, client="detect"), clock).run(stop)


def recover(
    config: Config = None, state_dir: StateDir = None, bus: BusKind = None, bootstrap_servers: Bootstrap = None
) -> None:
    """Verdicts in; decides, and restarts jobs through their launchers."""
    from pipelines.open_bus import open_bus
    from pipelines.places import Places
    from pipelines.recover import Recover

    settings, stop = _service(config, state_dir, bus, bootstrap_servers)
    clock = SystemClock()
    Recover(settings, Places.of(settings), open_bus(settings, clock, client="recover"), clock, random.Random()).run(
        stop
    )


def record(
    config: Config = None, state_dir: StateDir = None, bus: BusKind = None, bootstrap_servers: Bootstrap = None
) -> None:
    """Keep everything in the ledger and serve it: HTTP on a Unix socket, or on TCP with a token."""
    from pipelines.open_bus import open_bus
    from pipelines.places import Places
    from pipelines.record import Record
    from pipelines.record_settings import record_config

    settings, stop = _service(config, state_dir, bus, bootstrap_servers)
    clock = SystemClock()
    Record(record_config(settings, Places.of(settings)), open_bus(settings, clock, client="record"), clock).run(stop)


def console(
    config: Config = None,
    state_dir: StateDir = None,
    port: Annotated[int | None, typer.Option(help="Port on 127.0.0.1.")] = None,
) -> None:
    """The web console, on 127.0.0.1."""
    from pipelines.console import console_address, console_command
    from pipelines.errors import StatedError
    from pipelines.places import Places

    settings = settings_from(config, state_dir, console=None if port is None else {"port": port})
    places = Places.of(settings)
    command = console_command(settings, places)
    if command is None:
        raise StatedError("the console needs Streamlit: pip install 'transom[ui]'")
    typer.echo(console_address(settings, places))
    os.execvp(command[0], command)


def ckpt_serve(
    job: Job,
    node: Node,
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Run the checkpoint engine of one node: memory that outlives the ranks."""
    from pipelines.checkpoints import serve_engine
    from pipelines.open_bus import open_bus
    from pipelines.places import Places

    settings, _ = _service(config, state_dir, bus, bootstrap_servers)
    serve_engine(Places.of(settings), job, node, open_bus(settings, SystemClock(), client=f"ckpt-{node}"))


def launcher(
    job: Job,
    node: Node,
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """One launcher of one node; `transom run` starts these."""
    from pipelines.launch import run_launcher
    from pipelines.open_bus import open_bus
    from pipelines.places import Places

    inherited = dict(os.environ)
    settings, _ = _service(config, state_dir, bus, bootstrap_servers, back=False)
    clock = SystemClock()
    bus_of_ours = open_bus(settings, clock, client=f"launcher-{node}")
    raise typer.Exit(run_launcher(Places.of(settings), job, node, bus_of_ours, clock, inherited))


def _service(
    config: Config, state_dir: StateDir, bus: BusKind, bootstrap_servers: Bootstrap, *, back: bool = True
) -> tuple[Settings, Event]:
    from pipelines.own_process import go_with_parent, step_back, stop_on_signal

    stop = stop_on_signal()
    go_with_parent(os.environ)
    if back:
        step_back()
    return settings_from(config, state_dir, bus, bootstrap_servers), stop
