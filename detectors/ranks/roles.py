"""Who is compared with whom: ranks that do the same work, as the job says or as their own normal times show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from detectors.steps import Ints

Reals: TypeAlias = npt.NDArray[np.floating]

GAP_MIN = 0.04  # of the time itself: two kinds of work differ by more than ranks of one kind do
GAP_ERRORS = 4.0  # and by more than what is known of them
GAP_SPREADS = 4.0  # and by more than this many times what ranks within a group differ
GROUP_MIN = 4
GROUPS_MAX = 128  # a group is at least this part of the job: more pipeline stages nobody has
NODES_MIN = 3


def given_roles(roles: Sequence[str]) -> Ints:
    """A group number for each rank; equal words are equal work. Numbers follow the words' order."""
    number = {role: index for index, role in enumerate(sorted(set(roles)))}
    return np.array([number[role] for role in roles], dtype=np.int64)


def learned_roles(compute: Reals, data: Reals, error: Reals, nodes: Sequence[str]) -> Ints:
    """Groups by gaps in each rank's own normal compute time, and within them by gaps in its normal data time.

    One value for each rank: the time over the job's median, the data wait as a share of the step, and how far the
    first may be from the truth. NaN goes with the largest group. A group has at least four ranks and a
    hundred-and-twenty-eighth of all; one slow node alone is no role.
    """
    known = np.isfinite(compute) & (compute > 0.0)
    size = max(GROUP_MIN, -(-len(compute) // GROUPS_MAX))
    groups = np.zeros(len(compute), dtype=np.int64)
    if int(known.sum()) < 2 * size:
        return groups
    gap = max(GAP_MIN, GAP_ERRORS * float(np.nanmedian(error)))
    by_compute = _split(np.log(compute[known]), size, gap)
    found = by_compute * (len(compute) + 1)
    shares = np.where(np.isfinite(data[known]), data[known], 0.0)
    for group in np.unique(by_compute):
        members = np.flatnonzero(by_compute == group)
        found[members] += _split(shares[members], size, gap)
    _, numbers = np.unique(found, return_inverse=True)
    groups[known] = numbers
    groups[~known] = int(np.argmax(np.bincount(groups[known])))
    return _without_odd_nodes(groups, nodes)


def _split(values: Reals, size: int, gap: float) -> Ints:
    """Cut the sorted values at gaps; no part smaller than `size`, no gap that ranks of one kind might show too."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    gaps = np.diff(ordered)
    cuts = [0, len(values)]
    for place in np.argsort(-gaps, kind="stable"):
        cut = int(place) + 1
        if gaps[place] < gap:
            break
        before, after = max(c for c in cuts if c <= cut), min(c for c in cuts if c >= cut)
        if cut - before >= size and after - cut >= size:
            cuts.append(cut)
    cuts = sorted(cuts)
    while len(cuts) > 2:  # the least clear cut goes first, its neighbours are then judged anew
        clear = [
            gaps[cut - 1] / max(_spread(ordered[before:cut]), _spread(ordered[cut:after]), 1e-9)
            for before, cut, after in zip(cuts, cuts[1:], cuts[2:], strict=False)
        ]
        weakest = int(np.argmin(clear))
        if clear[weakest] >= GAP_SPREADS:
            break
        del cuts[weakest + 1]
    groups = np.zeros(len(values), dtype=np.int64)
    for cut in cuts[1:-1]:
        groups[order[cut:]] += 1
    return groups


def _spread(values: Reals) -> float:
    """The middle half's share of the gaps: how far a rank is from the next of its kind, times the group's root."""
    if len(values) < 4:
        return 0.0
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / math.sqrt(len(values))


def _without_odd_nodes(groups: Ints, nodes: Sequence[str]) -> Ints:
    """A group that lives on one node while another spans three or more is that node being slow, not a role."""
    homes = {int(one): {nodes[at] for at in np.flatnonzero(groups == one).tolist()} for one in np.unique(groups)}
    largest = Counter(int(group) for group in groups).most_common(1)[0][0]
    if max(len(places) for places in homes.values()) < NODES_MIN:
        return groups
    merged = np.array([largest if len(homes[int(group)]) == 1 else group for group in groups], dtype=np.int64)
    _, numbers = np.unique(merged, return_inverse=True)
    return np.asarray(numbers, dtype=np.int64)
