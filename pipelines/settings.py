"""The only reader of transom.toml and the environment: one tree of settings, flags over environment over file."""

from __future__ import annotations

import hashlib
import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from pipelines.collect_settings import CollectSettings
from pipelines.errors import StatedError
from pipelines.settings_recover import RecoverSettings
from pipelines.settings_section import Section as _Section

DEFAULT_FILE = Path("transom.toml")
RING_TOKEN_VARIABLE = "TRANSOM_RING_TOKEN"
LAUNCHER_TOKEN_VARIABLE = "TRANSOM_LAUNCHER_TOKEN_FILE"
NODE_VARIABLES = ("TRANSOM_NODE", "SLURMD_NODENAME", "NODE_NAME")  # the first that is set names this node
HOST_VARIABLES = ("TRANSOM_HOST", "POD_IP")  # how other nodes reach it
SOCKET_PATH_BYTES_MAX = 100  # sun_path holds 108; the file names below the folder need some of them


class SettingsError(StatedError):
    """A setting is wrong; the text names the file or variable, the key, and what is expected."""


class BusSettings(_Section):
    kind: Literal["sqlite", "kafka"] = Field("sqlite", description="sqlite: embedded, one machine; kafka: Apache Kafka")
    bootstrap_servers: str = Field("127.0.0.1:9092", description="Kafka brokers, host:port, comma separated")
    prefix: str = Field("transom", pattern=r"^[A-Za-z0-9._-]{1,80}$", description="topic name prefix")
    partitions: int = Field(
        1, ge=1, le=4096, description="partitions of a topic when it is created; more jobs, more partitions"
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="how the brokers are spoken to"
    )
    ssl_cafile: str | None = Field(None, description="file with the authority that signed the brokers' certificates")
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(
        None, description="with SASL_PLAINTEXT and SASL_SSL"
    )
    sasl_username: str | None = Field(None, description="who we are to the brokers")
    sasl_password_file: str | None = Field(None, description="file that holds the password; never the password itself")


class EnsembleSettings(_Section):
    enabled: bool = Field(
        True, description="PyOD beside the rules (needs transom[detect]); `ensemble = false` is short for it"
    )
    members: tuple[str, ...] = Field(
        ("top1", "top2", "top3", "PCA", "KNN"),
        min_length=1,
        description="who decides: topK (mean of the K largest z), classes of PyOD",
    )
    votes: tuple[str, ...] = Field(("HBOS", "IForest"), description="who only adds to what was decided")
    weights: dict[str, float] = Field(
        default_factory=dict, description="of a member's or a vote's decades; 1 where none is given"
    )
    vote_weight: float = Field(0.25, ge=0.0, le=1.0, description="of all votes together")
    features: tuple[str, ...] = Field((), description="timings that are looked at, at least two; empty: all of them")
    budget_per_day: float = Field(0.5, gt=0.0, description="alarms a day of the ensemble alone on a clean job")
    persistence: tuple[int, int] = Field((6, 8), description="so many odd steps of the last so many, at most 16")


class DetectSettings(_Section):
    straggler_ratio: float = Field(0.10, gt=0.0, description="excess of own compute over the slowest peer")
    hang_without_stop_seconds: float = Field(
        2.0, gt=0.0, description="no progress beside waiting peers before a hang is called"
    )
    hang_ceiling_seconds: float = Field(60.0, ge=10.0, description="no progress of any rank, nobody to blame")
    start_ceiling_seconds: float = Field(
        300.0, ge=10.0, description="the same before an attempt's first steps: loading and compiling take long"
    )
    node_silent_seconds: float = Field(5.0, gt=0.0, description="a node silent for longer is lost")
    coalesce_seconds: float = Field(3.0, ge=0.0, description="wait for the root of a cascade")
    model: Path | None = Field(
        None, description="file of `transom fit`: the ensemble knows from the first step what is normal"
    )
    state_seconds: float = Field(5.0, gt=0.0, description="how often detection state is saved with its offsets")
    rules_dir: Path | None = Field(
        None, description="folder of *.toml with log rules of your own, read after ours and again when it changes"
    )
    ensemble: EnsembleSettings = EnsembleSettings()

    @field_validator("ensemble", mode="before")
    @classmethod
    def _switch(cls, given: object) -> object:
        return {"enabled": given} if isinstance(given, bool) else given


