"""`transom replay`: runs through the live pipeline's detection, and what is made of it: ledger, report, differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from detectors.step_block import StepBlock
from detectors.verdict import Verdict
from ingest.clock import Clock
from pipelines.errors import StatedError
from pipelines.evaluate.matching import Label
from pipelines.historic.open_run import Format
from pipelines.historic.run import Told
from pipelines.replay_diff import VerdictDiff, diff, diff_tables, label_table
from pipelines.replay_source import RecordedSource, ReplaySource, open_source, read_labels
from pipelines.replayed import Difference, Replayed, compare
from pipelines.report.html import html_of
from pipelines.report.markdown import markdown_of
from pipelines.report.report import RunReport, Surveyor, Table, incidents_of, take, wanted_curves
from pipelines.report.words import clock_text, culprits_text
from pipelines.settings import Settings

TELL_MESSAGES = 2_000


class CannotReplay(StatedError):
    """What was asked does not go together; the text says what does."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a replay is asked for."""

    runs: tuple[Path, ...]
    settings: tuple[tuple[str, Settings], ...]  # one or two configurations, each with its name
    output: Path | None = None
    ledger: Path | None = None
    report: Path | None = None
    json: Path | None = None
    mapping: Path | None = None
    format: Format | None = None
    labels: Path | None = None

    def __post_init__(self) -> None:
        if len(self.settings) > 2:
            raise CannotReplay("at most two configurations can be compared; give --config twice")
        if self.ledger is not None and len(self.runs) * len(self.settings) > 1:
            raise CannotReplay("a ledger holds one replay; give one run and one --config with --ledger")
        if self.report is not None and self.report.suffix not in (".html", ".md"):
            raise CannotReplay(f"the report {self.report} must end in .html or .md")


@dataclass(slots=True)
class RunResult:
    """One run under each configuration."""

    source: ReplaySource
    path: Path
    replays: list[tuple[str, Replayed]]
    survey: Surveyor
    labels: tuple[Label, ...]
    tables: list[Table] = field(default_factory=list)

    @property
    def last(self) -> Replayed:
        """Under the newer of two configurations."""
        return self.replays[-1][1]

    @property
    def difference(self) -> VerdictDiff | None:
        return diff(self.replays[0][1], self.last) if len(self.replays) == 2 else None


def run_replay(wanted: Wanted, console: Console, progress_console: Console, clock: Clock) -> list[RunResult]:
    """Do all of it, and print it. Raises NotARun, NotARecording, BadLabels, CannotReplay, LedgerThere."""
    results = []
    with Progress(console=progress_console, transient=True) as progress:
        task = progress.add_task("replaying", total=None)

        def tell(text: str, count: int) -> None:
            progress.update(task, completed=count, description=text)

        for path in wanted.runs:
            results.append(_replayed(wanted, path, tell))
        if wanted.ledger is not None:
            from pipelines.replay_ledger import write_ledger

            tell("writing the ledger", 0)
            write_ledger(wanted.ledger, results[0].source.records(), results[0].last.verdicts, clock)
        if wanted.report is not None:
            tell("writing the report", 0)
            _write_report(wanted.report, results)
    for result in results:
        _show(result, wanted, console)
    if wanted.output is not None:
        wanted.output.write_bytes(b"".join(result.last.lines() for result in results))
    if wanted.json is not None:
        told = msgspec.json.encode([_facts(result) for result in results])
        wanted.json.write_bytes(msgspec.json.format(told, indent=2) + b"\n")
    if wanted.ledger is not None:
        opened = f"transom console --ledger {wanted.ledger}"
        console.print(f"The ledger is in {wanted.ledger}; open it with: {opened}", soft_wrap=True)
    return results


def _replayed(wanted: Wanted, path: Path, tell: Callable[[str, int], None]) -> RunResult:
    source = open_source(path, wanted.mapping, wanted.format)
    labels = read_labels(wanted.labels) if wanted.labels is not None else source.labels()
    replays, survey = [], Surveyor()
    for name, settings in wanted.settings:
        survey = Surveyor()
        label = f"replaying {source.job}" + (f" with {name}" if len(wanted.settings) > 1 else "")

        def heard(told: Told, survey: Surveyor = survey, label: str = label) -> None:
            _survey(survey, told)
            if survey.messages % TELL_MESSAGES == 0:
                tell(f"{label}, {survey.messages:,} messages, {clock_text(told.at)}", survey.messages)

        replays.append((name, source.replay(settings, heard)))
    result = RunResult(source, path, replays, survey, labels)
    found = result.difference
    if found is not None:
        result.tables += diff_tables(found, (replays[0][0], replays[1][0]))
    if labels:
        result.tables.append(label_table(labels, replays))
    if isinstance(source, RecordedSource):
        said = source.feedback(result.last)
        rows = tuple((name, *map(str, counts)) for name, counts in sorted(said.items()))
        if rows:
            result.tables.append(Table("What people said", ("class", "right", "wrong", "not known"), rows))
    return result


