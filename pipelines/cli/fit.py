"""The command that learns what is normal from recorded runs: fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from pipelines.cli.options import Config, settings_from
from pipelines.errors import StatedError


def fit(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Recorded runs, or folders of them; labelled faults are left out.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the model to this file (.npz).", dir_okay=False)
    ] = None,
    feedback: Annotated[
        bool, typer.Option("--feedback", help="Re-threshold classes by what people said of these runs' verdicts.")
    ] = False,
    check: Annotated[
        list[str] | None,
        typer.Option("--check", help="Say whether this PyOD model may be a member, and why not; no runs needed."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the summary to this file.", dir_okay=False)
    ] = None,
    config: Config = None,
) -> None:
    """Fit the ensemble on recorded runs; `detect --model FILE` and `detect.model` start from what it writes."""
    console = Console(highlight=False, soft_wrap=True)
    if check:
        _check(check, console, json_file)
        return
    if not runs or output is None:
        raise StatedError("fit needs recorded runs and --output FILE (or --check MODEL); see `transom fit --help`")
    from detectors.ensemble.models import EnsembleUnavailable
    from pipelines.fit import fit as fit_runs
    from pipelines.fit import recordings_in
    from pipelines.fit_show import show, summary
    from pipelines.room_configs import detector_config

    folders = recordings_in(runs)
    settings = settings_from(config)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("fitting", total=len(folders))
        seen: set[str] = set()

        def told(name: str, messages: int) -> None:
            seen.add(name)
            progress.update(task, completed=len(seen) - 1, description=f"{name}, {messages} messages")

        try:
            found = fit_runs(folders, detector_config(settings), feedback=feedback, told=told)
        except EnsembleUnavailable as error:
            raise StatedError(str(error)) from error
    stored = found.model.to_bytes()
    try:
        output.write_bytes(stored)
    except OSError as error:
        raise StatedError(f"{output} cannot be written ({error.strerror}); give another --output") from error
    show(found, settings.detect.ensemble.budget_per_day, console)
    console.print(f"Written to {output} ({len(stored) / 2**20:.1f} MiB); use it: transom detect --model {output}")
    if json_file is not None:
        json_file.write_text(json.dumps(summary(found, output), indent=2) + "\n", encoding="utf-8")


def _check(names: list[str], console: Console, json_file: Path | None) -> None:
    from detectors.ensemble.models import EnsembleUnavailable, UnknownModel
    from detectors.ensemble.suitability import check

    found = []
    for name in names:
        try:
            one = check(name)
        except (EnsembleUnavailable, UnknownModel) as error:
            raise StatedError(str(error)) from error
        found.append(one)
        said = "may decide and vote" if one.ok else "may vote, not decide" if one.votes_ok else "may not be a member"
        console.print(f"{name}: {said}{':' if one.reasons else '.'}")
        for reason in one.reasons:
            console.print(f"  {reason}.")
    if json_file is not None:
        tree = [
            {"model": one.name, "decides": one.ok, "votes": one.votes_ok, "reasons": list(one.reasons)} for one in found
        ]
        json_file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
