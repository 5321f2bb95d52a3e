"""Pre-flight checks between two attempts: which node is bad, found in few rounds, and nobody named for what all have.

    each node alone (GPU memory, matmul, disk), a slow one once more ─► what is left together (network, all-reduce):
    groups ─► where one fails, pairs ─► whose pair fails, with a node that is proved good

A fault of two nodes that only fail with each other is in neither; one that more than half of the nodes show is the
cluster's, the job's or a shared file system's: it is told, and nobody is blamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from msgspec.structs import replace

from .action import CheckResult
from .launcher.protocol import CheckName

ALONE: tuple[CheckName, ...] = ("gpu_memory", "matmul", "disk")
TOGETHER: tuple[CheckName, ...] = ("network", "all_reduce")
PAIRINGS_MAX = 3
GROUP_NODES_MAX = 32  # all of a group connect to each other
NODES_AT_ONCE_MAX = 1024
SLOW_SECONDS_MIN = 0.002  # less is no measure
KEPT_MAX = 200  # results in an audit row: what failed first

Probe = Callable[[Sequence[CheckName], Sequence[Sequence[str]]], list[CheckResult]]


class OutOfRounds(Exception):
    """The time for checks is used up."""


class Rounds:
    """A probe that may be asked so many times: each round takes a bounded time, so all of them do."""

    def __init__(self, probe: Probe, rounds_max: int) -> None:
        self._probe = probe
        self._left = rounds_max

    def __call__(self, checks: Sequence[CheckName], groups: Sequence[Sequence[str]]) -> list[CheckResult]:
        """Raises OutOfRounds."""
        if self._left <= 0:
            raise OutOfRounds
        self._left -= 1
        return self._probe(checks, groups)


def check_nodes(probe: Probe, nodes: Sequence[str], *, slow_ratio: float) -> tuple[list[CheckResult], bool]:
    """One result for each node and check, and whether all could be asked. Never raises OutOfRounds."""
    results: list[CheckResult] = []
    try:
        for start in range(0, len(nodes), NODES_AT_ONCE_MAX):
            batch = nodes[start : start + NODES_AT_ONCE_MAX]
            alone = slow_too(probe, probe(ALONE, [[node] for node in batch]), slow_ratio)
            results += alone
            failed = {one.node for one in alone if one.outcome == "failed"}
            for check in TOGETHER:
                left = [node for node in batch if node not in failed]
                found = together(probe, check, left)
                results += found
                failed |= blamed(found)
    except OutOfRounds:
        return results, False
    return results, True


def slow_too(probe: Probe, results: Sequence[CheckResult], slow_ratio: float) -> list[CheckResult]:
    """The same, where a node whose matmul takes far longer than the others', twice, has failed it."""
    slow = _slow(results, slow_ratio)
    if not slow:
        return list(results)
    nodes = [one.node for one in results if one.check == "matmul" and one.outcome == "passed"]
    again = {one.node: one for one in probe(("matmul",), [[node] for node in nodes])}
    still = _slow([*again.values()], slow_ratio) & slow
    told = []
    for one in results:
        if one.check != "matmul" or one.node not in again:
            told.append(one)
        elif one.node not in still:
            told.append(again[one.node])
        else:
            usual = median(other.seconds for node, other in again.items() if node != one.node)
            took = again[one.node].seconds
            words = f"{took * 1000:.0f} ms where the others take {usual * 1000:.0f} ms"
            told.append(replace(one, outcome="failed", seconds=took, text=f"{words}; {one.text}".strip("; ")))
    return told


def _slow(results: Iterable[CheckResult], slow_ratio: float) -> set[str]:
    """Nodes whose multiplication takes `slow_ratio` times the median of the others."""
    took = {one.node: one.seconds for one in results if one.check == "matmul" and one.outcome == "passed"}
    if len(took) < 2:
        return set()
    return {
        node
        for node, seconds in took.items()
        if seconds > SLOW_SECONDS_MIN
        and seconds > slow_ratio * median(other for name, other in took.items() if name != node)
    }


