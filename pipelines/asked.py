"""What is asked of a figure, and whether a measured value meets it: the benches' tables are lists of these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "≤": operator.le, "<": operator.lt, "≥": operator.ge, "=": operator.eq,
}  # fmt: skip
REPORTED = "–"  # a relation that asks for nothing: the figure is measured and told


@dataclass(frozen=True, slots=True)
class Asked:
    """One figure: what it is, and what it has to be. `group` is what measures it."""

    name: str
    what: str
    relation: str
    bound: float
    group: str

    def met_by(self, value: float) -> bool:
        return self.relation == REPORTED or RELATIONS[self.relation](value, self.bound)

    @property
    def text(self) -> str:
        return "reported" if self.relation == REPORTED else f"{self.relation} {self.bound:,g}"


def chosen_groups(table: Sequence[Asked], only: Sequence[str], command: str) -> list[str]:
    """The groups that measure these figures or are named so, all where nothing is named. Raises ValueError.

    A figure may be named without what stands before its first dot.
    """
    groups = list(dict.fromkeys(asked.group for asked in table))
    if not only:
        return groups
    by_name = {asked.name.partition(".")[2]: asked.group for asked in table}
    by_name |= {asked.name: asked.group for asked in table} | {group: group for group in groups}
    unknown = [name for name in only if name not in by_name]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} is not measured by `{command}`; choose of {', '.join(groups)} "
            f"or of the figures {', '.join(asked.name for asked in table)}"
        )
    wanted = {by_name[name] for name in only}
    return [group for group in groups if group in wanted]
