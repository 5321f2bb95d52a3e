"""Commands about checkpoints: serve an engine; list, inspect, verify and drain what there is."""

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
    """List what a restart of a job could use: sealed shards in memory, copies on other nodes, steps on disk and in the
    object store."""
    from ckpt_engine.inspection import list_steps
    from pipelines.checkpoints import catalog_of
    from pipelines.places import Places

    settings = settings_from(config, state_dir)
    places = Places.of(settings)
    catalog = catalog_of(settings, places)
    statuses = catalog.statuses(job)
    in_memory = [(status.node, shard) for status in statuses for shard in status.shards]
    on_peers = [(status.node, shard) for status in statuses for shard in status.peer_shards]
    on_disk = list_steps(places.checkpoints(job))
    in_store = catalog.object_steps(job)
    console = Console(highlight=False)
    if as_json:
        memory = [{"node": node, **asdict(shard)} for node, shard in in_memory]
        peer = [{"node": node, **asdict(shard)} for node, shard in on_peers]
        ring = {status.node: status.ring for status in statuses}
        disk = [asdict(listing) for listing in on_disk]
        store = [asdict(record) for record in in_store]
        console.print_json(data={"memory": memory, "peer": peer, "ring": ring, "disk": disk, "object": store})
        return
    table = _table("tier", "step", "attempt", "shards", "MiB", "state")
    for node, shard in in_memory:
        state = "sealed, checksum known" if shard.verified else "sealed"
        which = f"rank {shard.rank} on {node}"
        table.add_row("memory", str(shard.step), str(shard.attempt), which, f"{shard.size_bytes / MIB:.1f}", state)
    for node, shard in on_peers:
        which = f"rank {shard.rank} on {node}"
        table.add_row("peer", str(shard.step), str(shard.attempt), which, f"{shard.size_bytes / MIB:.1f}", shard.state)
    for listing in on_disk:
        which = f"{listing.shards} of {listing.world_size}"
        word = f"{listing.state}, verified" if listing.verified else listing.state
        state = escape(f"{word}{': ' if listing.reason else ''}{listing.reason}")
        size = f"{listing.size_bytes / MIB:.1f}"
        table.add_row("disk", str(listing.step), str(listing.attempt), which, size, state)
    for record in in_store:
        size = f"{record.size_bytes / MIB:.1f}"
        table.add_row("object", str(record.step), str(record.attempt), f"{record.world_size}", size, "complete")
    empty = (
        f"No checkpoints of {job} in {places.state}; a script makes them with transom.Checkpointer().save(state, step)."
    )
    console.print(table if table.row_count else empty)
    sentences = [f"{status.node}: {status.ring}" if status.ring_on else status.ring for status in statuses]
    for sentence in dict.fromkeys(sentences):  # where it is off, it is off on all of them for one reason
        console.print(escape(sentence), soft_wrap=True)


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
            + ("" if shard.stored_by is None else f", its tensors in the file of rank {shard.stored_by}")
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


@ckpt.command("drain")
def drain_checkpoints(
    job: Job,
    timeout_seconds: Annotated[float, typer.Option("--timeout", min=0.0, help="Wait at most so many seconds.")] = 600.0,
    config: Config = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Write to disk what the engines of a job hold in memory, and wait for it; exit code 1 if something is left."""
    from pipelines.checkpoints import catalog_of
    from pipelines.places import Places

    console, settings = Console(highlight=False), settings_from(config, state_dir)
    with console.status("writing"):
        drained = catalog_of(settings, Places.of(settings)).drain(job, timeout_seconds)
    if as_json:
        console.print_json(data=[asdict(engine) for engine in drained])
    elif not drained:
        raise StatedError(f"no checkpoint engine of {job} runs on this machine; what it had kept is on disk or gone")
    else:
        table = _table("node", "")
        for engine in drained:
            word = "[green]all on disk[/]" if engine.done else f"[red]not all on disk[/]: {escape(engine.reason)}"
            table.add_row(engine.node or "?", word)
        console.print(table)
    raise typer.Exit(0 if drained and all(engine.done for engine in drained) else 1)


@ckpt.command("metrics")
def print_metrics(job: Job, config: Config = None, state_dir: StateDir = None) -> None:
    """Print the counters of a job's engines in Prometheus' text format."""
    from pipelines.checkpoints import catalog_of
    from pipelines.places import Places

    settings = settings_from(config, state_dir)
    typer.echo(catalog_of(settings, Places.of(settings)).metrics(job), nl=False)


@ckpt.command("export-dcp")
def export_checkpoint(
    directory: Directory,
    target: Annotated[Path, typer.Argument(help="The folder to make.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Which step; else the newest.")] = None,
) -> None:
    """Write a step as a checkpoint of torch.distributed.checkpoint (needs PyTorch); all of it is in memory once."""
    _refuse_no_folder(directory)
    try:
        from ckpt_engine.adapters.dcp_export import export_dcp
    except ModuleNotFoundError as error:
        raise StatedError("this needs PyTorch, which is not installed; run: pip install 'transom[ckpt]'") from error
    try:
        tensors = export_dcp(directory, step, target)
    except OSError as error:
        raise StatedError(f"the checkpoint could not be exported: {error}") from error
    Console(highlight=False, markup=False).print(f"{tensors} tensors in {target}", soft_wrap=True)


def _refuse_no_folder(directory: Path) -> None:
    if not directory.is_dir():
        raise StatedError(f"there is no folder {directory}; give a job's checkpoint folder, {WHICH}")


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name)
    return table
