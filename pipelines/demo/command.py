"""`transom demo`, whole: its own state folder and settings, services, broker and console around the driven job."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event

from rich.console import Console

from ingest.clock import Clock
from pipelines.broker.broker import LocalBroker
from pipelines.children import Children
from pipelines.console import ConsolePlan, PortTaken, console_plan, has_streamlit
from pipelines.demo.drive import Demo, DemoOptions, figures
from pipelines.demo.faults import Outcome
from pipelines.demo.show import Show
from pipelines.extras import require
from pipelines.figures import write_figures
from pipelines.open_bus import open_bus
from pipelines.places import Places
from pipelines.settings import Settings, load_settings
from pipelines.up import start_services

SECURITY = {"security_protocol", "ssl_cafile", "sasl_mechanism", "sasl_username", "sasl_password_file"}
SETTINGS = """\
# Written by `transom demo`. Beside the defaults: what touches a node is done by itself here (the default is
# "observe"), and an incident is resolved after a few steps, so that a demo takes minutes and not hours.
state_dir = "{state}"

[bus]
kind = "{kind}"
bootstrap_servers = "{servers}"
prefix = "{prefix}"
{security}

[recover]
probation_steps = 3
probation_seconds = 1.0
stop_grace_seconds = 1.0
evidence_seconds = 2.0

[recover.modes]
gpu_lost = "auto"
node_lost = "auto"
rank_lost = "auto"
hang = "auto"
nan = "auto"
user_error = "auto"

[record]
metrics_flush_seconds = 2.0
"""


def run_demo(
    settings: Settings,
    options: DemoOptions,
    *,
    clock: Clock,
    console: Console,
    stop: Event,
    stay: bool,
    own_broker: bool,
    json_file: Path | None,
    caches: Path,
) -> int:
    """Run it; 0 only if every fault was handled right and nothing else was said. `stay`: keep the console open."""
    require("ckpt", "the demo trains a real job, which (PyTorch)")
    require("ledger", "the demo (record)")
    began = clock.monotonic()
    show = Show(console, clock)
    state = settings.make_state_dir() / "demo" / f"{int(clock.now()):x}"
    state.mkdir(mode=0o700, parents=True)
    with Children(state / "logs", clock) as children, _Broker(own_broker, state, caches, show, clock) as servers:
        config = _write_settings(state, settings, servers, clock)
        own = load_settings(config)
        places = Places.of(own)
        arguments = ["--config", str(config)]
        bus = open_bus(own, clock, client="demo")
        show.say(
            "demo",
            f"state folder {state}; its {config.name} sets gpu_lost and node_lost to 'auto' (default: 'observe') "
            "and a short probation",
        )
        plan = _console(own, places)
        start_services(children, places, arguments, clock)
        if plan is not None:
            children.start("console", plan.command)
            show.say("console", plan.url, "magenta")
        result = Demo(options, places, bus, children, show, clock, arguments).run()
        show.table(result.outcomes, result.goodput)
        measured = figures(result, clock.monotonic() - began)
        for figure in measured:
            console.print(f"[dim]{figure.name} = {figure.value:g} {figure.unit}[/]")
        if not options.faults:
            console.print(f"{result.false_verdicts} verdicts in a run without faults (right: 0).")
        if result.problem:
            console.print(result.problem, style="red", markup=False)
        if json_file is not None:
            write_figures(
                json_file, measured, faults=[_row(outcome) for outcome in result.outcomes], problem=result.problem
            )
        recording = places.recordings / "demo"
        if recording.exists():
            console.print(f"Replay it: transom replay {recording}", markup=False, soft_wrap=True)
        if stay and plan is not None and not stop.is_set():
            show.say("console", f"{plan.url} stays open until Ctrl-C", "magenta")
            with suppress(KeyboardInterrupt):  # the demo is over: its exit code says how it went
                stop.wait()
        bus.close()
    return 0 if result.right else 1


def _console(own: Settings, places: Places) -> ConsolePlan | None:
    """The demo's console; on any free port where the usual one is taken. None without Streamlit."""
    if not has_streamlit():
        return None
    try:
        return console_plan(own, places)
    except PortTaken:
        return console_plan(own.model_copy(update={"console": own.console.model_copy(update={"port": 0})}), places)


def _write_settings(state: Path, settings: Settings, servers: str | None, clock: Clock) -> Path:
    kind = "kafka" if servers is not None else settings.bus.kind
    config = state / "transom.toml"
    prefix = settings.bus.prefix if kind == "sqlite" else f"{settings.bus.prefix}-demo-{int(clock.now()):x}"
    given = settings.bus.model_dump(include=SECURITY, exclude_none=True) if servers is None else {}
    text = SETTINGS.format(
        state=state,
        kind=kind,
        servers=servers or settings.bus.bootstrap_servers,
        prefix=prefix,
        security="\n".join(f'{name} = "{value}"' for name, value in sorted(given.items())),
    )
    config.write_text(text, encoding="utf-8")
    return config


def _row(outcome: Outcome) -> Mapping[str, object]:
    verdict, action = outcome.verdict, outcome.action
    return {
        "fault": outcome.fault.name,
        "class": verdict.fault_class if verdict else None,
        "culprits": [[culprit.rank, culprit.node] for culprit in verdict.culprits] if verdict else [],
        "action": action.verb if action else None,
        "resume_step": outcome.resume_step,
        "tier": outcome.tier,
        "verdict_seconds": outcome.verdict_seconds,
        "step_seconds": outcome.step_seconds,
        "steps_lost": outcome.steps_lost,
        "right": outcome.right,
        "why": outcome.why,
    }


class _Broker:
    """The demo's own Apache Kafka, where it was asked for; None stands for no broker of ours."""

    def __init__(self, wanted: bool, state: Path, caches: Path, show: Show, clock: Clock) -> None:
        self._broker: LocalBroker | None = None
        if wanted:
            libs = caches / "transom" / "kafka"
            self._broker = LocalBroker(
                state / "broker", libs, java=shutil.which("java"), mvn=shutil.which("mvn"), clock=clock
            )
            show.say("broker", "starting Apache Kafka (the first time its jars are fetched)")

    def __enter__(self) -> str | None:
        if self._broker is None:
            return None
        self._broker.start()
        return self._broker.bootstrap

    def __exit__(self, *_: object) -> None:
        if self._broker is not None:
            self._broker.stop()


def cache_folder(environ: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME, or ~/.cache."""
    return Path(environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
