"""`transom record-faults`: makes the runs of a plan that are not there yet, one after another."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ingest.bus import Record
from ingest.clock import Clock
from pipelines.errors import StatedError
from pipelines.fault_corpus.corpus import CorpusRun, is_recorded, write_corpus_run
from pipelines.fault_corpus.kinds import KINDS, SEVERITY_OF, SIZES, parameters_of
from pipelines.fault_corpus.plan import CLEAN, PlannedRun
from pipelines.fault_corpus.session import JOB, NODES, Session
from pipelines.fault_corpus.small_disk import SmallDisk
from pipelines.places import Places
from pipelines.recording import RecordingWriter
from pipelines.settings import load_settings

BASE_STEPS = 60  # before a fault: what the detectors learn a rank's own pace from, and some
START_SECONDS = 2.0  # until the first step, about
BASE_SECONDS_MAX = 90.0
CLEAN_SAVE_EVERY = 100
LABEL_SECONDS_MAX = 10.0
CLEAN_SECONDS_MAX = 1_200.0
LEVELS_SEVERITY = {str(level): severity for level, severity in SEVERITY_OF.items()}
SETTINGS = 'state_dir = "{state}"\n[bus]\nkind = "sqlite"\n'


def record_faults(
    folder: Path, plan: Sequence[PlannedRun], clock: Clock, random: Random, console: Console
) -> tuple[int, list[str]]:
    """Make every run of the plan that is missing; how many were made, and what could not be done, in sentences."""
    missing = [run for run in plan if not is_recorded(folder / run.name)]
    if not missing:
        return 0, []
    for left in list(folder.rglob("*.partial")):  # of a recording that was ended in the midst of a run
        shutil.rmtree(left)
    notes: list[str] = []
    made = 0
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="transom-faults-")))
        config = state / "transom.toml"
        config.write_text(SETTINGS.format(state=state), encoding="utf-8")
        own = load_settings(config)
        disk = stack.enter_context(SmallDisk(Places.of(own).checkpoints(JOB)))
        session = stack.enter_context(Session(own, clock, random, ["--config", str(config)]))
        progress = stack.enter_context(_progress(console))
        task = progress.add_task("", total=len(missing))
        for run in missing:
            progress.update(task, description=run.name)
            if run.kind != CLEAN and KINDS[run.kind].needs_small_disk and disk.reason:
                notes.append(f"{run.name} was left out: {disk.reason}")
            else:
                _record(folder / run.name, run, session, clock)
                made += 1
            progress.advance(task)
    return made, notes


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("recording"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True),
        TextColumn("{task.description}"), console=console, transient=True, speed_estimate_period=600.0,
    )  # fmt: skip


def _record(folder: Path, run: PlannedRun, session: Session, clock: Clock) -> None:
    """One run, into FOLDER.partial until it is whole."""
    partial = folder.with_name(folder.name + ".partial")
    arguments = [*SIZES[run.size].arguments(), "--seed", str(run.seed)]
    with RecordingWriter(partial, JOB, now=clock.now()) as writer:
        if run.kind == CLEAN:
            done = _clean(run, arguments, session, writer)
        else:
            done = _broken(run, arguments, session, writer, clock)
    write_corpus_run(partial, done)
    partial.replace(folder)


def _clean(run: PlannedRun, arguments: list[str], session: Session, writer: RecordingWriter) -> CorpusRun:
    """So many steps, and the job finishes by itself."""
    session.start([*arguments, "--steps", str(run.clean_steps), "--save-every", str(CLEAN_SAVE_EVERY)])
    _keep(writer, session.records(lambda: session.progress.nodes_ended >= NODES, CLEAN_SECONDS_MAX))
    if session.progress.steps < run.clean_steps:
        raise StatedError(
            f"{run.name} ended after {session.progress.steps} of {run.clean_steps} steps; a clean run must not fail"
        )
    session.stop()
    _keep(writer, session.last_records())
    return _corpus_run(run, session, 0.0)


def _broken(
    run: PlannedRun, arguments: list[str], session: Session, writer: RecordingWriter, clock: Clock
) -> CorpusRun:
    """Steps until everything is learned, the fault, a while after it, and the end."""
    kind = KINDS[run.kind]
    session.start([*arguments, "--workers", str(kind.workers), "--save-every", str(kind.save_every)])
    progress = session.progress
    earliest = clock.monotonic() + START_SECONDS + kind.base_seconds
    _keep(
        writer,
        session.records(lambda: progress.steps >= BASE_STEPS and clock.monotonic() >= earliest, BASE_SECONDS_MAX),
    )
    if progress.steps < BASE_STEPS:
        raise StatedError(f"{run.name} did not reach step {BASE_STEPS} in {BASE_SECONDS_MAX:.0f} s; is the host busy?")
    step_seconds = progress.step_seconds
    parameters = parameters_of(run.kind, run.level, step_seconds)
    session.inject(run.rank, kind.inject, parameters)
    _keep(writer, session.records(lambda: progress.label is not None, LABEL_SECONDS_MAX))
    if progress.label is None:
        raise StatedError(f"{run.name}: rank {run.rank} never said that it did {kind.inject}")
    lasting = parameters.get("seconds", 0.0) if kind.lasting_seconds else 0.0
    until = clock.monotonic() + lasting + kind.watch_seconds
    _keep(writer, session.records(lambda: clock.monotonic() >= until, lasting + kind.watch_seconds + 1.0))
    stopped_at = clock.now()
    session.stop()
    _keep(writer, session.last_records())
    return _corpus_run(run, session, step_seconds, lasting, stopped_at)


def _corpus_run(
    run: PlannedRun, session: Session, step_seconds: float, lasting: float = 0.0, stopped_at: float | None = None
) -> CorpusRun:
    label = session.progress.label
    return CorpusRun(
        part=run.part, kind=run.kind, level=run.level, severity=LEVELS_SEVERITY[run.level] if label else 0.0,
        size=run.size, seed=run.seed, step_seconds=round(step_seconds or session.progress.step_seconds, 6),
        fault=label, ended_at=label.at + lasting if label is not None and lasting else None, stopped_at=stopped_at,
    )  # fmt: skip


def _keep(writer: RecordingWriter, records: Iterable[Record]) -> None:
    for record in records:
        writer.write(record)
