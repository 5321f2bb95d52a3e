"""What others say about nodes as a source: gpud by HTTP, NVSentinel's events in a file, Slurm's drain reasons."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from ingest.events import LogLine
from ingest.sources.health_events import NotHealth, from_scontrol, read_health
from ingest.sources.kernel_log import KernelLine
from pipelines.collect.source import SEEN_MAX, Seen, SeenLine, SourceFailed, Whose
from pipelines.collect.tail import Tail

BODY_BYTES_MAX = 8 * 1024 * 1024
SECONDS_MAX = 10.0
REMEMBERED_MAX = 10_000
SAID_AGAIN_SECONDS = 3_600.0

Ask = Callable[[float], Sequence[KernelLine]]  # raises SourceFailed


class _Once:
    """A state that lasts is told once, and again after an hour."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], float] = {}

    def fresh(self, lines: Sequence[KernelLine], now: float) -> list[Seen]:
        seen: list[Seen] = []
        states = {(line.host, line.text) for line in lines}
        self._told = {key: at for key, at in self._told.items() if key in states}  # what is over may come again
        for line in lines[:SEEN_MAX]:
            key = (line.host, line.text)
            if now - self._told.get(key, float("-inf")) >= SAID_AGAIN_SECONDS and len(self._told) < REMEMBERED_MAX:
                self._told[key] = now
                seen.append(_seen(line))
        return seen


class States:
    """Who is asked again and again how a node is: gpud, or Slurm."""

    def __init__(self, name: str, ask: Ask, every_seconds: float, close: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.every_seconds = every_seconds
        self._ask = ask
        self._close = close
        self._once = _Once()

    def read(self, now: float) -> Sequence[Seen]:
        return self._once.fresh(self._ask(now), now)

    def stored(self) -> None:
        """A state is asked for anew."""

    def counters(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self._close()


class EventFile:
    """A file to which somebody writes one JSON event a line; from its end."""

    def __init__(self, path: Path, every_seconds: float) -> None:
        self.name = f"health {path}"
        self.every_seconds = every_seconds
        self._tail = Tail(path, None, from_end=True)
        self._unreadable = 0

    def read(self, now: float) -> Sequence[Seen]:
        seen: list[Seen] = []
        for line in self._tail.read(now, SEEN_MAX):
            try:
                seen += [_seen(one) for one in read_health(line.text.encode(), now)]
            except NotHealth:
                self._unreadable += 1
        return seen

    def stored(self) -> None:
        """It is followed from its end."""

    def counters(self) -> Mapping[str, int]:
        return dict(self._tail.counters()) | ({"unreadable": self._unreadable} if self._unreadable else {})

    def close(self) -> None:
        self._tail.close()


def gpud(url: str, every_seconds: float, token_file: Path | None = None, ca_file: Path | None = None) -> States:
    """gpud's `/v1/states`."""
    client = httpx.Client(timeout=SECONDS_MAX, verify=str(ca_file) if ca_file else True, trust_env=False)

    def ask(now: float) -> Sequence[KernelLine]:
        try:
            headers = {}
            if token_file is not None:
                headers["authorization"] = f"Bearer {token_file.read_text(encoding='utf-8').strip()}"
            answer = client.get(url, headers=headers)
            if answer.status_code != 200 or len(answer.content) > BODY_BYTES_MAX:
                raise SourceFailed(f"{url} answers {answer.status_code}; check the address and the token")
            return read_health(answer.content, now)
        except (httpx.HTTPError, OSError, NotHealth) as error:
            raise SourceFailed(f"{url} cannot be read ({error or type(error).__name__}); it is tried again") from error

    return States(f"health {url}", ask, every_seconds, client.close)


def slurm_drains(node: str, every_seconds: float, command: str = "scontrol") -> States:
    """Why Slurm drains this node, by `scontrol show node`."""

    def ask(now: float) -> Sequence[KernelLine]:
        try:
            done = subprocess.run(
                [command, "show", "node", "-o", node], capture_output=True, text=True, timeout=SECONDS_MAX, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SourceFailed(f"{command} does not answer ({error}); it is tried again") from error
        if done.returncode != 0:
            raise SourceFailed(f"{command} knows no node {node} ({done.stderr.strip()[:200]}); set collect.node")
        line = from_scontrol(done.stdout, now)
        return [] if line is None else [line]

    return States("slurm", ask, every_seconds)


def _seen(line: KernelLine) -> SeenLine:
    return SeenLine(LogLine(at=line.at, stream="kernel", text=line.text), Whose(node=line.host))
