"""Which NVIDIA GPU a rank uses, as far as /proc tells without any library; torch knows it exactly later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NVIDIA_GPUS_FOLDER = "/proc/driver/nvidia/gpus"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this host, by its two names."""

    uuid: str | None
    pci_address: str


def nvidia_gpus(folder: str = NVIDIA_GPUS_FOLDER) -> tuple[Gpu, ...]:
    """The host's GPUs in PCI order; none where there is no driver."""
    try:
        entries = sorted(Path(folder).iterdir())
    except OSError:
        return ()
    return tuple(Gpu(_uuid(entry / "information"), entry.name) for entry in entries)


def gpu_of_rank(local_rank: int, visible_devices: str | None, gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The GPU that this rank will use, or None where it cannot be known for certain.

    Numbers in CUDA_VISIBLE_DEVICES follow CUDA's own order, which need not be the PCI order: only UUIDs, and
    hosts with a single GPU, are certain.
    """
    if not gpus or visible_devices == "":
        return None
    if visible_devices is None or len(gpus) == 1:
        return gpus[0] if len(gpus) == 1 else None
    names = [name.strip() for name in visible_devices.split(",")]
    index = local_rank if local_rank < len(names) else 0
    matching = [
        gpu for gpu in gpus if gpu.uuid and names[index].startswith("GPU-") and gpu.uuid.startswith(names[index])
    ]
    return matching[0] if len(matching) == 1 else None


def _uuid(information: Path) -> str | None:
    try:
        text = information.read_text(errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "GPU UUID" and value.strip().startswith("GPU-"):
            return value.strip()
    return None
