"""What the simulated processes, GPUs, link ports and hosts measure, by time: `DeviceMetrics` of a node's ranks.

Names follow OpenTelemetry (`hw.gpu.*`, `process.*`, `system.*`); counters count up from the start of the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipelines.simulation.faults import active
from pipelines.simulation.noise import Floats
from pipelines.simulation.scenario import Scenario

GIB = float(2**30)
HOST_MEMORY_BYTES = 512 * GIB
PROCESS_MEMORY_BYTES = 20 * GIB
PROCESS_BYTES_EACH_SECOND = 1024.0  # what every process grows by; no leak
FULL_SHARE = 0.97  # of the host's memory; beyond it the kernel kills
CLOCK_MHZ, CLOCK_STEP_MHZ = 1980.0, 15.0
POWER_WATTS, IDLE_WATTS, LIMIT_WATTS = 620.0, 110.0, 700.0
CELSIUS, HOT_CELSIUS = 62.0, 87.0
GPU_MEMORY_BYTES = 68 * GIB
SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL = 0x4, 0x8, 0x20, 0x40  # NVML's clocks event reasons
LINK_GBIT = 400.0
LINK_BYTES_EACH_SECOND = 9e9
SYMBOL_ERRORS_EACH_SECOND = 120.0  # of a port whose severity is 1

Sample = tuple[int, str, dict[str, float]]  # the rank (-1: the node's), the device, its values


class Machines:
    """The hardware of a simulated job; `samples` reads one node's."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        dice = np.random.default_rng(np.random.SeedSequence(scenario.seed, spawn_key=(2,)))
        self._celsius: Floats = CELSIUS + dice.normal(0.0, 3.0, scenario.ranks)
        self._watts: Floats = POWER_WATTS + dice.normal(0.0, 12.0, scenario.ranks)
        self._memory: Floats = PROCESS_MEMORY_BYTES * (1.0 + dice.normal(0.0, 0.01, scenario.ranks))
        self._host: Floats = 40 * GIB * (1.0 + dice.uniform(0.0, 0.3, scenario.nodes))
        self._symbol_errors = dice.integers(0, 3, scenario.nodes).astype(float)
        self._dice = dice

    def samples(self, node: int, seconds: float, step: int, busy: bool) -> Iterator[Sample]:
        """What the node shows `seconds` after the start, in step `step`.

        `busy` is False where its ranks spin in a collective that does not end: use is full, power low.
        """
        scenario = self._scenario
        ranks = np.asarray(scenario.ranks_of(node))
        count = len(ranks)
        memory = self._memory[ranks] + PROCESS_BYTES_EACH_SECOND * seconds + self._dice.normal(0.0, 3e6, count)
        free = FULL_SHARE * HOST_MEMORY_BYTES - self._host[node] - self._memory[ranks].sum()
        clock = CLOCK_MHZ - CLOCK_STEP_MHZ * self._dice.integers(0, 3, count)
        celsius = self._celsius[ranks] + self._dice.normal(0.0, 0.7, count)
        watts = np.minimum(LIMIT_WATTS, self._watts[ranks] + self._dice.normal(0.0, 8.0, count))
        if not busy:
            watts = IDLE_WATTS + self._dice.normal(0.0, 4.0, count)
            celsius -= 14.0
        reasons = np.where(watts >= LIMIT_WATTS - 1.0, SW_POWER_CAP, 0).astype(float)
        errors, rate = self._symbol_errors[node], LINK_GBIT
        for fault in scenario.faults:
            if not active(fault, step):
                continue
            mine = [rank - int(ranks[0]) for rank in fault.ranks if scenario.node_of(rank) == node]
            match fault.kind:
                case "memory_growth" if mine:
                    done = (step - fault.onset_step + 1) / fault.length_steps
                    memory[mine] += min(1.0, fault.severity) * free * min(1.0, done) / len(mine)
                case "throttle" if mine:
                    clock[mine] = CLOCK_STEP_MHZ * round(CLOCK_MHZ / (1.0 + fault.severity) / CLOCK_STEP_MHZ)
                    celsius[mine] = HOT_CELSIUS + self._dice.normal(0.0, 0.5, len(mine))
                    watts[mine] /= 1.0 + fault.severity
                    reasons[mine] = SW_THERMAL | (HW_THERMAL | HW_SLOWDOWN if fault.severity >= 0.3 else 0)
                case "slow_link" if fault.node == node:
                    self._symbol_errors[node] += (
                        fault.severity * SYMBOL_ERRORS_EACH_SECOND * max(1.0, scenario.device_seconds)
                        * self._dice.uniform(0.6, 1.4)
                    )  # fmt: skip
                    errors = self._symbol_errors[node] = float(round(self._symbol_errors[node]))
                    rate = LINK_GBIT / 2 if fault.severity >= 0.5 else LINK_GBIT  # it has fallen back to fewer lanes
                case _:
                    pass
        host = self._host[node] + memory.sum()
        for index, rank in enumerate(ranks.tolist()):
            yield rank, "process", {"process.memory.usage": float(round(memory[index]))}
            yield (
                rank,
                f"gpu:{index}",
                {
                    "hw.gpu.clock.sm": float(clock[index]),
                    "hw.gpu.temperature": round(float(celsius[index]), 1),
                    "hw.gpu.power": round(float(watts[index]), 1),
                    "hw.gpu.utilization": 1.0 if not busy else round(0.97 + 0.02 * float(self._dice.random()), 3),
                    "hw.gpu.memory.usage": GPU_MEMORY_BYTES,
                    "hw.gpu.clock.throttle_reasons": float(reasons[index]),
                },
            )
        yield -1, "host", {"system.memory.usage": float(round(host)), "system.memory.limit": HOST_MEMORY_BYTES}
        yield (
            -1,
            "ib:mlx5_0",
            {
                "hw.network.symbol_errors": float(errors),
                "hw.network.link_downed": 0.0,
                "hw.network.rate": rate * 1e9,
                "hw.network.io.transmit": float(round(LINK_BYTES_EACH_SECOND * seconds)),
            },
        )
