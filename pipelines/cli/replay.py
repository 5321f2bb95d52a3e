"""`transom replay`: runs that were recorded, by us or by anybody, through the live pipeline's detection."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import Model, settings_from, with_model


class RunFormat(StrEnum):
    """What a run may be read as."""

    parquet = "parquet"
    csv = "csv"
    jsonl = "jsonl"
    tensorboard = "tensorboard"
    wandb = "wandb"
    logs = "logs"


def replay(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="A recording (.transom/recordings/JOB, data/NAME), a table (Parquet, CSV, JSON lines), TensorBoard's "
            "event files, W&B's offline runs, or logs (torchrun's --log-dir, Slurm's, a trainer's)."
        ),
    ],
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="Settings (default: ./transom.toml where it exists); give two to compare them."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a report: .html with pictures, or .md.", dir_okay=False)
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option("--ledger", help="Write a ledger into this new folder, for the console.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the verdicts to this file, one JSON a line.", dir_okay=False)
    ] = None,
    mapping: Annotated[
        Path | None, typer.Option("--mapping", help="TOML: which column is what (docs/replay.md).", dir_okay=False)
    ] = None,
    chosen: Annotated[
        RunFormat | None, typer.Option("--format", help="Read as this, where it could be several things.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option("--labels", help="JSON: what was really wrong, to compare with.", dir_okay=False)
    ] = None,
    model: Model = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write what was found to this file, for programs.", dir_okay=False)
    ] = None,
) -> None:
    """Run the live pipeline's detectors over a run that is over; the same input gives the same bytes."""
    from rich.console import Console

    from ingest.clock import SystemClock
    from pipelines.own_process import collect_garbage_seldom
    from pipelines.replay_command import Wanted, run_replay

    named = [(str(path), settings_from(path, detect=with_model(model))) for path in config or ()]
    wanted = Wanted(
        runs=tuple(runs), settings=tuple(named or [("", settings_from(None, detect=with_model(model)))]),
        output=output, ledger=ledger, report=report, json=json_file, mapping=mapping,
        format=None if chosen is None else chosen.value, labels=labels,
    )  # fmt: skip
    collect_garbage_seldom()
    run_replay(wanted, Console(highlight=False), Console(stderr=True), SystemClock())
