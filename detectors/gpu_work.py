"""Whether a rank's GPU works or only spins in a collective: busy by its utilization, idle by its power."""

from __future__ import annotations

import msgspec

UTILIZATION_BUSY = 0.9
UTILIZATION_IDLE = 0.5
POWER_SHARE_MAX = 0.3  # of its own median in training: a kernel that waits for its peers draws no more
SAMPLES_MIN = 8  # of power in training, before anything is said
SAMPLES_MAX = 64


class GpuWork(msgspec.Struct):
    """One rank's GPU. NCCL kernels that wait poll memory: 100 % utilization at about 15 % of the usual power."""

    powers: list[float] = []  # watts, in training
    power: float | None = None
    utilization: float | None = None
    seen_at: float | None = None
    spinning_since: float | None = None
    spins: int = 0  # samples in a row

    @property
    def usual_power(self) -> float | None:
        """Median watts in training."""
        return sorted(self.powers)[len(self.powers) // 2] if len(self.powers) >= SAMPLES_MIN else None

    @property
    def idle(self) -> bool:
        return self.utilization is not None and self.utilization < UTILIZATION_IDLE

    def sample(self, at: float, utilization: float | None, power: float | None, *, moving: bool) -> None:
        """One measurement; `moving`: the job was completing steps then."""
        if utilization is None or (self.seen_at is not None and at < self.seen_at):
            return
        self.seen_at, self.utilization, self.power = at, utilization, power
        usual = self.usual_power
        spins = utilization >= UTILIZATION_BUSY and power is not None and usual is not None
        if spins and power is not None and usual is not None and power <= POWER_SHARE_MAX * usual:
            self.spinning_since = at if self.spinning_since is None else self.spinning_since
            self.spins += 1
            return
        self.spinning_since, self.spins = None, 0
        if moving and power is not None:
            self.powers = [*self.powers[-(SAMPLES_MAX - 1) :], power]
