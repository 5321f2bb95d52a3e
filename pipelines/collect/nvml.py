"""GPUs by NVML as a source: asked in a process of its own, for a broken driver never answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import IO

import msgspec

from ingest.clock import Clock
from ingest.events import LogLine
from pipelines.collect.nvml_child import Round
from pipelines.collect.source import Measured, Seen, SeenLine, SourceFailed, Whose

HANG_SECONDS = 30.0
READ_BYTES_MAX = 256 * 1024
HANG_TEXT = "transom: NVML has not answered for {seconds:.0f} s: the driver of this node's GPUs hangs"
LOST_TEXT = "transom: NVML: GPU is lost"

_decoder = msgspec.json.Decoder(Round)


class Nvml:
    """Reads what the child says; a child that is silent for too long is a finding, told once and begun again."""

    name = "nvml"

    def __init__(
        self, clock: Clock, every_seconds: float = 2.0, *, hang_seconds: float = HANG_SECONDS,
        command: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Raises SourceFailed."""
        if command is None and find_spec("pynvml") is None:
            raise SourceFailed("NVML needs an extra that is not installed; run: pip install 'transom[collect]'")
        self.every_seconds = min(every_seconds, 1.0)
        self._clock = clock
        self._hang_seconds = hang_seconds
        asked = [sys.executable, "-P", "-m", "pipelines.collect.nvml_child", str(every_seconds)]
        self._process = subprocess.Popen(
            list(command or asked), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        self._output: IO[bytes] = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._rest = b""
        self._heard_at = clock.monotonic()
        self._hangs = 0
        self._told = False

    def read(self, now: float) -> Sequence[Seen]:
        with suppress(BlockingIOError):
            self._rest += os.read(self._output.fileno(), READ_BYTES_MAX)
        *whole, self._rest = self._rest.split(b"\n")
        seen: list[Seen] = []
        for raw in whole:
            self._heard_at, self._told = self._clock.monotonic(), False
            seen += self._of(_decoder.decode(raw))
        silent = self._clock.monotonic() - self._heard_at
        if silent > self._hang_seconds and not self._told:
            self._told = True
            self._hangs += 1
            text = HANG_TEXT.format(seconds=silent)
            seen.append(SeenLine(LogLine(at=now - silent, stream="kernel", text=text)))
        if not whole and self._process.poll() is not None:
            raise SourceFailed(f"the process that asks NVML ended with code {self._process.returncode}")
        return seen

    def stored(self) -> None:
        """Samples have no place to remember."""

    def counters(self) -> Mapping[str, int]:
        return {"hangs": self._hangs} if self._hangs else {}

    def close(self) -> None:
        self._process.kill()  # one in a driver's call goes when the driver lets it: it is not waited for
        self._output.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)

    def _of(self, found: Round) -> list[Seen]:
        if found.trouble:
            if "lost" in found.trouble.lower():
                return [SeenLine(LogLine(at=found.at, stream="kernel", text=f"{LOST_TEXT} ({found.trouble})"))]
            raise SourceFailed(
                f"NVML says: {found.trouble}; is there a GPU and its driver? Else set collect.nvml = false"
            )
        return [
            Measured(f"gpu:{gpu.index}", found.at, gpu.columns, Whose(pci_address=gpu.pci_address))
            for gpu in found.gpus
        ]
