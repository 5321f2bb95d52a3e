"""The command `transom simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress


def simulate(
    folder: Annotated[Path, typer.Argument(help="Where the simulated recording is written; must not hold one yet.")],
    ranks: Annotated[int, typer.Option(help="Ranks, 1 to 16,384.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps to train.")] = 400,
    seed: Annotated[int, typer.Option(help="The same seed gives the same messages.")] = 0,
    stages: Annotated[int, typer.Option(help="Pipeline stages; ranks are divided evenly.")] = 4,
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="Ranks on each node.")] = 8,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", help="Such as straggler:rank=5,at=200,steps=60,severity=0.2; may be repeated."),
    ] = None,
    noise: Annotated[Path, typer.Option("--noise", help="The recorded clean run that noise is resampled from.")] = Path(
        "data/clean"
    ),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the labels to this file too.", dir_okay=False)
    ] = None,
) -> None:
    """Write the telemetry of a simulated multi-rank job, with the right answers beside it, as a recording."""
    import msgspec

    from pipelines.simulation.recorded import write_simulated_recording
    from pipelines.simulation.scenario import Scenario, parse_fault

    scenario = Scenario(
        ranks=ranks, steps=steps, seed=seed, stages=stages, ranks_per_node=ranks_per_node, recording=noise,
        faults=tuple(parse_fault(text) for text in fault or ()),
    )  # fmt: skip
    console = Console(highlight=False)
    expected = steps * scenario.step_seconds
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=expected)

        def tell(count: int, at: float) -> None:
            progress.update(task, completed=min(at, expected), description=f"simulating, {count} messages")

        labels = write_simulated_recording(scenario, folder, tell)
    for label in labels.labels:
        who = ", ".join(f"rank {rank}" for rank in label.ranks) or label.node or "the whole job"
        console.print(f"{label.kind} ({who}) from step {label.onset_step}: {label.fault_class}")
    console.print(f"{labels.steps} steps of {labels.ranks} simulated ranks are in {folder}.", soft_wrap=True)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(labels), indent=2) + b"\n")
