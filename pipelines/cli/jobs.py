"""Commands about jobs: demo, run, inject, replay."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ingest.clock import SystemClock
from pipelines.cli.options import (
    Bootstrap,
    BusKind,
    Config,
    JsonFile,
    Model,
    StateDir,
    settings_arguments,
    settings_from,
    with_model,
)
from pipelines.cli.torchrun_flags import refuse_flag, refuse_more_machines, whole_nodes
from pipelines.errors import StatedError
from pipelines.injectable import FAULTS, listed

PASS_THROUGH = {"allow_extra_args": False, "ignore_unknown_options": True, "allow_interspersed_args": False}


def demo(
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
    broker: Annotated[
        bool, typer.Option("--broker", help="Bring up an Apache Kafka of its own (Java 17, Maven).")
    ] = False,
    faults: Annotated[str, typer.Option(help="Which faults, comma separated; 'all' or 'none'.")] = "all",
    steps: Annotated[int | None, typer.Option(min=1, help="Train so many steps (with --faults none).")] = None,
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL).")] = "cpu",
    headless: Annotated[
        bool, typer.Option("--headless", help="End by itself instead of leaving the console open.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Train a real job, break it six times, and show who is blamed and how it comes back."""
    from pipelines.demo.command import cache_folder, run_demo
    from pipelines.demo.drive import DemoOptions
    from pipelines.demo.faults import chosen_faults
    from pipelines.own_process import stop_on_signal

    options = DemoOptions(faults=chosen_faults(faults), steps=steps, device=device)
    settings = settings_from(config, state_dir, bus, bootstrap_servers)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    stop = stop_on_signal(also=_interrupt)
    try:
        code = run_demo(
            settings,
            options,
            clock=SystemClock(),
            console=Console(width=None if terminal else 180, highlight=False),
            stop=stop,
            stay=terminal and not headless,
            own_broker=broker,
            json_file=json_file,
            caches=cache_folder(os.environ),
        )
    except KeyboardInterrupt:
        code = stop.exit_code
    raise typer.Exit(code)


def _interrupt() -> None:
    raise KeyboardInterrupt


