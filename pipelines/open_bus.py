"""From settings to a bus: the embedded one, or Kafka behind its extra."""

from __future__ import annotations

import sys
from pathlib import Path

from ingest.bus import Bus
from ingest.clock import Clock
from pipelines.settings import Settings, SettingsError


def open_bus(settings: Settings, clock: Clock, *, client: str) -> Bus:
    """The configured bus, its topics made. Raises BusUnavailable, BusMisconfigured or SettingsError."""
    chosen = settings.bus
    bus: Bus
    if chosen.kind == "sqlite":
        from ingest.sqlite_bus import SqliteBus

        bus = SqliteBus(settings.make_state_dir() / "bus.sqlite", clock=clock, prefix=chosen.prefix)
    else:
        from ingest.kafka_bus import KafkaBus, KafkaSecurity

        bus = KafkaBus(
            chosen.bootstrap_servers,
            clock=clock,
            prefix=chosen.prefix,
            client_id=f"transom-{client}",
            security=KafkaSecurity(
                protocol=chosen.security_protocol,
                ca_file=chosen.ssl_cafile,
                sasl_mechanism=chosen.sasl_mechanism,
                sasl_username=chosen.sasl_username,
                sasl_password=_secret(chosen.sasl_password_file),
            ),
        )
    bus.create_topics(chosen.partitions)
    return bus


def _secret(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(f"bus.sasl_password_file {file} cannot be read ({error.strerror})") from error


def own_command(*arguments: str) -> list[str]:
    """The command line that starts another of our services with this interpreter, whatever is on the path."""
    return [sys.executable, "-u", "-P", "-m", "pipelines", *arguments]  # -u: a log in the order in which it was said
