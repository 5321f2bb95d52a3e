"""Where things lie in the state folder; docs/architecture.md draws the same tree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pipelines.errors import StatedError
from pipelines.settings import Settings

NAME_CHARACTERS_MAX = 48
NODE_CHARACTERS_MAX = 128  # clouds give their nodes long names
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{NAME_CHARACTERS_MAX - 1}}}")
NODE_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{NODE_CHARACTERS_MAX - 1}}}")


class NameRefused(StatedError):
    """A job or node name that cannot be a file name, a topic key and a socket name at once."""


def checked_name(kind: str, name: str) -> str:
    """`name`, if it can be part of a path. Raises NameRefused."""
    pattern, characters_max = (NODE_NAME, NODE_CHARACTERS_MAX) if kind == "node" else (NAME, NAME_CHARACTERS_MAX)
    if not pattern.fullmatch(name):
        raise NameRefused(
            f"the {kind} name {name!r} is not usable; take up to {characters_max} letters, digits, '_', '.' and '-'"
        )
    return name


@dataclass(frozen=True, slots=True)
class Places:
    """Paths below one state folder. Sockets may lie elsewhere, because the kernel limits the length of their paths."""

    state: Path
    sockets: Path

    @classmethod
    def of(cls, settings: Settings) -> Places:
        """The places of these settings, with the folders made. Raises SettingsError."""
        return cls(settings.make_state_dir(), settings.socket_folder())

    @property
    def jobs(self) -> Path:
        return self.state / "jobs"

    @property
    def ledger(self) -> Path:
        return self.state / "ledger"

    @property
    def recordings(self) -> Path:
        return self.state / "recordings"

    @property
    def recovery_store(self) -> Path:
        return self.state / "recovery.sqlite"

    @property
    def recovery_lease(self) -> Path:
        return self.state / "recovery.sqlite.lock"

    @property
    def detection(self) -> Path:
        return self.state / "detect"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def api_socket(self) -> Path:
        return self.sockets / "record.sock"

    def job(self, job: str) -> Path:
        return self.jobs / checked_name("job", job)

    def checkpoints(self, job: str) -> Path:
        return self.state / "checkpoints" / checked_name("job", job)

    def node_file(self, job: str, node: str) -> Path:
        return self.job(job) / "nodes" / f"{checked_name('node', node)}.json"

    def socket(self, job: str, node: str, kind: str) -> Path:
        """`kind`: control, telemetry or ckpt. Names are short: the kernel limits the path."""
        return self.sockets / f"{_short(job)}-{_short(node)}-{kind}.sock"


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:7]}-{sha256(name.encode()).hexdigest()[:8]}"
