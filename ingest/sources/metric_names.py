"""What others call a measurement, and what we call it: DCGM exporter and node exporter names, units converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MIB = 1_048_576.0
MHZ = 1_000_000.0
PERCENT = 0.01
MILLIJOULE = 0.001
Kind = Literal["gpu", "link", "host"]


@dataclass(frozen=True, slots=True)
class OurName:
    """Our name, and by how much a value is multiplied to be in our unit. `only`: labels that a sample must have."""

    name: str
    factor: float = 1.0
    kind: Kind = "gpu"
    only: tuple[tuple[str, str], ...] = ()

    def takes(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(label) == value for label, value in self.only)


# DCGM's field ids are described in dcgm_fields.h; the exporter's default set is its etc/default-counters.csv.
DCGM: Mapping[str, OurName] = {
    "DCGM_FI_DEV_SM_CLOCK": OurName("hw.gpu.clock.sm", MHZ),
    "DCGM_FI_DEV_MEM_CLOCK": OurName("hw.gpu.clock.memory", MHZ),
    "DCGM_FI_DEV_GPU_TEMP": OurName("hw.gpu.temperature"),
    "DCGM_FI_DEV_MEMORY_TEMP": OurName("hw.gpu.memory.temperature"),
    "DCGM_FI_DEV_POWER_USAGE": OurName("hw.gpu.power"),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": OurName("hw.gpu.energy", MILLIJOULE),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": OurName("hw.gpu.pcie.replay"),
    "DCGM_FI_DEV_GPU_UTIL": OurName("hw.gpu.utilization", PERCENT),
    "DCGM_FI_DEV_MEM_COPY_UTIL": OurName("hw.gpu.memory.copy_utilization", PERCENT),
    "DCGM_FI_DEV_XID_ERRORS": OurName("hw.gpu.xid.last"),
    "DCGM_FI_DEV_FB_USED": OurName("hw.gpu.memory.usage", MIB),
    "DCGM_FI_DEV_FB_TOTAL": OurName("hw.gpu.memory.limit", MIB),
    "DCGM_FI_DEV_FB_FREE": OurName("hw.gpu.memory.free", MIB),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": OurName("hw.gpu.clock.throttle_reasons"),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": OurName("hw.gpu.clock.throttle_reasons"),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": OurName("hw.gpu.ecc.uncorrected"),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": OurName("hw.gpu.ecc.corrected"),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": OurName("hw.gpu.remapped_rows.pending"),
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": OurName("hw.gpu.nvlink.errors"),
    "DCGM_FI_DEV_PCIE_LINK_GEN": OurName("hw.gpu.pcie.generation"),
    "DCGM_FI_DEV_PCIE_MAX_LINK_GEN": OurName("hw.gpu.pcie.generation_max"),
    "DCGM_FI_DEV_PCIE_LINK_WIDTH": OurName("hw.gpu.pcie.width"),
    "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH": OurName("hw.gpu.pcie.width_max"),
}
# Names of node_exporter 1.x.
NODE: Mapping[str, OurName] = {
    "node_memory_MemTotal_bytes": OurName("system.memory.limit", 1.0, "host"),
    "node_memory_MemAvailable_bytes": OurName("system.memory.available", 1.0, "host"),
    "node_load1": OurName("system.cpu.load_1m", 1.0, "host"),
    "node_filesystem_avail_bytes": OurName("system.disk.free", 1.0, "host", (("mountpoint", "/"),)),
    "node_vmstat_oom_kill": OurName("system.memory.oom_kills", 1.0, "host"),
    "node_pressure_cpu_waiting_seconds_total": OurName("system.cpu.pressure", 1.0, "host"),
    "node_pressure_memory_stalled_seconds_total": OurName("system.memory.pressure", 1.0, "host"),
    "node_pressure_io_stalled_seconds_total": OurName("system.disk.pressure", 1.0, "host"),
    "node_infiniband_link_downed_total": OurName("hw.network.link_downed", 1.0, "link"),
    "node_infiniband_symbol_error_total": OurName("hw.network.symbol_errors", 1.0, "link"),
    "node_infiniband_port_receive_errors_total": OurName("hw.network.receive_errors", 1.0, "link"),
    "node_infiniband_port_data_received_bytes_total": OurName("hw.network.received", 1.0, "link"),
    "node_infiniband_port_data_transmitted_bytes_total": OurName("hw.network.transmitted", 1.0, "link"),
}
MAPPED: Mapping[str, OurName] = {**DCGM, **NODE}


def device_of(known: OurName, labels: Mapping[str, str]) -> str:
    """Our name of the device: `gpu:<index>`, `ib:<device>/<port>`, `host`."""
    if known.kind == "gpu":
        return f"gpu:{labels.get('gpu') or labels.get('GPU') or labels.get('UUID') or '0'}"
    if known.kind == "link":
        port = labels.get("port")
        return f"ib:{labels.get('device', '')}" + (f"/{port}" if port else "")
    return "host"
