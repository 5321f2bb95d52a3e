"""What Slurm prints: jobs and nodes as `scontrol --oneliner show` tells them, and our mark in a job's comment. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Phase = Literal["pending", "running", "ending", "ended"]

# JOB_STATE_CODES of squeue(1), versions 21.08 to 25.05.
PHASES: Mapping[str, Phase] = {
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT",
         "POWER_UP_NODE", "EXPEDITING"),
        "pending",
    ),
    **dict.fromkeys(("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"), "running"),
    **dict.fromkeys(("COMPLETING",), "ending"),
    **dict.fromkeys(
        ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
         "OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
        "ended",
    ),
}  # fmt: skip
# Ends that Slurm has made, not the job: it may run again where its own records do not say that it is over.
NOT_ITS_OWN_END = frozenset({"NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT", "OUT_OF_MEMORY", "LAUNCH_FAILED"})
NOT_ITS_OWN_REASON = frozenset({"JobLaunchFailure", "NodeDown", "NodeFail", "launch_failed"})
LAUNCHERS_LOST = 75  # EX_TEMPFAIL: what our batch script ends with where its launchers are gone and the job is not over
NOTHING = frozenset({"", "(null)", "N/A", "None", "None assigned", "Unknown"})
# One letter after a node's state, sinfo(1): the controller hears nothing of it, or its power is off or changing.
STATE_LETTERS: Mapping[str, str] = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "%": "POWERING_DOWN",
    "!": "POWER_DOWN",
    "^": "REBOOT_ISSUED",
    "@": "REBOOT_REQUESTED",
    "$": "MAINTENANCE",
    "-": "PLANNED",
}
_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:]*)=")
_IN_BRACKETS = re.compile(r"\((\d+)\)$")


class UnreadableAnswer(ValueError):
    """Slurm printed something that is cut off, or that is no job or node."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job. Host lists are as Slurm spells them (`n[1-3,7]`), empty where there is none."""

    job_id: int
    name: str
    state: str
    phase: Phase
    reason: str
    restarts: int
    requeue: bool
    held: bool  # priority 0
    nodes: str
    nodes_wanted: int
    excluded: str
    requested: str
    partition: str
    comment: str
    user: str
    submitted: str  # local time; of the last requeue, where there was one
    run_time: str  # hh:mm:ss, with days before it where there are any
    exit_code: str  # code:signal

    @property
    def is_over(self) -> bool:
        """It came to its own end, or a person has cancelled it: terminal stays terminal."""
        if self.phase != "ended" or self.state in NOT_ITS_OWN_END:
            return False
        if self.state == "FAILED" and self.restarts and self.run_time == "00:00:00":
            return False  # requeued, and a slurmd refused to launch it: it never ran
        lost = self.reason in NOT_ITS_OWN_REASON or self.exit_code == f"{LAUNCHERS_LOST}:0"
        return self.state != "FAILED" or not lost


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node: `state` without flags (IDLE, ALLOCATED, DOWN, …), `flags` as DRAIN or NOT_RESPONDING."""

    name: str
    state: str
    flags: frozenset[str]
    reason: str
    slurmd_started: str  # local time of the controller's answers; compared only with others of them

    @property
    def answers(self) -> bool:
        """Its slurmd is registered and heard of."""
        silent = {"NOT_RESPONDING", "POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "REBOOT_ISSUED"}
        return self.state not in ("DOWN", "UNKNOWN", "FUTURE", "ERROR") and not self.flags & silent

    @property
    def draining(self) -> bool:
        return "DRAIN" in self.flags or self.state in ("DRAINED", "DRAINING", "DRAIN")


Stage = Literal["", "requeueing", "requeued"]


@dataclass(frozen=True, slots=True)
class Mark:
    """What we have written on a job, `t:job:attempt:token[:stage:restarts]`: the fence that every controller reads.

    `stage` is of the second rung: between the intent and the release it says "requeueing", whoever reads it goes on;
    `restarts` is Slurm's counter after that requeue.
    """

    job: str
    attempt: int = 0
    token: str = ""
    stage: Stage = ""
    restarts: int = 0

    def text(self) -> str:
        tail = f":{self.stage}:{self.restarts}" if self.stage else ""
        return f"t:{self.job}:{self.attempt}:{self.token}{tail}"


def mark_of(comment: str) -> Mark | None:
    """Our mark, None where the comment is somebody else's."""
    parts = comment.strip().split(":")
    if len(parts) not in (4, 6) or parts[0] != "t" or not parts[1] or not parts[2].isdecimal():
        return None
    if len(parts) == 4:
        return Mark(parts[1], int(parts[2]), parts[3])
    stage: Stage | None = "requeueing" if parts[4] == "requeueing" else "requeued" if parts[4] == "requeued" else None
    if stage is None or not parts[5].isdecimal():
        return None
    return Mark(parts[1], int(parts[2]), parts[3], stage, int(parts[5]))


