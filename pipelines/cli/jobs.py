"""Commands about jobs: demo, inject."""

from __future__ import annotations

import os
import random
import sys
from typing import Annotated

import typer
from rich.console import Console

from ingest.clock import SystemClock
from pipelines.cli.options import (
    Bootstrap,
    BusKind,
    Config,
    JsonFile,
    StateDir,
    settings_from,
)
from pipelines.injectable import FAULTS, listed


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
