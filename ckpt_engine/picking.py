"""Thousands of items of a list in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What gives the items at `places` of the sequence that it is called with, in the order of `places`."""
    if len(places) > 1:
        return itemgetter(*places)  # which returns one item, not one in a tuple, for one place
    return lambda items: [items[place] for place in places]
