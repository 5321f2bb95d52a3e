"""Where the ranks of a standing job stand: Python stacks grouped, and who is waited for by whom.

A rank in a collective waits for the others; a rank that is somewhere else is what they wait for. A rank that does not
answer cannot run Python. (Grouping by stack and taking the odd group: ByteRobust, arXiv 2509.16293, section 5.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

StandKind = Literal["collective", "data", "elsewhere", "silent"]

FRAMES_MAX = 24  # kept of one stack, the innermost
STACK_BYTES_MAX = 64 * 1024  # read of one rank's answer
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+(?: \[.*\])? \(most recent call first\):")
_FRAME = re.compile(r'^\s+File "(.*)", line (?:\d+|\?\?\?) in (.*)$')
_THREAD_ROOTS = frozenset(("_bootstrap", "_bootstrap_inner"))
_LAUNCHED_BY = frozenset(("zygote.py", "runpy.py", "<frozen runpy>"))
_WAITING_LIBRARY = frozenset(
    ("selectors.py", "connection.py", "queues.py", "queue.py", "threading.py", "socket.py", "subprocess.py",
     "popen_fork.py", "c10d_logger.py", "_contextlib.py", "contextlib.py")
)  # fmt: skip
_COLLECTIVE_FOLDERS = ("torch/distributed/", "deepspeed/comm/", "megatron/core/", "torch/nn/parallel/distributed.py")
_COLLECTIVES = frozenset(
    ("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object",
     "all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "broadcast_object_list", "barrier",
     "monitored_barrier", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv",
     "reduce", "gather", "gather_object", "scatter", "scatter_object_list", "_sync_buffers", "_sync_module_states",
     "_distributed_broadcast_coalesced", "_store_based_barrier", "wait_tensor")
)  # fmt: skip
_BACKWARD = "graph.py:_engine_run_backward"
_DATA_FUNCTIONS = frozenset(("_try_get_data", "_next_data", "_get_data", "_next_index"))


class Stand(NamedTuple):
    """Where one rank stands. `place` is `file:function`, `frames` the main thread's, innermost first."""

    rank: int
    node: str
    kind: StandKind
    place: str
    frames: tuple[str, ...] = ()


class Group(NamedTuple):
    """Ranks that stand in the same place, in the order of their numbers."""

    kind: StandKind
    place: str
    frames: tuple[str, ...]
    ranks: tuple[int, ...]


class Pointing(msgspec.Struct, frozen=True, kw_only=True):
    """Whom the evidence points at, how surely, and why in words that complete `rank 3 …`. No ranks: nobody."""

    ranks: tuple[int, ...] = ()
    confidence: float = 0.0
    reason: str = ""


def main_frames(stacks: str) -> tuple[tuple[str, str], ...]:
    """(path, function) of the main thread of one faulthandler dump, innermost first; empty where there is none."""
    threads: list[list[tuple[str, str]]] = []
    current: list[tuple[str, str]] | None = None
    for line in stacks[:STACK_BYTES_MAX].splitlines():
        if _THREAD.match(line):
            current = []
            threads.append(current)
            continue
        frame = _FRAME.match(line)
        if frame is None:
            current = current if line.startswith("  ") else None
        elif current is not None:
            current.append((frame.group(1), frame.group(2)))
    ours = [frames for frames in threads if frames and frames[-1][1] not in _THREAD_ROOTS]
    return tuple(ours[-1]) if ours else ()  # faulthandler lists the newest thread first, the main one last


def stand_of(rank: int, node: str, stacks: str, *, in_collective: bool, state: str = "", wchan: str = "") -> Stand:
    """Where one rank stands. `in_collective`: by its own telemetry its gradients wait for those of the others, which
    no Python frame shows while the reduction belongs to the backward pass."""
    raw = main_frames(stacks)
    frames = tuple(f"{_base(path)}:{function}" for path, function in raw if _base(path) not in _LAUNCHED_BY)
    frames = frames[:FRAMES_MAX]
    if not raw:
        asleep = f" in {wchan}" if wchan not in ("", "0") else ""
        return Stand(rank, node, "silent", f"process state {state or '?'}{asleep}", ())
    for path, function in raw:
        if function in _COLLECTIVES and any(folder in path for folder in _COLLECTIVE_FOLDERS):
            return Stand(rank, node, "collective", function, frames)
    if in_collective and _BACKWARD in frames:
        return Stand(rank, node, "collective", "the all-reduce of the gradients", frames)
    own = [frame for frame in frames if frame.split(":")[0] not in _WAITING_LIBRARY]
    place = (own or list(frames) or [""])[0]
    data = any(f"dataloader.py:{function}" in frames for function in _DATA_FUNCTIONS)
    return Stand(rank, node, "data" if data else "elsewhere", place or "the interpreter's start or end", frames)


