"""Names that say whose metric it is: `rank3/loss` is the loss of rank 3."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .tables import FILE, Cell, Row

RANK = "rank"
KEPT = frozenset((FILE, "step", "wall_time", "_step", "_timestamp", "_runtime", "time", "timestamp"))
_PREFIX = re.compile(r"(?:rank|worker|proc|gpu)[_\- ]?(\d{1,6})[/.](.+)", re.IGNORECASE)


def split_by_rank(cells: Row) -> Iterator[Row]:
    """One row for each rank that the names tell of; the row itself where they tell of none."""
    found = {name: match for name in cells if (match := _PREFIX.fullmatch(name)) is not None}
    if not found:
        yield cells
        return
    rest = {name: cell for name, cell in cells.items() if name not in found}
    by_rank: dict[int, dict[str, Cell]] = {}
    for name, match in found.items():
        by_rank.setdefault(int(match[1]), {})[match[2]] = cells[name]
    for rank, own in sorted(by_rank.items()):
        shared = rest if rank == min(by_rank) else {name: cell for name, cell in rest.items() if name in KEPT}
        yield {**shared, RANK: float(rank), **own}
