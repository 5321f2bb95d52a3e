"""One thing that `transom doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Grade = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`missing` makes the command fail; `note` only costs something. `mend` is what to type or set."""

    name: str
    grade: Grade
    text: str
    mend: str = ""
