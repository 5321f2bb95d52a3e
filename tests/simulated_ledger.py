"""SimulatedLedger: the demo's story as a ledger would tell it, computed from one seed.

Not the record service: it exists so that the console's pages can be tested and looked at without a job.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import msgspec

from ingest.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointEvent,
    LogLine,
    Logs,
    Metrics,
    NodeHeartbeat,
    NonFinite,
    RankPlace,
)
from pipelines.ledger.shapes import (
    CommandRequest,
    Health,
    IncidentPage,
    IncidentStory,
    IncidentView,
    JobView,
    LedgerUnavailable,
    LogRow,
    NotInLedger,
    Row,
    RowPage,
    Series,
)
from tests.simulated_faults import (
    ADVICE,
    CULPRIT,
    FAULTS,
    JOB,
    LINES,
    METRIC_NAMES,
    OUTCOME,
    RULE,
    SEVERITY,
    STEP_SECONDS,
    STRAGGLER_SECONDS,
    SUMMARY,
    TIMING,
    VERB,
    WORLD,
)

__all__ = ["FAULTS", "JOB", "SimulatedLedger"]
STACKS = (  # of the hang: the sentence, then where each group stands
    (3, 1.0, "rank 3 does not answer when asked for its stack (process state T in do_signal_stop), 3 others do"),
    (None, 3.0, "ranks 0-2 in all_reduce\ndistributed_c10d.py:all_reduce\nc10d_logger.py:wrapper\ntrain.py:main"),
    (3, 1.0, "rank 3 without an answer: process state T in do_signal_stop"),
)


class SimulatedLedger:
    """The whole story at once; `faults` cuts it short so that the job still runs."""

    def __init__(self, now: float, *, faults: int = len(FAULTS), seed: int = 7, tail_seconds: float = 12.0) -> None:
        self._random = random.Random(seed)
        self.commands: list[dict[str, Any]] = []
        self.away = False
        self.faults = FAULTS[:faults]
        last = self.faults[-1] if self.faults else ""
        end = sum(TIMING[last]) + tail_seconds if last else 60.0
        self.now = now
        self.begin = now - end
        self.stopped = last == "user_error"
        self.attempts: list[dict[str, Any]] = []
        self.samples: list[tuple[int, int, int, float]] = []  # attempt, rank, step, at
        self._run(end)
        self._stories = {story["incident"]["incident_id"]: story for story in map(self._story, self.faults)}

    # ---- the run itself

    def _run(self, end: float) -> None:
        restarts = [fault for fault in self.faults if TIMING[fault][2] > 0]
        start, step, at = 0, 1, 2.0
        for attempt, fault in enumerate([*restarts, None], start=1):
            onset = TIMING[fault][0] if fault else TIMING["user_error"][0] if self.stopped else end
            nodes = ["node-0", "node-2" if "gpu_lost" in restarts[: attempt - 1] else "node-1"]
            self.attempts.append(
                {"attempt": attempt, "at": self.begin + at - 0.6, "resume": start or None, "nodes": nodes}
            )
            while at < onset:
                slow = 1.62 if "straggler" in self.faults and 40.0 <= at < 40.0 + STRAGGLER_SECONDS else 1.0
                at += STEP_SECONDS * slow * (1.0 + self._random.gauss(0.0, 0.025))
                for rank in range(WORLD):
                    self.samples.append((attempt, rank, step, self.begin + at + 0.002 * rank))
                step += 1
            if fault is None:
                break
            start = (step - 1) // 10 * 10 - (10 if fault == "nan" else 0)
            step, at = start + 1, sum(TIMING[fault]) - 0.25
        self.last_step = step - 1

    def _attempt_at(self, fault: str) -> int:
        return 1 + sum(1 for before in self.faults[: self.faults.index(fault)] if TIMING[before][2] > 0)

    def value(self, metric: str, rank: int, step: int, at: float) -> float | None:
        """One sample, the same for the same question."""
        dice = random.Random(f"{metric}/{rank}/{step}")
        offset = at - self.begin
        slow = 1.62 if rank == 1 and "straggler" in self.faults and 40.0 <= offset < 40.0 + STRAGGLER_SECONDS else 1.0
        own = 0.148 * slow * (1.0 + 0.012 * rank) * (1.0 + dice.gauss(0.0, 0.02))
        if metric == "train.loss":
            if "nan" in self.faults and rank == 0 and TIMING["nan"][0] - 0.05 < offset <= TIMING["nan"][0] + 2.0:
                return None
            return 3.1 * math.exp(-step / 700.0) + 1.4 + dice.gauss(0.0, 0.03)
        if metric == "train.step.duration":
            peak = 1.62 if "straggler" in self.faults and 40.0 <= offset < 40.0 + STRAGGLER_SECONDS else 1.0
            return STEP_SECONDS * peak * (1.0 + dice.gauss(0.0, 0.02))
        if metric == "train.collective.wait":
            return max(
                0.001,
                0.262 - own if slow == 1.0 and 40 <= offset < 56 else 0.03 + abs(dice.gauss(0.0, 0.006)),
            )
        if metric in {"train.compute.own", "train.compute.duration", "train.compute.cpu"}:
            return own
        return 0.02 * (1.0 + abs(dice.gauss(0.0, 0.2)))

    # ---- what a LedgerReader answers

    def _check(self) -> None:
        if self.away:
            raise LedgerUnavailable("Nobody answers on the socket of the record service.")

    def health(self) -> Health:
        self._check()
        return Health(status="ok", reason="", lag={}, data_at=self.now - 0.4)

    def jobs(self) -> tuple[JobView, ...]:
        self._check()
        return (msgspec.convert(self._job(), JobView),)

    def incidents(self, *, job: str | None = None, **_: Any) -> IncidentPage:
        self._check()
        rows = [self._with_commands(story)["incident"] for story in self._stories.values()]
        views = tuple(msgspec.convert(row, IncidentView) for row in rows if job in {None, row["job"]})
        return IncidentPage(incidents=views, next=len(views))

    def incident(self, incident_id: str) -> IncidentStory:
        self._check()
        if incident_id not in self._stories:
            raise NotInLedger(f"there is no incident {incident_id}")
        return msgspec.convert(self._with_commands(self._stories[incident_id]), IncidentStory)

    def rows(self, table: str, *, job: str | None = None, **_: Any) -> RowPage:
        self._check()
        messages = [self._attempt_started(attempt) for attempt in self.attempts] if table == "events" else []
        rows = (Row(seq=n, kind="attempt_started.v1", message=message) for n, message in enumerate(messages, start=1))
        return RowPage(rows=tuple(rows), next=len(messages))

    def series(
        self, job: str, metric: str, *, attempt: int | None = None, start: float | None = None,
        end: float | None = None, buckets: int = 500,
    ) -> Series:  # fmt: skip
        self._check()
        ranks: dict[str, list[tuple[float, int, float | None]]] = {}
        bad: list[tuple[int, int, str]] = []
        by_step: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for its_attempt, rank, step, at in self.samples:
            if not (start or 0.0) <= at <= (end or math.inf) or attempt not in {None, its_attempt}:
                continue
            value = self.value(metric, rank, step, at)
            if value is None:
                bad.append((rank, step, "nan"))
            else:
                by_step.setdefault((its_attempt, step), []).append((at, value))
            ranks.setdefault(str(rank), []).append((at, step, value))
        medians = [(p[0][0], sorted(value for _, value in p)[len(p) // 2]) for p in by_step.values()]
        return Series(metric=metric, ranks=ranks, median=medians, non_finite=bad)

    def metric_names(self, job: str) -> tuple[str, ...]:
        self._check()
        return METRIC_NAMES

    def logs(
        self,
        job: str,
        *,
        rank: int | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: int = 200,
    ) -> tuple[LogRow, ...]:
        self._check()
        lines = [line for line in self._lines() if (start or 0.0) <= line.event_at <= (end or math.inf)]
        mine = sorted((line for line in lines if rank in {None, line.rank}), key=lambda line: line.event_at)
        return tuple(mine[-limit:])

    def post_command(self, request: CommandRequest) -> str:
        self._check()
        self.commands.append({
            **msgspec.to_builtins(request), "at": self.now, "command_id": f"command-{len(self.commands) + 1}",
        })  # fmt: skip
        return f"command-{len(self.commands)}"

    def close(self) -> None:
        return

    def messages(self) -> list[Any]:
        """The same story as the messages that a job, its launchers, detect and recover would have sent."""
        sequence = itertools.count()
        by_step: dict[tuple[int, int, int], float] = {(a, r, s): at for a, r, s, at in self.samples}
        said: list[Any] = [self._attempt_started(attempt) for attempt in self.attempts]
        for (attempt, rank, step), at in by_step.items():
            columns = {name: (self.value(name, rank, step, at),) for name in METRIC_NAMES}
            missing = tuple(NonFinite(name, 0, "nan") for name, (value,) in columns.items() if value is None)
            said.append(Metrics(
                job=JOB, attempt=attempt, rank=rank, node=self._node(attempt, rank), sequence=next(sequence), at=at,
                phase="train", step=step + 1, steps=(step,), ended_at=(at,), columns=columns, non_finite=missing,
            ))  # fmt: skip
            if rank == 0 and step % 10 == 0:
                said.append(CheckpointEvent(
                    job=JOB, attempt=attempt, rank=-1, node="node-0", sequence=next(sequence), at=at + 0.05,
                    state="complete", step=step, tier="memory",
                ))  # fmt: skip
        for line in self._lines():
            text = LogLine(at=line.event_at, stream=line.stream, text=line.text)  # type: ignore[arg-type]
            said.append(Logs(
                job=JOB, attempt=1, rank=line.rank, node=line.node, sequence=next(sequence), at=line.event_at,
                lines=(text,),
            ))  # fmt: skip
        for story in map(self.incident, self._stories):
            said += [*story.verdicts, *story.actions, *story.receipts, *story.transitions]
            if story.incident.closed_at is not None:
                last = story.verdicts[-1]
                said.append(msgspec.structs.replace(
                    last, revision=last.revision + 1, status="closed", at=story.incident.closed_at
                ))  # fmt: skip
        if self.stopped:
            said += [
                AttemptEnded(job=JOB, attempt=len(self.attempts), rank=-1, node=node, sequence=next(sequence),
                             at=self.now - 1.0, outcome="failed")
                for node in self.attempts[-1]["nodes"]
            ]  # fmt: skip
        return sorted(said, key=lambda message: float(message.at))

    def heartbeats(self, at: float) -> list[NodeHeartbeat]:
        """A sign of life of each launcher."""
        return [
            NodeHeartbeat(job=JOB, attempt=len(self.attempts), rank=-1, node=node, sequence=int(at * 1000), at=at,
                          ranks_alive=(0, 1))
            for node in self.attempts[-1]["nodes"]
        ]  # fmt: skip

    def _node(self, attempt: int, rank: int) -> str:
        return str(self.attempts[attempt - 1]["nodes"][rank // 2])

    def _attempt_started(self, attempt: dict[str, Any]) -> AttemptStarted:
        places = tuple(
            RankPlace(rank=rank, local_rank=rank % 2, node=attempt["nodes"][rank // 2]) for rank in range(WORLD)
        )
        return AttemptStarted(
            job=JOB, attempt=attempt["attempt"], rank=-1, node="", sequence=0, at=attempt["at"], world_size=WORLD,
            places=places, resume_step=attempt["resume"],
        )  # fmt: skip

    def _lines(self) -> list[LogRow]:
        lines = [
            LogRow(
                event_at=at, rank=rank, node="node-0" if rank < 2 else "node-1", stream="stdout",
                text=f"step {step:5d}  loss {self.value('train.loss', rank, step, at) or math.nan:.4f}",
            )
            for _, rank, step, at in self.samples if step % 5 == 0
        ]  # fmt: skip
        for fault in self.faults:
            culprit, node = CULPRIT[fault]
            for text in LINES.get(fault, ()):
                lines.append(LogRow(
                    event_at=self.begin + TIMING[fault][0] + 0.05, rank=2 if culprit is None else culprit, node=node,
                    stream="kernel" if "Xid" in text else "stderr", text=text,
                ))  # fmt: skip
        return lines

    def _job(self) -> dict[str, Any]:
        open_now = sum(1 for story in self._stories.values() if story["incident"]["status"] == "open")
        return {
            "job": JOB, "attempt": len(self.attempts), "state": "failed" if self.stopped else "running",
            "world_size": WORLD, "started_at": self.begin, "last_step": self.last_step, "last_seen_at": self.now - 0.5,
            "goodput": 0.873, "open_incidents": open_now,
            "checkpoint": {"step": self.last_step // 10 * 10, "tier": "memory", "event_at": self.now - 2.2},
            "outcome": "user_error" if self.stopped else "",
        }  # fmt: skip

    def _with_commands(self, story: dict[str, Any]) -> dict[str, Any]:
        own = [{**row, "job": JOB} for row in self.commands if row["incident_id"] == story["incident"]["incident_id"]]
        incident = dict(story["incident"])
        for row in own:
            if row["verb"] == "acknowledge":
                incident |= {"acknowledged_by": row["author"], "acknowledged_at": row["at"]}
            if row["verb"] == "feedback":
                incident |= {"feedback": row["feedback"]}
        return {**story, "incident": incident, "commands": own}

    # ---- one incident

    def _story(self, fault: str) -> dict[str, Any]:
        onset, delay, back = TIMING[fault]
        onset_at, verdict_at = self.begin + onset, self.begin + onset + delay
        attempt = self._attempt_at(fault)
        step = max((s for a, _, s, at in self.samples if a == attempt and at <= onset_at), default=0)
        resume = (step // 10 * 10 - (10 if fault == "nan" else 0)) if back else None
        closed_at = self._closed_at(fault, verdict_at)
        rank, node = CULPRIT[fault]
        incident_id = f"{JOB}/{attempt}/{fault}/{rank if rank is not None else node}"
        action = {
            "action_id": f"{JOB}/{attempt}/{VERB[fault]}", "job": JOB, "verdict_id": incident_id, "verdict_revision": 0,
            "fault_class": fault, "verb": VERB[fault], "mode": "auto", "rule": RULE[fault],
            "at": verdict_at + 0.04, "attempt": attempt, "excluded_nodes": ["node-1"] if fault == "gpu_lost" else [],
            "next_attempt": attempt + 1 if back else None, "resume_step": resume,
            "resume_tier": ("memory+disk" if fault == "gpu_lost" else "memory") if back else "",
            "reject_from_step": step if fault == "nan" else None, "plan_hash": "9f2c",
        }  # fmt: skip
        culprits = [{"rank": rank, "node": node, "confidence": 0.97 if fault == "straggler" else 1.0}]
        evidence = self._evidence(fault, onset_at, step)
        base = {
            "attempt": attempt, "fault_class": fault, "severity": SEVERITY[fault], "onset_at": onset_at,
            "onset_step": step, "summary": SUMMARY[fault].format(step=step, next=step + 1),
        }  # fmt: skip
        incident = {
            **base, "seq": FAULTS.index(fault) + 1, "incident_id": incident_id, "job": JOB,
            "status": "closed" if closed_at else "open", "state": self._states(fault, closed_at)[-1][1],
            "culprits": culprits,
            "victims": 3 if back else 0, "first_bad_step": step if fault == "nan" else None,
            "opened_at": verdict_at, "updated_at": verdict_at + 0.5, "closed_at": closed_at, "advice": ADVICE[fault],
            "settled": True, "action": action, "outcome": "done", "outcome_text": OUTCOME[fault].format(step=resume),
            "acknowledged_by": "", "acknowledged_at": None, "feedback": "", "muted_until": None,
        }  # fmt: skip
        return {
            "incident": incident,
            "verdicts": [{
                **base, "verdict_id": incident_id, "job": JOB, "advice": ADVICE[fault], "culprits": culprits,
                "victims": 3 if back else 0,
                "revision": 0, "at": verdict_at, "status": "open", "settled": True,
                "detector": "rank channel" if fault == "straggler" else "log rules" if fault == "gpu_lost" else "judge",
                "evidence": evidence,
            }],
            "actions": [action],
            "receipts": [{"action_id": action["action_id"], "job": JOB, "attempt": attempt,
                          "at": verdict_at + max(back - 0.4, 0.1),
                          "outcome": "done", "text": OUTCOME[fault].format(step=resume),
                          "next_attempt": action["next_attempt"]}],
            "transitions": [
                {"at": at, "state": state, "cause": cause, "sequence": number, "job": JOB, "attempt": attempt,
                 "incident_id": incident_id}
                for number, (at, state, cause) in enumerate(self._states(fault, closed_at))
            ],
            "commands": [],
        }  # fmt: skip

    def _closed_at(self, fault: str, verdict_at: float) -> float | None:
        if fault == "straggler":
            return self.begin + 40.0 + STRAGGLER_SECONDS + 3.0
        at = verdict_at + TIMING[fault][2] + (20.0 if TIMING[fault][2] else 0.6)
        return at if at < self.now else None

    def _states(self, fault: str, closed_at: float | None) -> list[tuple[float, str, str]]:
        onset, delay, back = TIMING[fault]
        at = self.begin + onset + delay
        states = [(at, "open", "verdict"), (at + 0.02, "deciding", "settled")]
        if fault == "straggler":
            states.append((at + 0.05, "notified", "notify"))
        if back:
            states += [
                (at + 0.1, "stopping", "restart"), (at + back - 1.5, "selecting", "gone"),
                (at + back - 1.3, "starting", "selected"), (at + back - 1.0, "probation", "started"),
            ]  # fmt: skip
        if fault == "user_error":
            states.append((at + 0.1, "finishing", "stop"))
        if closed_at is not None:
            end = "stopped" if fault == "user_error" else "resolved"
            states.append((closed_at, end, "steady" if back else "ended" if fault == "user_error" else "closed"))
        return states

    def _evidence(self, fault: str, onset_at: float, step: int) -> list[dict[str, Any]]:
        culprit, node = CULPRIT[fault]
        common = {"at": onset_at, "rank": culprit, "node": node, "step": step}
        if fault == "straggler":
            return [
                {**common, "kind": "metric", "metric": "train.compute.own", "value": 0.2412, "peers_median": 0.1489,
                 "unit": "s", "rule": "rank.own_compute", "text": "own compute 62 % above its peers for 12 steps",
                 "topic": "metrics", "partition": 0, "offset": 1184},
                {**common, "kind": "metric", "metric": "train.collective.wait", "value": 0.0071, "peers_median": 0.1012,
                 "unit": "s", "rule": "rank.wait_inverse", "text": "its peers wait for it in the all-reduce",
                 "topic": "metrics", "partition": 0, "offset": 1184},
                {**common, "kind": "metric", "metric": "train.compute.own", "value": 14.2, "peers_median": 1.1,
                 "unit": "score", "rule": "ensemble.knn", "text": "PyOD KNN score beyond the clean tail"},
            ]  # fmt: skip
        if fault == "nan":
            return [
                {**common, "kind": "metric", "metric": "train.loss", "value": None, "peers_median": 4.1, "unit": "",
                 "rule": "job.non_finite", "text": f"loss is NaN at step {step}; finite on the other ranks"},
                {**common, "kind": "metric", "metric": "train.gradient.local_norm", "value": None, "peers_median": 0.83,
                 "unit": "", "rule": "job.non_finite", "text": "local gradient norm is NaN before the all-reduce"},
            ]  # fmt: skip
        if fault == "hang":
            return [
                {**common, "kind": "silence", "rule": "launcher.stopped",
                 "text": "process state T for 2.1 s while peers wait"},
                {**common, "kind": "metric", "metric": "train.step.duration", "value": 3.1, "peers_median": 0.25,
                 "unit": "s", "rule": "hang.corroborated", "text": "no progress; 3 peers frozen in the all-reduce"},
                *({**common, "kind": "stack", "rank": rank, "text": text, "value": value, "unit": "ranks"}
                  for rank, value, text in STACKS),
            ]  # fmt: skip
        kinds = {"rank_lost": "event", "gpu_lost": "log", "user_error": "log"}
        rules = {
            "rank_lost": "lifecycle.rank_exited",
            "gpu_lost": "nvidia.xid_79",
            "user_error": "python.exception",
        }
        return [
            {
                **common,
                "kind": kinds[fault],
                "rule": rules[fault],
                "text": text,
                "topic": "logs",
                "partition": 0,
                "offset": 2290,
            }
            for text in LINES[fault][-1:]
        ]
