"""Commands about checkpoints: serve an engine; list, inspect and verify what there is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.cli.options import AsJson, Config, StateDir, settings_from
from pipelines.cli.services import Job, ckpt_serve
from pipelines.errors import StatedError

ckpt = typer.Typer(help="The checkpoint engine and what it has kept.", no_args_is_help=True)
ckpt.command("serve")(ckpt_serve)

WHICH = ".transom/checkpoints/<job>"
Directory = Annotated[Path, typer.Argument(help=f"A job's checkpoint folder: {WHICH}.")]
MIB = 2**20


@ckpt.command("ls")
def list_checkpoints(job: Job, config: Config = None, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """List what a restart of a job could use: sealed shards in memory, steps on disk."""
    from ckpt_engine.inspection import list_steps
    from pipelines.checkpoints import EngineCatalog
    from pipelines.places import Places

    places = Places.of(settings_from(config, state_dir))
    in_memory = [(status.node, shard) for status in EngineCatalog(places).statuses(job) for shard in status.shards]
    on_disk = list_steps(places.checkpoints(job))
    console = Console(highlight=False)
    if as_json:
        memory = [{"node": node, **asdict(shard)} for node, shard in in_memory]
        console.print_json(data={"memory": memory, "disk": [asdict(listing) for listing in on_disk]})
        return
    table = _table("tier", "step", "attempt", "shards", "MiB", "state")
    for node, shard in in_memory:
        state = "sealed, checksum known" if shard.verified else "sealed"
        which = f"rank {shard.rank} on {node}"
        table.add_row("memory", str(shard.step), str(shard.attempt), which, f"{shard.size_bytes / MIB:.1f}", state)
    for listing in on_disk:
        which = f"{listing.shards} of {listing.world_size}"
        state = escape(f"{listing.state}{': ' if listing.reason else ''}{listing.reason}")
        size = f"{listing.size_bytes / MIB:.1f}"
        table.add_row("disk", str(listing.step), str(listing.attempt), which, size, state)
    empty = (
        f"No checkpoints of {job} in {places.state}; a script makes them with transom.Checkpointer().save(state, step)."
    )
    console.print(table if table.row_count else empty)


@ckpt.command("inspect")
def inspect_checkpoint(
    directory: Directory,
    step: Annotated[int, typer.Option("--step", min=0, help="Which step.")],
    as_json: AsJson = False,
) -> None:
    """Show the tensors and values in the shards of one step; tensors are not read."""
    from ckpt_engine.inspection import inspect_step

    _refuse_no_folder(directory)
    shards = inspect_step(directory, step)
    console = Console(highlight=False, markup=False)
    if as_json:
        console.print_json(data=[asdict(shard) for shard in shards])
        return
    for shard in shards:
        console.print(
            f"rank {shard.rank}: {shard.file}, {shard.size_bytes / MIB:.1f} MiB, written by attempt {shard.attempt}"
        )
        for tensor in shard.tensors:
            console.print(f"  {tensor.name}  {tensor.dtype} {list(tensor.shape)}")
        console.print(f"  {shard.values}", soft_wrap=True)


@ckpt.command("verify")
def verify_checkpoints(
    directory: Directory,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only this step.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of the checkpoints on disk and compare it with its checksums; exit code 1 if one is damaged."""
    from ckpt_engine.inspection import verify_steps

    _refuse_no_folder(directory)
    console = Console(highlight=False)
    verdicts = []
    with console.status("reading") as status:
        for verdict in verify_steps(directory, step):
            verdicts.append(verdict)
            status.update(f"read step {verdict.step}, rank {verdict.rank}")
    if as_json:
        console.print_json(data=[asdict(verdict) for verdict in verdicts])
    elif not verdicts:
        raise StatedError(f"there is no complete checkpoint in {directory}; give a job's folder, {WHICH}")
    else:
        table = _table("step", "rank", "file", "MiB", "")
        for verdict in verdicts:
            word = "[green]whole[/]" if verdict.whole else f"[red]damaged[/]: {escape(verdict.reason)}"
            size = f"{verdict.size_bytes / MIB:.1f}"
            table.add_row(str(verdict.step), str(verdict.rank), verdict.file, size, word)
        console.print(table)
    raise typer.Exit(0 if verdicts and all(verdict.whole for verdict in verdicts) else 1)


def _refuse_no_folder(directory: Path) -> None:
    if not directory.is_dir():
        raise StatedError(f"there is no folder {directory}; give a job's checkpoint folder, {WHICH}")


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name)
    return table
