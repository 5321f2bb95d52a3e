"""This host's load, memory, disk and network counters, by psutil."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.collect.source import Measured, Seen, SourceFailed


class Host:
    """One sample of the host at each read."""

    name = "host"

    def __init__(self, disk: Path, every_seconds: float = 2.0) -> None:
        """`disk`: a folder on the disk whose room is told. Raises SourceFailed without the extra `collect`."""
        try:
            import psutil
        except ImportError as error:
            raise SourceFailed(
                "host samples need an extra that is not installed; run: pip install 'transom[collect]'"
            ) from error
        self.every_seconds = every_seconds
        self._psutil = psutil
        self._disk = disk
        psutil.cpu_percent(None)

    def read(self, now: float) -> Sequence[Seen]:
        psutil = self._psutil
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        network = psutil.net_io_counters()
        columns = {
            "system.cpu.utilization": psutil.cpu_percent(None) / 100.0,
            "system.cpu.load_1m": psutil.getloadavg()[0],
            "system.memory.usage": float(memory.total - memory.available),
            "system.memory.limit": float(memory.total),
            "system.swap.usage": float(swap.used),
        }
        try:
            columns["system.disk.free"] = float(psutil.disk_usage(str(self._disk)).free)
        except OSError as error:
            raise SourceFailed(f"the room on the disk of {self._disk} cannot be read ({error.strerror})") from error
        if network is not None:
            columns["system.network.errors"] = float(network.errin + network.errout)
            columns["system.network.dropped"] = float(network.dropin + network.dropout)
        return [Measured("host", now, columns)]

    def stored(self) -> None:
        """A sample has no place to remember."""

    def counters(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        """Nothing is open."""