class RecordSettings(_Section):
    metrics_flush_seconds: float = Field(5.0, gt=0.0, description="a Parquet part at least so often")
    metrics_keep_days: float = Field(30.0, gt=0.0, description="then parts are deleted")
    logs_keep_days: float = Field(30.0, gt=0.0, description="then log records are deleted")
    story_keep_days: float | None = Field(
        None, gt=0.0, description="then verdicts, actions, events are deleted; unset: never"
    )
    recordings_keep_days: float | None = Field(
        None, gt=0.0, description="then recordings that nothing was added to are deleted; unset: never"
    )
    snapshot_seconds: float = Field(0.0, ge=0.0, description="a snapshot so often, where anything changed; 0: none")
    recordings: bool = Field(True, description="keep each job's messages for `transom replay`")
    host: str | None = Field(None, description="serve the API on TCP too; elsewhere: read it there; needs token_file")
    port: int = Field(8787, ge=1, le=65535, description="of the TCP API")
    token_file: Path | None = Field(None, description="file that holds the token of the TCP API")


class RingSettings(_Section):
    token_file: Path | None = Field(
        None, description="file (0600) with the engines' token; without it, and TRANSOM_RING_TOKEN, there is no ring"
    )
    listen: str = Field("127.0.0.1", description="address on which a node's engine listens for the others")
    port: int = Field(0, ge=0, le=65535, description="0: any free one, which the others read in the job's folder")
    advertise: str | None = Field(None, description="address that others are told, where it is another one")
    replication: int = Field(1, ge=1, le=16, description="nodes that hold a copy of each shard, beside its own")
    peer_memory_bytes_max: int = Field(8 * 2**30, gt=0, description="hard cap of what one engine keeps for others")
    bytes_per_second_max: int = Field(0, ge=0, description="of one engine's copies to others; 0: no limit")
    groups: dict[str, str] = Field(
        default_factory=dict, description="what fails together, by node: copies go to other groups where there are"
    )
    addresses: dict[str, str] = Field(
        default_factory=dict, description="host:port by node, where the job's folder is not to tell it"
    )
    tls_certificate: Path | None = Field(None, description="PEM; with tls_key and tls_authority the ring speaks TLS")
    tls_key: Path | None = Field(None, description="PEM, of the certificate")
    tls_authority: Path | None = Field(None, description="PEM: who signs the engines' certificates")


class DiskSettings(_Section):
    keep_every_steps: int = Field(0, ge=0, description="steps whose number it divides are kept for ever; 0: none")
    bytes_per_second_max: int = Field(0, ge=0, description="of one engine's writing to disk; 0: no limit")
    io_priority: Literal["none", "best-effort", "idle"] = Field(
        "best-effort", description="none, best-effort (its lowest level) or idle"
    )
    deduplicate: bool = Field(True, description="ranks with the same tensors (data-parallel replicas) share one file")


class ObjectsSettings(_Section):
    url: str | None = Field(
        None, description="object store for complete checkpoints, as fsspec spells it; needs transom[objects]"
    )
    keep_complete: int = Field(3, ge=1, description="complete checkpoints kept there")
    bytes_per_second_max: int = Field(0, ge=0, description="of one engine's copying to it; 0: no limit")


class CheckpointSettings(_Section):
    keep_complete: int = Field(3, ge=1, description="complete checkpoints kept on disk")
    memory_bytes_max: int = Field(8 * 2**30, gt=0, description="hard cap of one node's engine")
    keeper_seconds: float = Field(
        600.0, ge=0.0, description="memory of an engine that died is held so long for the next one; 0: no keeper"
    )
    proved_seconds: float = Field(
        600.0, ge=0.0, description="of training after a checkpoint, without an incident, mark it as verified; 0: never"
    )
    disk: DiskSettings = DiskSettings()
    objects: ObjectsSettings = ObjectsSettings()
    ring: RingSettings = RingSettings()


class ConsoleSettings(_Section):
    host: str = Field("127.0.0.1", description="others need --open-to-others and a login token")
    port: int = Field(8501, ge=0, le=65535, description="0: any free port")


class AppriseSettings(_Section):
    urls_file: Path | None = Field(
        None, description="file (0600) with addresses as apprise spells them, one a line; needs transom[apprise]"
    )


class NotifySettings(_Section):
    least: Literal["info", "warning", "page"] = Field(
        "info", description="quieter ones are not told: info (by itself), warning (look at it), page (a person's turn)"
    )
    console_url: str | None = Field(None, description="where people open the console, for links; else its own address")
    cooldown_seconds: float = Field(
        300.0, ge=0.0, description="the same of another incident of the job is kept back for so long, and counted"
    )
    webhook_url: str | None = Field(None, description="JSON is posted there")
    webhook_url_file: Path | None = Field(None, description="file that holds that address, where it is a secret")
    webhook_token_file: Path | None = Field(None, description="file that holds the token which is sent along")
    webhook_secret_file: Path | None = Field(None, description="file that holds the secret which signs the body")
    command: tuple[str, ...] = Field((), description="program and its arguments; it gets JSON on standard input")
    apprise: AppriseSettings = AppriseSettings()
    alertmanager_url: str | None = Field(None, description="Alertmanager: one alert for each open incident")
    alertmanager_token_file: Path | None = Field(None, description="file that holds the token for it")
    resend_seconds: float = Field(60.0, gt=0.0, description="how often Alertmanager is sent what is open")
    heartbeat_url: str | None = Field(None, description="posted to as long as recovery sees what it watches")
    heartbeat_url_file: Path | None = Field(None, description="file that holds that address, where it is a secret")
    heartbeat_seconds: float = Field(60.0, gt=0.0, description="how often")


