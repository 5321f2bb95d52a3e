"""The command line: `transom <command>`; a known error is one sentence on standard error and exit code 1."""

from __future__ import annotations

import sys

import typer

from ckpt_engine.errors import CheckpointError
from ingest.bus import BusError
from pipelines.cli import (
    checkpoints,
    collect,
    corpus,
    diagnose,
    evaluate,
    fit,
    jobs,
    ledger,
    machine,
    measures,
    notify,
    reads,
    recovery,
    replay,
    run,
    services,
    simulation,
)
from pipelines.errors import StatedError
from pipelines.extras import extra_of
from recovery.backend import BackendError
from recovery.launcher.job_files import BrokenJobFile
from recovery.lease import ControllerRuns
from recovery.store import StoreError

STATED = (StatedError, BusError, BackendError, BrokenJobFile, CheckpointError, ControllerRuns, StoreError)

app = typer.Typer(
    name="transom",
    help="Finds what broke a distributed training job, names the rank, and brings the job back from memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(rich_help_panel="Try it")(jobs.demo)
app.command(rich_help_panel="Try it")(diagnose.diagnose)
app.command(rich_help_panel="Try it")(machine.doctor)
app.command(rich_help_panel="Train", context_settings=run.PASS_THROUGH)(run.run)
app.command(rich_help_panel="Train")(services.attend)
app.command(rich_help_panel="Train")(jobs.inject)
app.command(rich_help_panel="Services")(services.up)
app.command(rich_help_panel="Services")(services.detect)
app.command(rich_help_panel="Services")(services.recover)
app.command(rich_help_panel="Services")(services.record)
app.command(rich_help_panel="Services")(services.console)
app.command(rich_help_panel="Services")(collect.collect)
app.add_typer(checkpoints.ckpt, name="ckpt", rich_help_panel="Services")
app.command(hidden=True)(services.launcher)
app.add_typer(notify.notify, name="notify", rich_help_panel="Services")
app.add_typer(machine.topics, name="topics", rich_help_panel="Services")
app.command(rich_help_panel="Look")(reads.incidents)
app.command(rich_help_panel="Look")(reads.verdicts)
app.command(rich_help_panel="Look")(recovery.explain)
app.command(rich_help_panel="Look")(reads.ack)
app.command(rich_help_panel="Look")(reads.approve)
app.command(rich_help_panel="Look")(recovery.hold)
app.command(rich_help_panel="Look")(recovery.resume)
app.command(rich_help_panel="Look")(recovery.abort)
app.command(rich_help_panel="Look")(recovery.unexclude)
app.command(rich_help_panel="Look")(replay.replay)
app.command(rich_help_panel="Look")(ledger.sql)
app.command(rich_help_panel="Look")(ledger.snapshot)
app.add_typer(ledger.ledger, name="ledger", rich_help_panel="Look")
app.add_typer(measures.bench, name="bench", rich_help_panel="Measure")
app.command(rich_help_panel="Measure")(evaluate.evaluate)
app.command(rich_help_panel="Measure")(fit.fit)
app.command(rich_help_panel="Measure")(corpus.record_faults)
app.add_typer(simulation.simulate, name="simulate", rich_help_panel="Measure")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except STATED as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        fail(f"this needs {error.name}, which is not installed; run: pip install 'transom[{extra}]'")


def fail(sentence: str) -> None:
    """Say what was wrong and what to do, and end with exit code 1."""
    print(f"transom: {sentence}", file=sys.stderr)  # noqa: T201 - a person reads this
    sys.exit(1)


if __name__ == "__main__":
    main()
