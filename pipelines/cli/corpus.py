"""The command that makes labelled corpora: record-faults."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from ingest.clock import SystemClock

Names = Annotated[str, typer.Option(help="Comma separated; default: all of the plan.")]


def record_faults(
    folder: Annotated[Path, typer.Argument(help="Where the corpus is; runs that are there already are left.")],
    plan: Annotated[
        Literal["small", "full"], typer.Option(help="small: 12 runs; full: over 100, in less than an hour.")
    ] = "full",
    kinds: Names = "",
    severities: Annotated[str, typer.Option(help="Of mild, middle, strong; comma separated.")] = "",
    sizes: Annotated[str, typer.Option(help="Of the model; with it, --ranks or --seeds: every combination.")] = "",
    ranks: Annotated[str, typer.Option(help="Whom to break; comma separated.")] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many for each combination.")] = None,
    clean_steps: Annotated[int | None, typer.Option(min=0, help="Steps without a fault, in runs of their own.")] = None,
    only_plan: Annotated[bool, typer.Option("--list", help="Only say which runs there would be.")] = False,
) -> None:
    """Break the demo's job in many ways, really, and keep what it says: a corpus for `transom evaluate faults`.

    It needs the machine for itself: two processors, 8 GB of memory, nothing else that computes.
    """
    from pipelines.extras import require
    from pipelines.fault_corpus.plan import Wanted, make_plan
    from pipelines.fault_corpus.record import record_faults as record
    from pipelines.own_process import stop_on_signal

    chosen = make_plan(
        Wanted(
            plan=plan, kinds=_split(kinds), severities=_split(severities), sizes=_split(sizes),
            ranks=tuple(_whole(rank) for rank in _split(ranks)), seeds=seeds, clean_steps=clean_steps,
        )
    )  # fmt: skip
    if only_plan:
        typer.echo("\n".join(run.name for run in chosen))
        return
    require("ckpt", "the corpus is made with a real job, which (PyTorch)")
    console = Console(stderr=True, highlight=False)
    stop = stop_on_signal(also=_interrupt)
    try:
        made, notes = record(folder, chosen, SystemClock(), random.Random(), console)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on where this one ended")
        raise typer.Exit(stop.exit_code) from None
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
    typer.echo(f"{made} runs made, {len(chosen) - made - len(notes)} were there already: {folder}")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is no rank; give whole numbers such as 0,2")
    return int(text)
