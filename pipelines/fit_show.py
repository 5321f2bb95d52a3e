"""What a fit found, for a person and for a program."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipelines.fit import Fit


def show(found: Fit, budget_per_day: float, console: Console) -> None:
    """Runs, members, thresholds, and what the budget means."""
    table = Table(box=None, pad_edge=False)
    for column in ("run", "peers", "clean steps", "windows", "faults left out"):
        table.add_column(column, justify="left" if column in ("run", "peers") else "right")
    for run in found.runs:
        table.add_row(run.name, run.peers or "–", f"{run.clean_steps:,}", f"{run.windows:,}", str(run.labelled))
    console.print(table)
    model = found.model
    k, n = model.persistence
    console.print(f"Members: {', '.join(model.members)} decide, {', '.join(model.votes) or 'none'} vote.")
    for peers, part in model.parts.items():
        told = ", ".join(f"{value:.2f} for {ranks:,} ranks" for ranks, value in found.thresholds[peers].items())
        console.print(
            f"{peers} peers: {part.windows:,} clean windows of {n} steps from {part.steps:,} clean steps; threshold "
            f"in decades: {told}."
        )
    per_thousand = 1000.0 * budget_per_day * found.step_seconds / 86_400.0
    console.print(
        f"The budget: {budget_per_day:g} alarms a day of the ensemble alone on a clean job, {per_thousand:.2g} in 1,000"
        f" steps of {found.step_seconds:.3g} s; an alarm is {k} odd steps of {n}."
    )
    for note in found.notes:
        console.print(note)


def summary(found: Fit, output: Path) -> dict[str, object]:
    """The same for a program."""
    model = found.model
    return {
        "model": str(output),
        "members": list(model.members),
        "votes": list(model.votes),
        "features": list(model.features),
        "persistence": list(model.persistence),
        "versions": model.versions,
        "step_seconds": found.step_seconds,
        "parts": {
            peers: {
                "windows": part.windows,
                "clean_steps": part.steps,
                "thresholds": {str(ranks): value for ranks, value in found.thresholds[peers].items()},
            }
            for peers, part in model.parts.items()
        },
        "least": model.least,
        "eased": model.eased,
        "runs": [
            {"run": run.name, "peers": run.peers, "clean_steps": run.clean_steps, "windows": run.windows,
             "faults_left_out": run.labelled} for run in found.runs
        ],
        "notes": list(found.notes),
    }  # fmt: skip
