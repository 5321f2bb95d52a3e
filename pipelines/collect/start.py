"""From settings to a running collector: which sources there are here, and whom they tell."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ingest.clock import Clock
from ingest.devices import NVIDIA_GPUS_FOLDER
from pipelines.collect.collect import Collect, Open
from pipelines.collect.jobs_here import JobsHere
from pipelines.collect.logs import LogFiles, Logs
from pipelines.collect.outlet import onto_bus
from pipelines.collect.source import Source, SourceFailed
from pipelines.collect_settings import CollectSettings, HealthSettings, ScrapeSettings
from pipelines.open_bus import open_bus
from pipelines.places import Places, checked_name
from pipelines.settings import Settings, node_given

FOLDER = "collect"


def collector_node(settings: Settings, given: str | None) -> str:
    """This node's name as jobs have it: given, set, as the scheduler tells it, or the host's. Raises NameRefused."""
    return checked_name("node", given or settings.collect.node or node_given() or socket.gethostname())


def sources_of(chosen: CollectSettings, node: str, state: Path, clock: Clock) -> dict[str, Open]:
    """Every source that the settings ask for, by its name, as a function that opens it."""
    sources: dict[str, Open] = {}
    if chosen.kernel != "off":
        sources["kernel"] = partial(_kernel, chosen.kernel, clock)
    if chosen.logs:
        wanted = [LogFiles(one.path, one.job, one.label) for one in chosen.logs]
        sources["logs"] = partial(Logs, wanted, state / f"{FOLDER}-{node}-logs.json")
    if chosen.host:
        sources["host"] = partial(_host, state, chosen.host_seconds)
    if chosen.nvml and Path(NVIDIA_GPUS_FOLDER).exists():
        sources["nvml"] = partial(_nvml, chosen, clock)
    if chosen.slurm:
        sources["slurm"] = partial(_slurm, node, chosen.slurm_seconds)
    for number, scrape in enumerate(chosen.prometheus):
        sources[f"prometheus{number}"] = partial(_prometheus, scrape)
    for number, health in enumerate(chosen.health):
        sources[f"health{number}"] = partial(_health, health)
    return sources


def run_collect(
    settings: Settings, places: Places, node: str, clock: Clock, stop: threading.Event, tell: Callable[[str], None]
) -> None:
    """Collect until `stop`. Raises BusError, SettingsError or TokenRefused where it cannot begin."""
    chosen = settings.collect
    sources: Mapping[str, Open] = sources_of(chosen, node, places.state, clock)
    jobs = JobsHere(node, chosen.gpus)
    state = places.state / f"{FOLDER}-{node}.json"
    if chosen.to is not None:
        from pipelines.collect.to_record import ToRecord

        record = ToRecord(chosen.to, chosen.token_file)
        collect = Collect(sources, jobs, record.deliver, clock, state, tell)
        record.run(collect, stop, tell)
        return
    bus = open_bus(settings, clock, client=f"collect-{node}")
    producer = bus.producer()
    try:
        collect = Collect(sources, jobs, onto_bus(producer), clock, state, tell)
        tell(f"collect: node {node}; reading {', '.join(sources) or 'nothing: see docs/collect.md'}")
        collect.run(bus, f"collect-{re.sub(r'[^A-Za-z0-9_.-]', '_', node)}", stop)
    finally:
        producer.close()
        bus.close()


def _kernel(chosen: str, clock: Clock) -> Source:
    from pipelines.collect.kernel import kernel_source

    return kernel_source(chosen, clock)


def _host(state: Path, seconds: float) -> Source:
    from pipelines.collect.host import Host

    return Host(state, seconds)


def _nvml(chosen: CollectSettings, clock: Clock) -> Source:
    from pipelines.collect.nvml import Nvml

    return Nvml(clock, chosen.nvml_seconds, hang_seconds=chosen.nvml_hang_seconds)


def _slurm(node: str, seconds: float) -> Source:
    from pipelines.collect.health import slurm_drains

    return slurm_drains(node, seconds)


def _prometheus(scrape: ScrapeSettings) -> Source:
    try:
        from pipelines.collect.prometheus import Prometheus, Scraped
    except ImportError as error:
        raise SourceFailed(
            "scraping needs an extra that is not installed; run: pip install 'transom[collect]'"
        ) from error
    return Prometheus(Scraped(**scrape.model_dump()))


def _health(chosen: HealthSettings) -> Source:
    try:
        from pipelines.collect.health import EventFile, gpud
    except ImportError as error:
        raise SourceFailed(
            "health events need an extra that is not installed; run: pip install 'transom[collect]'"
        ) from error
    if chosen.source.startswith(("http://", "https://")):
        return gpud(chosen.source, chosen.seconds, chosen.token_file, chosen.ca_file)
    return EventFile(Path(chosen.source), chosen.seconds)