def run(
    script: Annotated[str, typer.Argument(help="The training script, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", "--nproc_per_node", min=1, help="Ranks on each node.")
    ] = 1,
    nnodes: Annotated[
        str,
        typer.Option("--nnodes", help="Machines: 1, or as many as --backend gives. To divide this: --virtual-nodes."),
    ] = "1",
    standalone: Annotated[
        bool, typer.Option("--standalone", help="As torchrun's: one machine, a free port. It is always so.")
    ] = False,
    virtual_nodes: Annotated[
        int, typer.Option("--virtual-nodes", min=1, help="Nodes to divide this machine into.")
    ] = 1,
    spares: Annotated[int, typer.Option("--spares", min=0, help="More nodes, held ready.")] = 0,
    job: Annotated[
        str | None, typer.Option("--job", "--rdzv-id", "--rdzv_id", help="Name of the job (default: script and time).")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")] = False,
    preload: Annotated[
        list[str] | None, typer.Option("--preload", help="A module to import before ranks are forked.")
    ] = None,
    pin_cpus: Annotated[bool, typer.Option("--pin-cpus", help="Bind each rank to a processor of its own.")] = False,
    allow_inject: Annotated[bool, typer.Option("--allow-inject", help="Let `transom inject` break this job.")] = False,
    no_checkpoints: Annotated[bool, typer.Option("--no-checkpoints", help="Run without checkpoint engines.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show the ranks' output.")] = False,
    backend: Annotated[
        str | None, typer.Option("--backend", help="Who gives nodes: local (default), slurm, kubernetes, or a plug-in.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit only; `transom attend` starts the job.")] = False,
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Launch a distributed job, here or on a scheduler's nodes, with torchrun's flag names; stay until it is over.

    Exit code: 0 finished, 1 failed or stopped by recovery, 130 stopped by Ctrl-C.
    """
    from pipelines.open_bus import open_bus
    from pipelines.own_process import go_with_parent, stop_on_signal
    from pipelines.run import JobRun, RunOptions, default_job_name
    from pipelines.run_scheduled import ScheduledRun
    from recovery.launcher.protocol import JobSpec

    clock = SystemClock()
    settings = settings_from(config, state_dir, bus, bootstrap_servers)
    chosen = backend or settings.recover.backend
    nodes = virtual_nodes if chosen == "local" else whole_nodes(nnodes)
    if chosen == "local":
        refuse_more_machines(nnodes)
    script = _whole_name(script, module)
    inherited = dict(os.environ)
    go_with_parent(os.environ)
    stop = stop_on_signal()
    open_bus(settings, clock, client="run").close()  # what is wrong with it is said once, before the job has a name
    spec = JobSpec(
        job=job or default_job_name(script, clock),
        script=script,
        argv=tuple(arguments or ()),
        module=module,
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        backend=chosen,
    )
    options = RunOptions(
        spares=spares,
        preload=tuple(preload or ()),
        pin_cpus=pin_cpus,
        allow_inject=allow_inject,
        checkpoints=not no_checkpoints,
        show_output=not quiet,
        memory_bytes_max=settings.checkpoint.memory_bytes_max,
        keep_complete=settings.checkpoint.keep_complete,
    )
    tell = Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print
    arguments_of_ours = settings_arguments(config, state_dir, bus, bootstrap_servers)
    if chosen != "local":
        scheduled = ScheduledRun(settings, spec, options, clock, random.Random(), arguments_of_ours)
        code = scheduled.run(stop, lambda text: tell(f"transom: {text}"), detach=detach)
        raise typer.Exit(stop.exit_code if stop.is_set() else code)
    job_run = JobRun(settings, spec, options, clock, random.Random(), arguments_of_ours)
    code = job_run.run(stop, lambda text: tell(f"transom: {text}"), inherited)
    raise typer.Exit(stop.exit_code if code and stop.is_set() else code)


def _whole_name(script: str, module: bool) -> str:
    """The module's name, or the script's whole path. Raises StatedError where there is no such script."""
    if script.startswith("-"):
        refuse_flag(script)
    if module:
        return script
    if not Path(script).is_file():
        raise StatedError(f"there is no script {script} in {Path.cwd()}; give a Python file, or -m and a module's name")
    return str(Path(script).absolute())


def inject(
    fault: Annotated[str, typer.Argument(help=f"One of {', '.join(FAULTS)}.")],
    job: Annotated[str, typer.Option("--job", help="The job to break; it must run with --allow-inject.")],
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank to break.")],
    factor: Annotated[
        float | None, typer.Option(min=1.0, help="How many times as much or as long (default: 3).")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="For how long (default: 8).")] = None,
    delay_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="How long each step, batch or message waits (default: 0.05).")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="cpu_hog: how many (default: 2).")] = None,
    megabytes_per_second: Annotated[float | None, typer.Option(min=0.0, help="memory_hog (default: 20).")] = None,
    megabytes_max: Annotated[float | None, typer.Option(min=0.0, help="memory_hog (default: 500).")] = None,
    at_step: Annotated[int | None, typer.Option(help="In which step a rank does it (default: the next).")] = None,
    config: Config = None,
    state_dir: StateDir = None,
) -> None:
    """Break one rank of a running job on purpose, to see what is made of it."""
    from pipelines.backends import JobBackends
    from pipelines.inject import Injector
    from pipelines.places import Places

    settings = settings_from(config, state_dir)
    given = {
        "factor": factor, "seconds": seconds, "delay_seconds": delay_seconds, "processes": processes,
        "megabytes_per_second": megabytes_per_second, "megabytes_max": megabytes_max, "at_step": at_step,
    }  # fmt: skip
    parameters = {name: float(value) for name, value in given.items() if value is not None}
    places, clock = Places.of(settings), SystemClock()
    backends = JobBackends(settings, places, clock, random.Random())
    Injector(places, clock, backends.of).inject(job, rank, fault, parameters)
    typer.echo(f"{fault} into rank {rank} of {job}")


# Typer keeps paragraphs of a docstring, and a table of faults belongs where a person asks for help.
inject.__doc__ = f"{inject.__doc__}\n\n{listed()}"


def replay(
    recording: Annotated[
        Path, typer.Argument(help="A recorded run directory (.transom/recordings/<job>, data/<name>).")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the verdicts to this file, one JSON a line.", dir_okay=False)
    ] = None,
    config: Config = None,
    model: Model = None,
) -> None:
    """Run the live pipeline's detectors over a recorded run; the same input gives the same bytes."""
    from pipelines.replay import replay_recording

    replay_recording(recording, output, settings_from(config, detect=with_model(model)), Console(highlight=False))
