"""Options that several commands share, and how they become settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.settings import Settings, load_settings

Config = Annotated[
    Path | None, typer.Option("--config", help="Settings file (default: ./transom.toml where it exists).")
]
StateDir = Annotated[Path | None, typer.Option("--state-dir", help="Where everything is kept that outlives a process.")]
BusKind = Annotated[str | None, typer.Option("--bus", help="sqlite (embedded, one machine) or kafka.")]
Bootstrap = Annotated[
    str | None, typer.Option("--bootstrap-servers", help="Kafka brokers, host:port, comma separated.")
]
Model = Annotated[
    Path | None,
    typer.Option("--model", help="Model of `transom fit` to start from (default: detect.model).", dir_okay=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the measured figures to this file.", dir_okay=False)
]


def settings_from(
    config: Path | None = None,
    state_dir: Path | None = None,
    bus: str | None = None,
    bootstrap_servers: str | None = None,
    **more: Any,
) -> Settings:
    """Settings from file and environment with these flags above them; a flag that is None says nothing."""
    overrides: dict[str, Any] = {key: value for key, value in more.items() if value is not None}
    if state_dir is not None:
        overrides["state_dir"] = state_dir
    chosen = {"kind": bus, "bootstrap_servers": bootstrap_servers}
    named = {key: value for key, value in chosen.items() if value is not None}
    if bootstrap_servers is not None and bus is None:
        named["kind"] = "kafka"
    if named:
        overrides["bus"] = named
    return load_settings(config, overrides)


def with_model(model: Path | None) -> dict[str, Any] | None:
    """The part of the settings that `--model` sets, for `settings_from(detect=…)`."""
    return None if model is None else {"model": model}


def settings_arguments(
    config: Path | None, state_dir: Path | None, bus: str | None, bootstrap_servers: str | None
) -> list[str]:
    """The same flags for a process that we start; paths absolute, what was not given is left out."""
    given = {
        "--config": config.absolute() if config is not None else None,
        "--state-dir": state_dir.absolute() if state_dir is not None else None,
        "--bus": bus,
        "--bootstrap-servers": bootstrap_servers,
    }
    return [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