def together(probe: Probe, check: CheckName, nodes: Sequence[str]) -> list[CheckResult]:
    """One result for each node, of the group by which it was told apart."""
    if len(nodes) < 2:
        return []
    known: dict[str, CheckResult] = {}
    suspects = _ask(probe, check, _split(nodes, GROUP_NODES_MAX), known)
    if not suspects or any(one.outcome == "skipped" for one in known.values()):
        return [known[node] for node in nodes if node in known]
    good = [node for node in nodes if node not in suspects]
    for turn in range(PAIRINGS_MAX):
        if len(suspects) <= 2 or (good and turn):
            break
        turned = [*suspects[turn:], *suspects[:turn]]  # of three, one has no partner each time
        pairs = _split(turned, 2)
        _ask(probe, check, [pair for pair in pairs if len(pair) == 2], known)
        good += [node for node in suspects if known[node].outcome == "passed"]
        suspects = [node for node in suspects if node not in good]
    while suspects and good:
        now, suspects = suspects[: len(good)], suspects[len(good) :]
        _ask(probe, check, [[fine, node] for fine, node in zip(good, now, strict=False)], known, only=set(now))
    return [known[node] for node in nodes]


def _ask(
    probe: Probe,
    check: CheckName,
    groups: Sequence[Sequence[str]],
    known: dict[str, CheckResult],
    only: set[str] | None = None,
) -> list[str]:
    """Nodes of groups in which anybody failed; what is known of each (or of `only` these) is as its group says."""
    if not groups:
        return []
    results = {one.node: one for one in probe((check,), groups)}
    suspects = []
    for group in groups:
        bad = [results[node] for node in group if results[node].outcome == "failed"]
        for node in group:
            if only is None or node in only:
                known[node] = results[node] if results[node].outcome == "failed" or not bad else _beside(node, bad[0])
        suspects += list(group) if bad else []
    return suspects


def _beside(node: str, bad: CheckResult) -> CheckResult:
    """A node that did its part in a group that failed: it counts as failed until it is told apart."""
    return replace(bad, node=node, text=f"together with {bad.node}: {bad.text}")


def _split(nodes: Sequence[str], size: int) -> list[list[str]]:
    """Groups of at most `size`, and no node left alone where there are others."""
    groups = [list(nodes[start : start + size]) for start in range(0, len(nodes), size)]
    if size > 2 and len(groups) > 1 and len(groups[-1]) == 1:
        groups[-1].insert(0, groups[-2].pop())
    return groups


def blamed(results: Iterable[CheckResult]) -> set[str]:
    """Nodes that failed a check which at least half of the nodes passed."""
    told = [one for one in results if one.outcome != "skipped"]
    found: set[str] = set()
    for check in {one.check for one in told}:
        of_check = [one for one in told if one.check == check]
        failed = {one.node for one in of_check if one.outcome == "failed"}
        if 2 * len(failed) <= len(of_check):
            found |= failed
    return found


def words_of(results: Sequence[CheckResult], nodes: set[str], *, complete: bool) -> str:
    """What came of all checks, in a sentence."""
    failed = [one for one in results if one.outcome == "failed"]
    passed = sum(one.outcome == "passed" for one in results)
    told = [f"{one.node} failed {one.check}: {one.text or 'no reason given'}" for one in failed if one.node in nodes]
    common = sorted({one.check for one in failed if one.node not in nodes})
    told += [f"{', '.join(common)} failed on too many nodes for any of them to be blamed"] if common else []
    told += [] if complete else ["the time for checks is used up"]
    return "; ".join([f"pre-flight: {passed} checks passed, {len(failed)} failed", *told[:KEPT_MAX]])


def kept(results: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """What an audit row keeps of many."""
    order = {"failed": 0, "skipped": 1, "passed": 2}
    return tuple(sorted(results, key=lambda one: order[one.outcome])[:KEPT_MAX])
