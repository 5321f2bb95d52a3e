"""Commands that are services: up, detect, recover, record, console, ckpt serve, launchers, and who attends a job."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer

from ingest.clock import SystemClock
from pipelines.cli.options import (
    Bootstrap,
    BusKind,
    Config,
    Model,
    StateDir,
    settings_arguments,
    settings_from,
    with_model,
)
from pipelines.settings import Settings

Job = Annotated[str, typer.Option("--job", help="The job.")]
Node = Annotated[str, typer.Option("--node", help="The node that this process serves.")]
OpenToOthers = Annotated[
    bool,
    typer.Option(
        "--open-to-others", help="Let console.host be an address that others reach; they log in with the token."
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the console's login token (16 characters or more).")
]
RingTokenFile = Annotated[
    Path | None, typer.Option("--ring-token-file", help="File (0600) with the token of the ring between engines.")
]


def up(
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
    no_console: Annotated[bool, typer.Option("--no-console", help="Without the web console.")] = False,
    open_to_others: OpenToOthers = False,
    token_file: TokenFile = None,
) -> None:
    """Run all services of one machine (record, detect, recover, console) until Ctrl-C; one that falls is restarted."""
    from pipelines.children import Children
    from pipelines.console import console_plan, has_streamlit
    from pipelines.extras import require
    from pipelines.open_bus import open_bus
    from pipelines.own_process import stop_on_signal
    from pipelines.places import Places
    from pipelines.up import keep_up, refuse_second, start_services

    settings, stop = settings_from(config, state_dir, bus, bootstrap_servers), stop_on_signal()
    require("ledger", "`transom up` runs record, which")
    places, clock = Places.of(settings), SystemClock()
    refuse_second(places)
    plan = None
    if not no_console and has_streamlit():
        plan = console_plan(settings, places, open_to_others=open_to_others, login_token_file=token_file)
    open_bus(settings, clock, client="up").close()  # what is wrong with it is said once, here
    with Children(places.logs, clock) as children:
        start_services(children, places, settings_arguments(config, state_dir, bus, bootstrap_servers), clock, stop)
        if stop.is_set():
            return
        typer.echo(f"record, detect and recover run; state in {places.state}")
        if plan is not None:
            children.start("console", plan.command)
            typer.echo(f"console: {plan.url}")
        elif not no_console:
            typer.echo("no console: it needs Streamlit; run: pip install 'transom[ui]'")
        keep_up(children, stop, typer.echo)


def detect(
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
    model: Model = None,
) -> None:
    """Metrics, logs and events in, verdicts out."""
    from pipelines.detect import Detect
    from pipelines.open_bus import open_bus
    from pipelines.own_process import collect_garbage_seldom
    from pipelines.places import Places

    settings, stop = _service(config, state_dir, bus, bootstrap_servers, detect=with_model(model))
    clock = SystemClock()
    service = Detect(settings, Places.of(settings), open_bus(settings, clock, client="detect"), clock)
    collect_garbage_seldom()
    service.run(stop)


def recover(
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plans and do nothing.")] = False,
    recording: Annotated[
        Path | None, typer.Option("--recording", help="With --dry-run: the verdicts of a recorded run.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="With --dry-run: also what comes, until Ctrl-C.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="With --dry-run: the decisions as JSON to this file.", dir_okay=False)
    ] = None,
) -> None:
    """Verdicts in; decides, and restarts jobs through their launchers."""
    if dry_run:
        from pipelines.cli.recovery import dry_run as rehearse

        rehearse(settings_from(config, state_dir, bus, bootstrap_servers), recording, follow, json_file)
        return
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
    port: Annotated[int | None, typer.Option(help="Port (default: console.port); 0: any free one.")] = None,
    open_to_others: OpenToOthers = False,
    token_file: TokenFile = None,
    viewer_token_file: Annotated[
        Path | None, typer.Option("--viewer-token-file", help="File with a token for those who only look.")
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", help="A finished ledger (`transom replay --ledger`), read-only.", file_okay=False),
    ] = None,
) -> None:
    """The web console over the ledger that `transom record` serves; for this machine only, unless you say otherwise."""
    from pipelines.console import ConsoleRefused, console_plan
    from pipelines.places import Places

    settings = settings_from(config, state_dir, console=None if port is None else {"port": port})
    if ledger is not None and not (ledger / "ledger.duckdb").is_file():
        raise ConsoleRefused(f"there is no ledger in {ledger}; make one with: transom replay RUN --ledger {ledger}")
    plan = console_plan(
        settings, Places.of(settings), open_to_others=open_to_others, login_token_file=token_file,
        viewer_token_file=viewer_token_file, finished=ledger,
    )  # fmt: skip
    typer.echo(plan.url)
    sys.stdout.flush()
    os.execv(plan.command[0], plan.command)


def ckpt_serve(
    job: Job,
    node: Node,
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
    ring_listen: Annotated[str | None, typer.Option("--ring-listen", help="Address for other nodes' engines.")] = None,
    ring_port: Annotated[int | None, typer.Option("--ring-port", help="Port for them; 0: any free one.")] = None,
    ring_advertise: Annotated[str | None, typer.Option("--ring-advertise", help="Address that they are told.")] = None,
    ring_token_file: RingTokenFile = None,
    ring_replication: Annotated[int | None, typer.Option("--ring-replication", help="Nodes that hold copies.")] = None,
    ring_rate: Annotated[
        int | None, typer.Option("--ring-rate", help="Bytes per second of copies; 0: no limit.")
    ] = None,
) -> None:
    """Run the checkpoint engine of one node: memory that outlives the ranks."""
    from pipelines.checkpoints import serve_engine
    from pipelines.open_bus import open_bus
    from pipelines.own_process import PARENT_VARIABLE
    from pipelines.places import Places

    guardian = int(os.environ.get(PARENT_VARIABLE) or 0)
    chosen = {
        "listen": ring_listen, "port": ring_port, "advertise": ring_advertise, "token_file": ring_token_file,
        "replication": ring_replication, "bytes_per_second_max": ring_rate,
    }  # fmt: skip
    ring = {name: value for name, value in chosen.items() if value is not None}
    settings = _own_service(config, state_dir, bus, bootstrap_servers, checkpoint={"ring": ring} if ring else None)
    bus_of_ours = open_bus(settings, SystemClock(), client=f"ckpt-{node}")
    serve_engine(Places.of(settings), job, node, bus_of_ours, settings, guardian)


def launcher(
    job: Job,
    node: Annotated[
        str | None, typer.Option("--node", help="This node's name (default: as Slurm or the pod tells it).")
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", help="Listen for other machines: auto, or HOST:PORT (port 0: any).")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", help="How others reach this host (default: its name, or POD_IP).")
    ] = None,
    with_engine: Annotated[
        bool, typer.Option("--with-engine", help="Run the node's checkpoint engine beside it.")
    ] = False,
    registered: Annotated[
        Path | None, typer.Option("--registered", help="Folder with job.json and run.json, where none is shared.")
    ] = None,
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """One launcher of one node, as `transom run` or a scheduler starts it."""
    from pipelines.launch import run_launcher
    from pipelines.node import listen_of, own_node, run_node, take_registration
    from pipelines.open_bus import open_bus
    from pipelines.own_process import stop_on_signal, tell
    from pipelines.places import Places

    inherited = dict(os.environ)
    settings = _own_service(config, state_dir, bus, bootstrap_servers, back=False)
    clock, places, name = SystemClock(), Places.of(settings), own_node(node)
    if registered is not None:
        take_registration(places, job, registered)
    reach, host = listen_of(listen, advertise, places, job)
    if with_engine:
        given = {"--listen": listen, "--advertise": advertise}
        more = [part for flag, value in given.items() if value is not None for part in (flag, value)]
        ours = settings_arguments(config, state_dir, bus, bootstrap_servers)
        raise typer.Exit(run_node(places, job, name, more, ours, clock, stop_on_signal(), tell, inherited))
    bus_of_ours = open_bus(settings, clock, client=f"launcher-{name}")
    raise typer.Exit(run_launcher(places, job, name, bus_of_ours, clock, inherited, listen=reach, host=host))


def attend(
    job: Job,
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Start a scheduler's job once its launchers are there, and stay until it is over; Ctrl-C leaves, the job goes on.

    Exit code: 0 finished, 1 failed or stopped by recovery, 130 left by Ctrl-C.
    """
    from pipelines.attend import Attendance
    from pipelines.backends import JobBackends
    from pipelines.own_process import stop_on_signal, tell
    from pipelines.places import Places
    from pipelines.run import read_job

    stop = stop_on_signal()
    settings = _own_service(config, state_dir, bus, bootstrap_servers)
    clock, places = SystemClock(), Places.of(settings)
    spec, _ = read_job(places, job)
    backend = JobBackends(settings, places, clock, random.Random()).named(spec.backend)
    code = Attendance(backend, job, clock).run(stop, lambda text: tell(f"transom: {text}"))
    raise typer.Exit(stop.exit_code if stop.is_set() else code)


def _service(
    config: Config, state_dir: StateDir, bus: BusKind, bootstrap_servers: Bootstrap, **more: Any
) -> tuple[Settings, Event]:
    from pipelines.own_process import stop_on_signal

    stop = stop_on_signal()
    return _own_service(config, state_dir, bus, bootstrap_servers, **more), stop


def _own_service(
    config: Config, state_dir: StateDir, bus: BusKind, bootstrap_servers: Bootstrap, *, back: bool = True, **more: Any
) -> Settings:
    """For a service that takes signals by itself: until it does, a signal ends the process, and nothing is lost."""
    from pipelines.own_process import go_with_parent, step_back

    go_with_parent(os.environ)
    if back:
        step_back()
    return settings_from(config, state_dir, bus, bootstrap_servers, **more)
