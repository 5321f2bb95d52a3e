"""Who a rank is: everything that its launcher told it, read from the environment once by transom.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bus_link import BusLink
    from .rank_socket import Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """The stamp of a rank, its launcher's socket, and what it may be asked to do."""

    job: str
    attempt: int
    rank: int
    node: str
    socket: str
    token: str = ""
    pid: int = 0
    local_rank: int = 0
    resume_step: int | None = None  # the step that was loaded; None: from scratch
    allow_inject: bool = False
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    link: Callable[[Hello], BusLink] | None = None  # to the bus itself, where there is no launcher of ours
    scheduler_ids: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
