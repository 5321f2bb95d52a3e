"""Pre-flight checks through launchers: several nodes at once, those of a group told where to meet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from recovery.action import CheckResult
from recovery.allocation import LauncherAddress
from recovery.backend import BackendError, Conflict
from recovery.launcher.protocol import CheckName, CheckOrder, CheckOutcome, CheckVerdict, Observe, Preflight

from .asking import Reach
from .view import Answer, Written

ANSWER_SECONDS = 2.0  # on top of what a launcher was told to take
OBSERVE_SECONDS_MAX = 2.0
NODES_AT_ONCE_MAX = 1024  # all of a group have to be asked at the same time

FAILED: CheckVerdict = "failed"
SKIPPED: CheckVerdict = "skipped"

Groups = Sequence[Sequence[str]]


def probe(
    reach: Reach, written: Written, attempt: int, checks: Sequence[CheckName], groups: Groups, seconds: float
) -> list[CheckResult]:
    """One result for each node and check. See `recovery.backend.ProbingBackend`."""
    known = {launcher.node: launcher for launcher in reach.addresses()}
    meetings = _meetings(reach, written, known, groups)
    asked: dict[str, Preflight] = {}
    mates: dict[str, list[str]] = {}
    results: list[CheckResult] = []
    for group, meeting in zip(groups, meetings, strict=True):
        for rank, node in enumerate(group):
            if isinstance(meeting, str) or node not in known:
                why = meeting if isinstance(meeting, str) else f"{node} has no launcher any more"
                results += [CheckResult(node=node, check=check, outcome="failed", text=why) for check in checks]
                continue
            host, port = meeting
            orders = [CheckOrder(check=one, rank=rank, world=len(group), host=host, port=port) for one in checks]
            asked[node] = Preflight(attempt=attempt, checks=tuple(orders), seconds=seconds)
            mates[node] = [mate for mate in group if mate != node]
    if not asked:
        return results
    with ThreadPoolExecutor(min(NODES_AT_ONCE_MAX, len(asked))) as pool:
        out = {pool.submit(reach.ask, known[node], asked[node], seconds + ANSWER_SECONDS): node for node in asked}
        released: set[str] = set()
        for done in as_completed(out):
            node, told = out[done], _results(done.result(), checks)
            results += told
            released.add(node)
            waiting = [mate for mate in mates[node] if mate not in released]
            if waiting and any(one.outcome == "failed" for one in told):
                released |= set(waiting)
                release = Preflight(attempt=attempt, checks=(), seconds=seconds)
                for mate in waiting:  # they would wait for this node until the end of their time
                    reach.ask(known[mate], release, OBSERVE_SECONDS_MAX)
    return results


def _results(answer: Answer, checks: Sequence[CheckName]) -> list[CheckResult]:
    """What a node says; a launcher that took the order and says nothing has failed every check, one that does not know
    checks has done none. Raises Conflict."""
    reply = answer.reply
    if reply is not None and reply.refusal == "conflict":
        raise Conflict(reply.text)
    if reply is None or reply.refusal:
        why, outcome = (answer.trouble, FAILED) if reply is None else (reply.text, SKIPPED)
        return [CheckResult(node=answer.node, check=check, outcome=outcome, text=why) for check in checks]
    told = {one.check: one for one in reply.checks}
    silent = {check: CheckOutcome(check=check, outcome="failed", text="it said nothing") for check in checks}
    return [
        CheckResult(node=answer.node, check=one.check, outcome=one.outcome, seconds=one.seconds, text=one.text)
        for one in (silent | told).values()
    ]


def _meetings(
    reach: Reach, written: Written, known: dict[str, LauncherAddress], groups: Groups
) -> list[tuple[str, int] | str]:
    """Host and port where each group meets, at its first node; why there is none. A node alone needs none."""

    def meeting(group: Sequence[str]) -> tuple[str, int] | str:
        if len(group) < 2:
            return "", 0
        launcher = known.get(group[0])
        if launcher is None:
            return f"{group[0]} has no launcher any more"
        answer = reach.ask(launcher, Observe(), OBSERVE_SECONDS_MAX)
        if answer.reply is None:
            return answer.trouble
        try:
            host, port = reach.rendezvous(launcher, answer.reply)
        except BackendError as error:
            return str(error)
        return host or written.spec.master_addr, port

    if not groups:
        return []
    with ThreadPoolExecutor(min(NODES_AT_ONCE_MAX, len(groups))) as pool:
        return list(pool.map(meeting, groups))