def groups_of(stands: Sequence[Stand]) -> list[Group]:
    """The ranks by where they stand, the largest group first. A collective is one place wherever it is called from;
    for everything else the whole stack counts."""
    found: dict[tuple[str, ...], list[Stand]] = {}
    for stand in sorted(stands):
        key = (stand.kind, stand.place) if stand.kind in ("collective", "silent") else (stand.kind, *stand.frames)
        if stand.kind == "silent":
            key = ("silent",)
        found.setdefault(key, []).append(stand)
    groups = [
        Group(members[0].kind, members[0].place, members[0].frames, tuple(stand.rank for stand in members))
        for members in found.values()
    ]
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def odd_of(groups: Sequence[Group]) -> Pointing:
    """Whom the groups point at: who does not answer, then who is not in the collective that the others wait in, then
    the one small group that stands apart. Never the larger side."""
    total = sum(len(group.ranks) for group in groups)
    silent = next((group for group in groups if group.kind == "silent"), None)
    answered = [group for group in groups if group.kind != "silent"]
    if silent is not None and answered and 2 * len(silent.ranks) <= total:
        there = total - len(silent.ranks)
        sure = 0.9 if 2 * len(silent.ranks) < total else 0.6
        reason = f"{_does(silent)} not answer when asked for {_its(silent)} stack ({silent.place}), {there} others do"
        return Pointing(ranks=silent.ranks, confidence=sure, reason=reason)
    waiting = [group for group in answered if group.kind == "collective"]
    away = [group for group in answered if group.kind != "collective"]
    ranks = tuple(sorted(rank for group in away for rank in group.ranks))
    if waiting and ranks and 2 * len(ranks) <= total:
        first = away[0]
        sure = 0.7 if 2 * len(ranks) < total else 0.6
        inside = sum(len(group.ranks) for group in waiting)
        reason = f"stand{_s(ranks)} in {first.place}, {_others(inside)} in {waiting[0].place}"
        return Pointing(ranks=ranks, confidence=sure, reason=reason)
    if len(answered) == 2 and not (waiting and away):
        large, small = answered
        if 2 * len(small.ranks) < total:
            reason = f"stand{_s(small.ranks)} in {small.place}, {_others(len(large.ranks))} in {large.place}"
            return Pointing(ranks=small.ranks, confidence=0.6, reason=reason)
    return Pointing()


def behind_of(numbers: Mapping[int, int], what: str = "collective") -> Pointing:
    """Whom the sequence numbers of the ranks' collectives (by rank) point at: those who are behind the others,
    unless they are the larger side: then it is the few ahead, or somebody else, who is odd (NVIDIA/nccl issue 1911)."""
    if len(numbers) < 2:
        return Pointing()
    lowest, furthest = min(numbers.values()), max(numbers.values())
    last = tuple(sorted(rank for rank, number in numbers.items() if number == lowest))
    if lowest == furthest:
        return Pointing()
    if 2 * len(last) > len(numbers):
        ahead = len(numbers) - len(last)
        return Pointing(
            reason=f"{len(last)} ranks stopped at {what} {lowest}, {ahead} {'are' if ahead > 1 else 'is'} ahead of"
            " them: the larger side holds up nobody, so no single rank stands out"
        )
    others = _others(len(numbers) - len(last))
    reason = f"stopped at {what} {lowest}, {others} {'are' if len(numbers) - len(last) > 1 else 'is'} at {furthest}"
    return Pointing(ranks=last, confidence=0.8, reason=reason)


def ranks_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2 and 5`: runs of numbers together."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    shown = ", ".join(words[:8]) + (f" and {len(words) - 8} more runs" if len(words) > 8 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"


def _base(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def _others(count: int) -> str:
    return f"{count} others" if count != 1 else "1 other"


def _s(ranks: Sequence[int]) -> str:
    return "s" if len(ranks) == 1 else ""


def _does(group: Group) -> str:
    return "does" if len(group.ranks) == 1 else "do"


def _its(group: Group) -> str:
    return "its" if len(group.ranks) == 1 else "their"
