"""The process that asks NVML, one JSON line for each round: a driver that hangs holds up this process and no other.

python -m pipelines.collect.nvml_child SECONDS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from ingest.clock import SystemClock

MIB = 1_048_576
LINKS_MAX = 18


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one round found. `trouble`: NVML's own words."""

    at: float
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; a number that the driver does not give is not there."""

    index: int
    uuid: str
    pci_address: str
    columns: dict[str, float]


def look(nvml: Any, at: float) -> Round:
    """One round over all GPUs. `nvml`: the module pynvml, initialised."""
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = nvml.nvmlDeviceGetPciInfo(handle).busId
        gpus.append(
            Gpu(index=index, uuid=_text(nvml.nvmlDeviceGetUUID(handle)), pci_address=_text(pci),
                columns=_columns(nvml, handle))
        )  # fmt: skip
    return Round(at=at, gpus=tuple(gpus))


def _columns(nvml: Any, handle: Any) -> dict[str, float]:
    """In our names and units: 0 to 1, bytes, W, Hz."""
    questions: dict[str, Callable[[], float]] = {
        "hw.gpu.utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
        "hw.gpu.memory.usage": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "hw.gpu.memory.limit": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "hw.gpu.power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1_000.0,
        "hw.gpu.temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "hw.gpu.clock.sm": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
        "hw.gpu.clock.throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        "hw.gpu.ecc.uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "hw.gpu.remapped_rows.pending": lambda: nvml.nvmlDeviceGetRemappedRows(handle)[2],
        "hw.gpu.pcie.replay": lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle),
        "hw.gpu.pcie.width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "hw.gpu.pcie.width_max": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "hw.gpu.pcie.generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "hw.gpu.pcie.generation_max": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "hw.gpu.nvlink.errors": lambda: sum(
            nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT)
            for link in range(LINKS_MAX)
            if nvml.nvmlDeviceGetNvLinkState(handle, link)
        ),
    }
    found: dict[str, float] = {}
    for name, ask in questions.items():
        try:
            found[name] = float(ask())
        except (nvml.NVMLError, AttributeError):  # not on this GPU, or not in this library
            continue
    return found


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def main() -> None:
    """Until the pipe is closed."""
    clock, seconds = SystemClock(), float(sys.argv[1])
    encode, output = msgspec.json.encode, sys.stdout.buffer
    import pynvml

    ready = False
    while True:
        try:
            if not ready:
                pynvml.nvmlInit()
                ready = True
            found = look(pynvml, clock.now())
        except pynvml.NVMLError as error:
            found = Round(at=clock.now(), trouble=str(error))
            ready = False
        try:
            output.write(encode(found) + b"\n")
            output.flush()
        except OSError:  # nobody listens any more
            return
        clock.sleep(seconds)


if __name__ == "__main__":
    main()
