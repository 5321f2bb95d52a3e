"""The settings table `[collect]`: what `transom collect` reads on this node, and whom it tells."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LogFilesSettings(_Section):
    """One entry of `collect.logs`."""

    path: str = Field(description="a glob, a --log-dir of torchrun, or a path with Slurm's %j %t %n")
    job: str = Field("", description="whose; empty: of every job that runs on the node")
    label: bool = Field(False, description="lines begin as srun --label makes them")


class ScrapeSettings(_Section):
    """One entry of `collect.prometheus`."""

    url: str = Field(description="an exporter's /metrics, or with query a server's /api/v1/query")
    node: str = Field("", description="whose samples; empty: this node, or as their labels say")
    job: str = Field("", description="whose; empty: of every job that runs on the node")
    query: str = Field("", description="PromQL that gives an instant vector")
    token_file: Path | None = Field(None, description="file that holds a bearer token")
    seconds: float = Field(5.0, ge=0.5, description="how often")


class HealthSettings(_Section):
    """One entry of `collect.health`."""

    source: str = Field(description="http(s):// of gpud's /v1/states, or a file with one JSON event a line")
    token_file: Path | None = Field(None, description="file that holds a bearer token")
    ca_file: Path | None = Field(None, description="who signed the certificate; gpud makes its own")
    seconds: float = Field(10.0, ge=0.5, description="how often")


class CollectSettings(_Section):
    node: str | None = Field(None, description="this node's name, as jobs have it; else as the scheduler or the host")
    to: str | None = Field(
        None, description="http://host:port of a `record` with a token, where this node has no bus; else the bus"
    )
    token_file: Path | None = Field(None, description="file that holds the token for it")
    kernel: str = Field("auto", description="auto, kmsg, journal, the path of a syslog file, or off")
    host: bool = Field(True, description="load, memory and disk of the host (needs transom[collect])")
    host_seconds: float = Field(2.0, ge=0.1, description="how often")
    nvml: bool = Field(True, description="GPUs by NVML where there is an NVIDIA driver (needs transom[collect])")
    nvml_seconds: float = Field(2.0, ge=0.1, description="how often")
    nvml_hang_seconds: float = Field(30.0, ge=1.0, description="no answer for so long: the driver hangs")
    slurm: bool = Field(False, description="why Slurm drains this node")
    slurm_seconds: float = Field(15.0, ge=1.0, description="how often")
    gpus: dict[str, int] = Field(
        default_factory=dict, description="PCI address → local rank, where ranks cannot tell which GPU they use"
    )
    logs: tuple[LogFilesSettings, ...] = Field((), description="tables with path, job, label: see docs/collect.md")
    prometheus: tuple[ScrapeSettings, ...] = Field(
        (), description="tables with url, node, job, query, token_file, seconds"
    )
    health: tuple[HealthSettings, ...] = Field((), description="tables with source, token_file, ca_file, seconds")
