"""The command that measures detection against labelled input: evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pipelines.cli.options import JsonFile, Model, settings_from, with_model


def evaluate(
    target: Annotated[
        str, typer.Argument(help="What to measure: faults, logs, sim, or the path of a dataset or of recorded runs.")
    ],
    path: Annotated[Path | None, typer.Argument(help="The target's input, where it is not Transom's own.")] = None,
    ranks: Annotated[str, typer.Option(help="sim: world sizes, comma separated (default: 64,512,4096).")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="sim: a small part of the suite, 64 ranks.")] = False,
    interval_seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Series: seconds between two rows (asd, omi 300; smd, machine 60).")
    ] = None,
    model: Model = None,
    json_file: JsonFile = None,
) -> None:
    """Measure detection against labelled input, baselines beside it; figures go to --json FILE."""
    from pipelines.evaluate.evaluation import EvaluateOptions
    from pipelines.evaluate.targets import evaluate_target
    from pipelines.figures import write_figures

    console = Console(highlight=False)
    options = EvaluateOptions(
        console=Console(stderr=True, highlight=False),
        settings=settings_from(detect=with_model(model)),
        ranks=_sizes(ranks),
        quick=quick,
        interval_seconds=interval_seconds,
    )
    evaluation = evaluate_target(target, path, options)
    for part in evaluation.shown:
        console.print(part)
    table = Table(box=None, pad_edge=False, show_header=False)
    for figure in evaluation.figures:
        table.add_row(figure.name, f"{figure.value:.6g}", figure.unit, f"n = {figure.n}")
    console.print(table)
    if json_file is not None:
        write_figures(json_file, evaluation.figures, **evaluation.details)


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdecimal() or int(part) < 1]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is no world size; give whole numbers such as 64,512")
    return tuple(int(part) for part in parts)