def _survey(survey: Surveyor, told: Told) -> None:
    if isinstance(told, StepBlock):
        survey.see(told.at, -1)
        survey.ranks.update(told.ranks.tolist())
    else:
        survey.see(told.at, told.rank)


def _write_report(path: Path, results: Sequence[RunResult]) -> None:
    reports = [_report_of(result) for result in results]
    title = f"Replay of {', '.join(dict.fromkeys(report.job for report in reports))}"
    text = html_of(title, reports) if path.suffix == ".html" else markdown_of(title, reports)
    path.write_text(text, encoding="utf-8")


def _report_of(result: RunResult) -> RunReport:
    """The incidents of the newer configuration; for the curves beneath them the run is read again."""
    survey, incidents = result.survey, incidents_of(result.last)
    curves = wanted_curves(incidents, survey.begins_at, survey.ends_at)
    if curves:
        for told in result.source.told():
            take(curves, told)
    return RunReport(
        job=result.source.job, kind=result.source.kind, source=result.path.name, notes=result.source.notes,
        incidents=incidents, begins_at=min(survey.begins_at, survey.ends_at), ends_at=survey.ends_at,
        messages=survey.messages, ranks=len(survey.ranks), curves=curves, tables=result.tables,
    )  # fmt: skip


def _show(result: RunResult, wanted: Wanted, console: Console) -> None:
    several = len(wanted.runs) > 1
    if several or not isinstance(result.source, RecordedSource):
        console.print(f"[bold]{escape(result.source.job)}[/] ({escape(result.source.kind)})", soft_wrap=True)
    for note in result.source.notes:
        console.print(f"  {escape(note)}", style="dim", soft_wrap=True)
    incidents = incidents_of(result.last)
    for verdict in incidents:
        told = f"attempt {verdict.attempt}  [bold]{verdict.fault_class}[/]  {escape(verdict.summary)}"
        console.print(told, soft_wrap=True)
    if not incidents:
        console.print("No verdicts: nothing is wrong with this run.")
    live = result.last.live
    if live:
        found: Difference = compare(live, result.last.verdicts)
        console.print(
            f"Against the live run: {len(found.same)} the same, {len(found.changed)} changed, "
            f"{len(found.gone)} gone, {len(found.new)} new."
        )
    for table in result.tables:
        _print_table(table, console)
    if result.last.unreadable:
        console.print(f"[yellow]{result.last.unreadable} messages could not be read.[/]")


def _print_table(table: Table, console: Console) -> None:
    from rich.table import Table as Shown

    shown = Shown(title=escape(table.title), title_justify="left", box=None, pad_edge=False)
    for column in table.columns:
        shown.add_column(column)
    for row in table.rows:
        shown.add_row(*map(escape, row))
    console.print(shown)
    if table.words:
        console.print(table.words)


def _facts(result: RunResult) -> dict[str, object]:
    """The run in a form that JSON can carry."""
    found = result.difference
    return {
        "job": result.source.job,
        "kind": result.source.kind,
        "notes": result.source.notes,
        "messages": result.survey.messages,
        "ranks": len(result.survey.ranks),
        "begins_at": result.survey.begins_at,
        "ends_at": result.survey.ends_at,
        "configurations": {name: [_brief(one) for one in incidents_of(replayed)] for name, replayed in result.replays},
        "difference": None
        if found is None
        else {
            "same": [one.verdict_id for one in found.same],
            "moved": [[_brief(before), _brief(after)] for before, after in found.moved],
            "gone": [_brief(one) for one in found.gone],
            "new": [_brief(one) for one in found.new],
        },
        "tables": [{"title": table.title, "columns": table.columns, "rows": table.rows} for table in result.tables],
    }


def _brief(verdict: Verdict) -> dict[str, object]:
    return {
        "verdict_id": verdict.verdict_id, "attempt": verdict.attempt, "class": verdict.fault_class,
        "severity": verdict.severity, "status": verdict.status, "culprits": culprits_text(verdict),
        "onset_at": verdict.onset_at, "onset_step": verdict.onset_step, "at": verdict.at, "summary": verdict.summary,
    }  # fmt: skip
