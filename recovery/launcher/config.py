"""What a launcher is told when it is started, and the bounds it keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from .proof import JobKey

SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un

ShowOutput = Callable[[bytes], None]  # given whole lines, from a thread of its own; may block


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where a launcher listens for other machines, whose callers have the job's key."""

    host: str  # empty: every address of this machine
    port: int  # 0: any free one
    key: JobKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """One launcher of one node of one job."""

    job: str
    node: str
    slots: int  # ranks it can run at a time
    script: str  # a path, or a module's name where `module` is set
    module: bool = False
    argv: tuple[str, ...] = ()
    preload_torch: bool = True  # where it is installed
    preload: tuple[str, ...] = ()  # modules that the zygote imports besides
    control_socket: Path
    telemetry_socket: Path
    node_file: Path
    host: str = ""  # how other nodes reach this one
    listen: Listen | None = None  # for a controller on another machine
    base_env: Mapping[str, str]  # what ranks inherit: the environment of whoever started the job
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # added for every rank
    pin_cpus: bool = False
    allow_inject: bool = False
    show_output: ShowOutput | int | None = None  # a callable, a file descriptor, or nobody
    grace_seconds: float = 5.0  # between SIGTERM and SIGKILL where no request says otherwise
    python: str = sys.executable
    die_with_parent: bool = False
    limits: LauncherLimits = field(default_factory=lambda: LauncherLimits())

    def __post_init__(self) -> None:
        for path in (self.control_socket, self.telemetry_socket):
            if len(str(path).encode()) > SOCKET_PATH_BYTES_MAX:
                raise ValueError(
                    f"the socket path {path} has more than {SOCKET_PATH_BYTES_MAX} bytes; use a short folder"
                )
        if self.slots < 1:
            raise ValueError(f"a launcher needs at least one slot for a rank, not {self.slots}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherLimits:
    """Intervals and bounds; the defaults are what the detectors are tuned for."""

    heartbeat_seconds: float = 0.2
    look_seconds: float = 0.2  # at /proc/PID/stat
    log_flush_seconds: float = 0.1
    uninterruptible_seconds: float = 5.0  # in state D before it is reported
    hello_wait_seconds: float = 5.0  # rank_started waits this long for the rank's own knowledge
    drain_seconds: float = 1.0  # for pipes that a dead rank's children still hold
    zygote_ready_seconds_max: float = 180.0
    fork_seconds_max: float = 20.0
    zygote_failures_max: int = 3  # in a row, without becoming ready
    publish_drain_seconds: float = 5.0  # at the end
    publish_queue_bytes_max: int = 32 * 1024 * 1024