class Settings(BaseSettings):
    """Everything that can be set; a key that is not here is an error."""

    model_config = SettingsConfigDict(env_prefix="TRANSOM_", env_nested_delimiter="__", extra="forbid", frozen=True)

    state_dir: Path = Field(Path(".transom"), description="what outlives a process on this machine, 0700")
    bus: BusSettings = BusSettings()
    detect: DetectSettings = DetectSettings()
    recover: RecoverSettings = RecoverSettings()
    record: RecordSettings = RecordSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    console: ConsoleSettings = ConsoleSettings()
    notify: NotifySettings = NotifySettings()
    collect: CollectSettings = CollectSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, EnvSettingsSource(settings_cls))

    def make_state_dir(self) -> Path:
        """The state folder, made 0700. Raises SettingsError where it cannot be written."""
        folder = self.state_dir.absolute()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise SettingsError(
                f"the state folder {folder} cannot be written ({error.strerror}); set state_dir to a folder that can"
            ) from error
        return folder

    def socket_folder(self) -> Path:
        """A 0700 folder for Unix sockets whose path is short enough for the kernel."""
        folder = self.make_state_dir() / "run"
        if len(os.fsencode(folder)) > SOCKET_PATH_BYTES_MAX - 40:
            digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
            folder = Path(tempfile.gettempdir()) / f"transom-{os.getuid()}-{digest}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            stat = folder.lstat()
        except OSError as error:
            raise SettingsError(
                f"the socket folder {folder} cannot be made ({error.strerror}); "
                "set state_dir to a folder that can be written"
            ) from error
        if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
            raise SettingsError(
                f"the socket folder {folder} belongs to somebody else or is open to others; "
                "remove it or chmod it to 0700"
            )
        return folder


def ring_token_given() -> str | None:
    """The ring's token, where it is given by the environment and not by a file."""
    return os.environ.get(RING_TOKEN_VARIABLE)


def launcher_token_file_given() -> Path | None:
    """The file with the token of a job's launchers, where it does not lie in the job's folder."""
    given = os.environ.get(LAUNCHER_TOKEN_VARIABLE)
    return Path(given) if given else None


def node_given() -> str | None:
    """This node's name, as whoever started us on it tells: we ourselves, Slurm, or a pod's own description."""
    return next((os.environ[name] for name in NODE_VARIABLES if os.environ.get(name)), None)


def host_given() -> str | None:
    """How other nodes reach this one, where its host's name is not what they know."""
    return next((os.environ[name] for name in HOST_VARIABLES if os.environ.get(name)), None)


def load_settings(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Settings from `file` (default ./transom.toml where it exists), the environment, and `overrides` (flags)."""
    path = file or DEFAULT_FILE
    if file is not None and not path.is_file():
        raise SettingsError(f"there is no settings file {path}; make it or leave --config out")
    tree: dict[str, Any] = {}
    if path.is_file():
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path} is not TOML: {error}") from error
    source = _FileUnderEnvironment(tree, overrides or {})
    try:
        return source.build()
    except ValidationError as error:
        raise SettingsError(_sentence(error, path)) from error


class _FileUnderEnvironment:
    """File below environment below flags; merged by hand, because pydantic's own order puts arguments first."""

    def __init__(self, tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
        self._tree = tree
        self._overrides = overrides

    def build(self) -> Settings:
        environment = EnvSettingsSource(Settings)()
        return Settings.model_validate(_merged(_merged(self._tree, environment), self._overrides))


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _sentence(error: ValidationError, path: Path) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        parent = ".".join(str(part) for part in first["loc"][:-1])
        known = ", ".join(sorted(_section(parent).model_fields))
        return f"unknown setting {key!r} (in {path} or the environment); known here: {known}"
    return f"setting {key!r} (in {path}, the environment or a flag) is {first['input']!r}: {first['msg'].lower()}"


def _section(dotted: str) -> type[BaseModel]:
    model: type[BaseModel] = Settings
    for part in filter(None, dotted.split(".")):
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return model
