"""`transom bench ckpt`: every figure of the checkpoint engine, beside the other libraries that are there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import JsonFile
from pipelines.errors import StatedError

if TYPE_CHECKING:
    from pipelines.bench_ckpt.outcome import Outcome

Peers = Annotated[
    str,
    typer.Option(
        "--peers",
        help="installed: torch's own and what is there; all: others too, installed into a folder of their own.",
    ),
]


def ckpt(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A figure or a group; all where none is named.")
    ] = None,
    mb: Annotated[int, typer.Option("--mb", min=1, help="Size of the training states in MB.")] = 300,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds after the warm-up; 7 or more.")] = 9,
    case: Annotated[list[str] | None, typer.Option("--case", help="transformer, many or few; all by default.")] = None,
    kills: Annotated[int, typer.Option("--kills", min=1, help="kill -9 at random instants.")] = 200,
    flips: Annotated[int, typer.Option("--flips", min=2, help="1-bit flips.")] = 200,
    roundtrips: Annotated[int, typer.Option("--roundtrips", min=1, help="Made-up states to save and load.")] = 1000,
    peers: Peers = "installed",
    seed: Annotated[int, typer.Option("--seed", help="Of models, flips, kills and made-up states.")] = 0,
    folder: Annotated[Path | None, typer.Option("--folder", help="Where to write; on the disk to measure.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the checkpoint engine against memcpy, torch and its peers in the same rounds (about twenty minutes)."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from pipelines.asked import chosen_groups
    from pipelines.bench_ckpt.asked import ASKED
    from pipelines.bench_ckpt.outcome import CASES, merged
    from pipelines.bench_ckpt.running import planned, run_task
    from pipelines.extras import require

    require("ckpt", "`transom bench ckpt`")
    cases = tuple(case or CASES)
    if not set(cases) <= set(CASES):
        raise StatedError(f"--case is one of {', '.join(CASES)}, not {', '.join(sorted(set(cases) - set(CASES)))}")
    if peers not in ("installed", "all"):
        raise StatedError(f"--peers is installed or all, not {peers!r}")
    try:
        groups = chosen_groups(ASKED, tuple(only or ()), "transom bench ckpt")
    except ValueError as error:
        raise StatedError(str(error)) from error
    console = Console(highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(prefix="transom-bench-", dir=folder) as place,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        shown = progress.add_task("planning")
        python, absent = _python_with(peers, Path(place), lambda text: progress.update(shown, description=text))
        sizes = {"mb": mb, "rounds": rounds, "kills": kills, "flips": flips, "roundtrips": roundtrips, "seed": seed}
        tasks = list(planned(groups, Path(place), cases, **sizes))
        for number, task in enumerate(tasks, start=1):
            title = f"{number} of {len(tasks)}: {task.group}, {task.label}"
            outcomes.append(
                run_task(task, lambda text, at=title: progress.update(shown, description=f"{at}: {text}"), python)  # type: ignore[misc]
            )
    whole = merged(outcomes)
    whole.notes += absent
    _show(console, groups, whole)
    if json_file is not None:
        _write(json_file, whole)


def _python_with(peers: str, folder: Path, told: object) -> tuple[str, list[str]]:
    """The interpreter that measures, and what could not be installed for it."""
    import sys

    from pipelines.bench_ckpt.peer_install import install_peers

    if peers != "all":
        return sys.executable, []
    return install_peers(folder / "peers", told)  # type: ignore[arg-type]


def _show(console: object, groups: list[str], whole: Outcome) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pipelines.bench_ckpt.asked import ASKED
    from pipelines.bench_ckpt.outcome import headlines

    assert isinstance(console, Console)
    found = headlines(whole.values)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("figure", "what", "asked", "measured", ""):
        table.add_column(name)
    for asked in ASKED:
        if asked.group not in groups:
            continue
        value = found.get(asked.name)
        if value is None:
            reason = whole.missing.get(asked.name, "nothing measures it here")
            table.add_row(asked.name, asked.what, asked.text, "not measured", f"[dim]{escape(reason)}[/]")
            continue
        verdict = "[green]met[/]" if asked.met_by(value.value) else "[red]missed[/]"
        where = f" ({value.case})" if value.case else ""
        table.add_row(asked.name, asked.what, asked.text, f"{value.value:,.4g}{where}", verdict)
    console.print(table)
    for note in whole.notes:
        console.print(note, style="dim", markup=False)


def _write(path: Path, whole: Outcome) -> None:
    from pipelines.bench_ckpt.asked import ASKED
    from pipelines.bench_ckpt.outcome import headlines
    from pipelines.figures import Figure, write_figures

    found = headlines(whole.values)
    figures = [Figure(value.name, value.value, value.unit, value.n) for value in found.values()]
    cases = [
        {"name": value.name, "case": value.case, "value": value.value, "unit": value.unit, "n": value.n}
        for value in whole.values
    ]
    missing = {asked.name: whole.missing.get(asked.name, "") for asked in ASKED if asked.name not in found}
    write_figures(path, figures, cases=cases, missing=missing, notes=whole.notes, rounds=whole.rounds)
