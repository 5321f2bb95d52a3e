"""`transom run`: torchrun's flag names, and who gives the nodes."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ingest.clock import SystemClock
from pipelines.cli.options import Bootstrap, BusKind, Config, StateDir, settings_arguments, settings_from
from pipelines.cli.torchrun_flags import node_counts, refuse_flag
from pipelines.errors import StatedError

PASS_THROUGH = {"allow_extra_args": False, "ignore_unknown_options": True, "allow_interspersed_args": False}

Script = Annotated[str, typer.Argument(help="The training script, or with -m a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="Its arguments.")]
PerNode = Annotated[int, typer.Option("--nproc-per-node", "--nproc_per_node", min=1, help="Ranks on each node.")]
Machines = Annotated[
    str, typer.Option("--nnodes", help="1 here (to divide this machine: --virtual-nodes); with --backend N or MIN:MAX.")
]
Standalone = Annotated[bool, typer.Option("--standalone", help="As torchrun's: one machine, a free port.")]
VirtualNodes = Annotated[int, typer.Option("--virtual-nodes", min=1, help="Nodes to divide this machine into.")]
MinNodes = Annotated[
    int, typer.Option("--min-nodes", min=0, help="Restart on so few where there are no more (0: only on all).")
]
Spares = Annotated[int, typer.Option("--spares", min=0, help="More nodes, held ready.")]
Name = Annotated[
    str | None, typer.Option("--job", "--rdzv-id", "--rdzv_id", help="Name of the job (default: script and time).")
]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")]
Preload = Annotated[list[str] | None, typer.Option("--preload", help="A module to import before ranks are forked.")]
PinCpus = Annotated[bool, typer.Option("--pin-cpus", help="Bind each rank to a processor of its own.")]
AllowInject = Annotated[bool, typer.Option("--allow-inject", help="Let `transom inject` break this job.")]
NoCheckpoints = Annotated[bool, typer.Option("--no-checkpoints", help="Run without checkpoint engines.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Do not show the ranks' output.")]
BackendName = Annotated[
    str | None, typer.Option("--backend", help="Who gives nodes: local (default), slurm, kubernetes, or a plug-in.")
]
Detach = Annotated[bool, typer.Option("--detach", help="With --backend: only submit; `transom attend` starts the job.")]
PrintScript = Annotated[
    bool, typer.Option("--print-script", help="With --backend: register the job and print what would be submitted.")
]


def run(
    script: Script,
    arguments: Arguments = None,
    nproc_per_node: PerNode = 1,
    nnodes: Machines = "1",
    standalone: Standalone = False,
    virtual_nodes: VirtualNodes = 1,
    min_nodes: MinNodes = 0,
    spares: Spares = 0,
    job: Name = None,
    module: Module = False,
    preload: Preload = None,
    pin_cpus: PinCpus = False,
    allow_inject: AllowInject = False,
    no_checkpoints: NoCheckpoints = False,
    quiet: Quiet = False,
    backend: BackendName = None,
    detach: Detach = False,
    print_script: PrintScript = False,
    config: Config = None,
    state_dir: StateDir = None,
    bus: BusKind = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Launch a distributed job, here or on a scheduler's nodes, with torchrun's flag names; stay until it is over.

    Exit code: 0 finished, 1 failed or stopped by recovery, 130 after Ctrl-C: that stops a job on this machine, and
    leaves one on a scheduler's nodes alone.
    """
    from pipelines.open_bus import open_bus
    from pipelines.own_process import go_with_parent, stop_on_signal
    from pipelines.run import JobRun, RunOptions, default_job_name
    from pipelines.run_scheduled import ScheduledRun
    from recovery.launcher.protocol import JobSpec

    clock = SystemClock()
    settings = settings_from(config, state_dir, bus, bootstrap_servers)
    chosen = backend or settings.recover.backend
    nodes, fewest = node_counts(chosen, nnodes, virtual_nodes, min_nodes)
    script = _whole_name(script, module)
    inherited = dict(os.environ)
    go_with_parent(os.environ)
    stop = stop_on_signal()
    open_bus(settings, clock, client="run").close()  # what is wrong with it is said once, before the job has a name
    spec = JobSpec(
        job=job or default_job_name(script, clock), script=script, argv=tuple(arguments or ()), module=module,
        nodes=nodes, nproc_per_node=nproc_per_node, min_nodes=fewest, backend=chosen,
    )  # fmt: skip
    options = RunOptions(
        spares=spares, preload=tuple(preload or ()), pin_cpus=pin_cpus, allow_inject=allow_inject,
        checkpoints=not no_checkpoints, show_output=not quiet, memory_bytes_max=settings.checkpoint.memory_bytes_max,
        keep_complete=settings.checkpoint.keep_complete,
    )  # fmt: skip
    show = Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print
    ours = settings_arguments(config, state_dir, bus, bootstrap_servers)
    if chosen == "local":
        if print_script:
            raise StatedError("a job on this machine has no script to print; name a --backend, or start it")
        here = JobRun(settings, spec, options, clock, random.Random(), ours)
        code = here.run(stop, lambda text: show(f"transom: {text}"), inherited)
        raise typer.Exit(stop.exit_code if code and stop.is_set() else code)
    there = ScheduledRun(settings, spec, options, clock, random.Random(), ours)
    if print_script:
        typer.echo(there.script(), nl=False)
        return
    code = there.run(stop, lambda text: show(f"transom: {text}"), detach=detach)
    raise typer.Exit(stop.exit_code if stop.is_set() else code)


def _whole_name(script: str, module: bool) -> str:
    """The module's name, or the script's whole path. Raises StatedError where there is no such script."""
    if script.startswith("-"):
        refuse_flag(script)
    if module:
        return script
    if not Path(script).is_file():
        raise StatedError(f"there is no script {script} in {Path.cwd()}; give a Python file, or -m and a module's name")
    return str(Path(script).absolute())
