"""From settings to the configuration of `record`: apart from the others, because it needs the extra `ledger`."""

from __future__ import annotations

from pipelines.ledger.ledger import LedgerConfig
from pipelines.ledger_address import read_token
from pipelines.places import Places
from pipelines.record import RecordConfig
from pipelines.settings import Settings, SettingsError

SECONDS_OF_DAY = 86_400.0


def record_config(settings: Settings, places: Places) -> RecordConfig:
    """Where the ledger lies and how it is served. Raises SettingsError for TCP without a token."""
    chosen = settings.record
    token = None
    if chosen.host is not None:
        if chosen.token_file is None:
            raise SettingsError("record.host serves the ledger on TCP, which needs record.token_file; set that too")
        token = read_token(chosen.token_file)
    return RecordConfig(
        ledger_folder=places.ledger,
        socket_path=places.api_socket,
        tcp_host=chosen.host,
        tcp_port=chosen.port,
        token=token,
        recording_folder=places.recordings if chosen.recordings else None,
        recordings_keep_seconds=_seconds(chosen.recordings_keep_days),
        ledger=LedgerConfig(
            flush_seconds=chosen.metrics_flush_seconds,
            logs_keep_seconds=chosen.logs_keep_days * SECONDS_OF_DAY,
            story_keep_seconds=_seconds(chosen.story_keep_days),
            snapshot_seconds=chosen.snapshot_seconds or None,
            metrics_keep_seconds=chosen.metrics_keep_days * SECONDS_OF_DAY,
        ),
    )


def _seconds(days: float | None) -> float | None:
    return None if days is None else days * SECONDS_OF_DAY
