"""What a person sees of the demo: one line for each thing that happens, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from detectors.verdict import Culprit, Verdict
from ingest.clock import Clock
from ingest.events import AttemptStarted, CheckpointEvent, FaultInjected, RankExited
from pipelines.demo.faults import Outcome
from recovery.action import Action, Incident, Receipt

COLUMNS = (
    "fault", "detected as", "culprit", "action", "verdict", "first step", "resumed from", "lost", "tier", "",
)  # fmt: skip

RULE_CLAUSES_MAX = 2  # of what decided; `transom explain` has all of it


class Show:
    """Prints the story as it happens; every line carries the seconds since the demo began."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._began = clock.monotonic()
        self._told: dict[str, str] = {}  # by verdict: what was said of it last; a revision may change nothing to see

    @property
    def seconds(self) -> float:
        return self._clock.monotonic() - self._began

    def say(self, who: str, text: str, style: str = "") -> None:
        line = Text(f"{self.seconds:6.1f} s  ", style="dim")
        line.append(f"{who:<9}", style="bold " + style if style else "bold")
        line.append(text, style=style)
        self._console.print(line, soft_wrap=True)

    def rule(self, title: str) -> None:
        self._console.rule(f"[bold]{title}", align="left", style="dim")

    def messages(self, messages: Sequence[Any]) -> None:
        """Tell those messages that a spectator wants to see."""
        for message in messages:
            self._message(message)

    def _message(self, message: Any) -> None:
        match message:
            case Verdict():
                self._verdict(message)
            case Action():
                rule = "; ".join(message.rule.split("; ")[:RULE_CLAUSES_MAX])
                self.say("recover", f"{message.verb} ({message.mode}) — {rule}", "cyan")
            case Receipt() if message.outcome != "done" or message.text:
                self.say("recover", f"{message.outcome}: {message.text}", "cyan")
            case Incident() if message.state in ("resolved", "held", "gave_up"):
                self.say(
                    "recover",
                    f"incident {message.state}: {message.cause}",
                    "green" if message.state == "resolved" else "red",
                )
            case AttemptStarted():
                origin = (
                    "from scratch"
                    if message.resume_step is None
                    else f"from the checkpoint of step {message.resume_step}"
                )
                nodes = ", ".join(dict.fromkeys(place.node for place in message.places))
                self.say("launcher", f"attempt {message.attempt}: {message.world_size} ranks on {nodes}, {origin}")
            case RankExited() if not message.stopped_by_launcher and message.exit_code != 0:
                ending = f"signal {message.signal}" if message.signal else f"exit code {message.exit_code}"
                self.say("launcher", f"rank {message.rank} on {message.node} ended with {ending}", "dim")
            case FaultInjected():
                self.say("inject", f"{message.fault} into rank {message.rank} on {message.node}", "red")
            case CheckpointEvent(state="rejected"):
                self.say("ckpt", f"checkpoints of step {message.step} and later are rejected: {message.reason}", "dim")
            case CheckpointEvent(state="loaded"):
                self.say(
                    "ckpt",
                    f"rank {message.rank} loaded step {message.step} from {message.tier} in {message.seconds:.2f} s",
                    "dim",
                )

    def _verdict(self, verdict: Verdict) -> None:
        word = "closed: " if verdict.status == "closed" else ""
        text = f"{word}{verdict.fault_class} — {culprits_in_words(verdict.culprits)}. {verdict.summary}"
        if self._told.get(verdict.verdict_id) != text:
            self._told[verdict.verdict_id] = text
            self.say("detect", text, "yellow" if verdict.status == "open" else "green")

    def table(self, outcomes: Sequence[Outcome], goodput: float | None) -> None:
        """Fault by fault: what was concluded and done, each right or wrong; then the job's goodput."""
        if outcomes:
            self._faults(outcomes)
        if goodput is not None:
            counted = "steps that counted × median step time ÷ time since the first attempt began"
            self._console.print(f"Goodput {goodput:.0%}: {counted}.")

    def _faults(self, outcomes: Sequence[Outcome]) -> None:
        table = Table(title="What Transom made of it", title_justify="left", box=None, pad_edge=False)
        for name in COLUMNS:
            table.add_column(name, justify="right" if name in ("verdict", "first step", "lost") else "left")
        for outcome in outcomes:
            verdict, action = outcome.verdict, outcome.action
            table.add_row(
                outcome.fault.title,
                _graded(verdict.fault_class if verdict else "nothing", outcome.class_right),
                _graded(culprits_in_words(verdict.culprits) if verdict else "–", outcome.culprit_right),
                _graded(action.verb.replace("_", " ") if action else "–", outcome.action_right),
                _seconds(outcome.verdict_seconds),
                _seconds(outcome.step_seconds),
                _graded(f"step {outcome.resume_step}", outcome.resume_right) if outcome.fault.restarts else "–",
                "–" if outcome.steps_lost is None else f"{outcome.steps_lost} steps",
                outcome.tier or "–",
                "[green]right[/]" if outcome.right else "[red]wrong[/]",
            )
        self._console.print()
        self._console.print(table)
        for outcome in outcomes:
            for reason in outcome.why:
                self._console.print(f"[red]{outcome.fault.name}[/]: {escape(reason)}")
        right = sum(outcome.right for outcome in outcomes)
        self._console.print(f"\n{right} of {len(outcomes)} faults handled right.")


def culprits_in_words(culprits: Sequence[Culprit]) -> str:
    """Rank and node of each, or that nobody is known."""
    if not culprits:
        return "culprit unknown"
    return ", ".join(
        f"{culprit.node}" if culprit.rank is None else f"rank {culprit.rank} ({culprit.node})" for culprit in culprits
    )


def _graded(text: str, right: bool) -> str:
    return f"[green]✓[/] {text}" if right else f"[red]✗[/] {text}"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f} s"