def fields_of(line: str) -> dict[str, str]:
    """`Key=value` pairs of one line. A key that comes again (a path with `=` in it) does not change the first."""
    found = list(_KEY.finditer(line))
    fields: dict[str, str] = {}
    ends = [*(key.start() for key in found[1:]), len(line)]
    for this, end in zip(found, ends, strict=False):  # a line without any key has one end too many
        value = line[this.end() : end].strip()
        fields.setdefault(this.group(1), "" if value in NOTHING else value)
    return fields


def job_of(text: str) -> SlurmJob:
    """One job of `scontrol --oneliner show job ID`. Raises UnreadableAnswer."""
    fields = fields_of(_whole_line(text))
    try:
        state = fields["JobState"].split(",")[0]
        return SlurmJob(
            job_id=int(fields["JobId"]),
            name=fields["JobName"],
            state=state,
            phase=PHASES[state],
            reason=fields["Reason"],
            restarts=int(fields["Restarts"]),
            requeue=fields["Requeue"] == "1",
            held=fields["Priority"] == "0",
            nodes=fields["NodeList"],
            nodes_wanted=int(fields["NumNodes"].split("-")[0]),
            excluded=fields["ExcNodeList"],
            requested=fields["ReqNodeList"],
            partition=fields["Partition"],
            comment=fields.get("Comment", ""),
            user=fields["UserId"],
            submitted=fields["SubmitTime"],
            run_time=fields["RunTime"],
            exit_code=fields["ExitCode"],
        )
    except (KeyError, ValueError) as error:
        raise UnreadableAnswer(f"scontrol told a job in a way that is not understood ({_why(error)})") from error


def node_of(text: str) -> SlurmNode:
    """One node of `scontrol --oneliner show node NAME`. Raises UnreadableAnswer."""
    fields = fields_of(_whole_line(text))
    try:
        name, told = fields["NodeName"], fields["State"]
    except KeyError as error:
        raise UnreadableAnswer(f"scontrol told a node in a way that is not understood ({_why(error)})") from error
    words = told.split("+")
    bare = words[0].rstrip("".join(STATE_LETTERS))
    letters = words[0][len(bare) :]
    flags = frozenset([*words[1:], *(STATE_LETTERS[letter] for letter in letters)])
    return SlurmNode(name, bare, flags, fields.get("Reason", ""), fields.get("SlurmdStartTime", ""))


def leaves_of(text: str) -> tuple[tuple[str, str], ...]:
    """Each lowest switch, or block, and its host list, of `scontrol show topology`; none where there is none."""
    found = []
    for line in text.splitlines():
        fields = fields_of(line)
        name = fields.get("SwitchName") if fields.get("Level") == "0" else fields.get("BlockName")
        if name and fields.get("Nodes"):
            found.append((name, fields["Nodes"]))
    return tuple(found)


def _whole_line(text: str) -> str:
    """The first line of an answer that has come to its end."""
    line, newline, _ = text.partition("\n")
    if not newline or not line.strip():
        raise UnreadableAnswer("scontrol's answer is cut off")
    return line


def _why(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
