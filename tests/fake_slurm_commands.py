"""What a fake sbatch, scontrol, squeue, sinfo and scancel do, over nodes and jobs that are only remembered.

It starts no process: a job "runs" when it has nodes. What the real one does was observed on Slurm 22.05, and one
suite runs on both, so that this one cannot drift.
"""

from __future__ import annotations

import re
import time
from typing import Any

MESSAGES = {  # slurm_strerror, and what a translated one might say
    "gone": ("Invalid job id specified", "Ungültige Auftragsnummer"),
    "node": ("Invalid node name specified", "Ungültiger Knotenname"),
    "pending": ("Job is pending execution", "Auftrag wartet auf Ausführung"),
    "running": ("Job is no longer pending execution", "Auftrag wartet nicht mehr"),
    "config": ("Requested node configuration is not available", "Die verlangten Knoten gibt es nicht"),
    "disabled": ("Requested operation is presently disabled", "Derzeit abgeschaltet"),
    "denied": ("Access/permission denied", "Zugriff verweigert"),
    "connect": ("Unable to contact slurm controller (connect failure)", "Keine Verbindung zum Controller"),
    "lost": ("Unexpected message received", "Unerwartete Nachricht"),
}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


class Refused(Exception):
    """The command ends with 1 and this message."""


class FakeController:
    """Nodes n1 … nN and the jobs on them. A method for each command takes its arguments and returns what it prints."""

    def __init__(self, nodes: int) -> None:
        names = [f"n{number}" for number in range(1, nodes + 1)]
        self.nodes: dict[str, dict[str, Any]] = {
            name: {"state": "IDLE", "drain": False, "reason": ""} for name in names
        }
        self.jobs: dict[str, dict[str, Any]] = {}
        self.next_id = 1
        self.language = "C"  # of whoever asks now

    def message(self, key: str) -> str:
        return MESSAGES[key][0 if self.language == "C" else 1]

    def job(self, text: str) -> dict[str, Any]:
        if text not in self.jobs:
            raise Refused(self.message("gone"))
        return self.jobs[text]

    def schedule(self) -> None:
        for number in sorted(self.jobs, key=int):
            job = self.jobs[number]
            if job["state"] != "PENDING" or job["held"]:
                continue
            if job["start_at"] > time.time():
                job["reason"] = "BeginTime"
                continue
            if job["singleton"] and any(
                other["name"] == job["name"] and other["state"] not in ENDED and int(key) < int(number)
                for key, other in self.jobs.items()
            ):
                job["reason"] = "Dependency"
                continue
            taken = {node for other in self.jobs.values() if other["state"] == "RUNNING" for node in other["nodes"]}
            taken |= set(job["excluded"])
            usable = [name for name, node in self.nodes.items() if node["state"] == "IDLE" and not node["drain"]]
            free = [name for name in usable if name not in taken]
            low, high = job["span"]
            if len(free) < low:
                job["reason"] = "Resources"
                continue
            job.update(state="RUNNING", reason="", nodes=free[:high])

    def usable(self, job: dict[str, Any], excluded: list[str]) -> None:
        if len(set(self.nodes) - set(excluded)) < job["span"][0]:
            raise Refused(self.message("config"))

    # commands

    def sbatch(self, arguments: list[str], script: str) -> str:
        options = re.findall(r"^#SBATCH (\S+)$", script, re.M) + arguments
        values = dict(option.lstrip("-").partition("=")[::2] for option in options)
        low, _, high = values.get("nodes", "1").partition("-")
        job = {
            "name": values["job-name"], "state": "PENDING", "reason": "Priority", "restarts": 0, "held": False,
            "requeue": "no-requeue" not in values, "nodes": [], "span": [int(low), int(high or low)],
            "excluded": [name for name in values.get("exclude", "").split(",") if name], "requested": [],
            "comment": values.get("comment", ""), "singleton": values.get("dependency") == "singleton", "start_at": 0.0,
            "submitted": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }  # fmt: skip
        self.usable(job, job["excluded"])
        number = str(self.next_id)
        self.next_id += 1
        self.jobs[number] = job
        return number + "\n"

    def scancel(self, arguments: list[str], script: str) -> str:
        job = self.jobs.get(arguments[-1])
        if job is not None and job["state"] not in ENDED:
            job.update(state="CANCELLED", reason="")
        return ""

    def squeue(self, arguments: list[str], script: str) -> str:
        values = dict(argument.lstrip("-").partition("=")[::2] for argument in arguments)
        rows = [(number, job) for number, job in self.jobs.items() if job["name"] == values["name"]]
        return "".join(f"{number}|{job['state']}|{job['comment'] or '(null)'}\n" for number, job in rows)

    def sinfo(self, arguments: list[str], script: str) -> str:
        values = dict(argument.lstrip("-").partition("=")[::2] for argument in arguments)
        names = values["nodes"].split(",") if "nodes" in values else list(self.nodes)
        form = values["format"]
        return "".join(
            form.replace("%N", name).replace("%T", self.nodes[name]["state"].lower()) + "\n"
            for name in names if name in self.nodes
        )  # fmt: skip

    def scontrol(self, arguments: list[str], script: str) -> str:
        verb, *rest = [argument for argument in arguments if not argument.startswith("--")]
        if verb == "show":
            return {"job": self.show_job, "node": self.show_node, "hostnames": self.hostnames}[rest[0]](rest[1])
        if verb == "update":
            pairs = dict(argument.partition("=")[::2] for argument in rest)
            return self.update_node(pairs) if "NodeName" in pairs else self.update_job(pairs)
        return getattr(self, verb)(self.job(rest[0]))

    def hostnames(self, text: str) -> str:
        return "".join(name + "\n" for name in text.split(","))

    def show_job(self, number: str) -> str:
        job = self.job(number)
        nothing = "(null)"
        return (
            f"JobId={number} JobName={job['name']} UserId=root(0) Priority={0 if job['held'] else 4294901759} "
            f"JobState={job['state']} Reason={job['reason'] or 'None'} Dependency={nothing} "
            f"Requeue={int(job['requeue'])} Restarts={job['restarts']} BatchFlag=1 ExitCode=0:0 RunTime=00:01:00 "
            f"SubmitTime={job['submitted']} Partition=main "
            f"ReqNodeList={','.join(job['requested']) or nothing} ExcNodeList={','.join(job['excluded']) or nothing} "
            f"NodeList={','.join(job['nodes']) or nothing} NumNodes={len(job['nodes']) or job['span'][0]} "
            f"Command={nothing} WorkDir=/tmp Comment={job['comment'] or nothing} StdErr=/dev/null Power=\n"
        )

    def show_node(self, name: str) -> str:
        if name not in self.nodes:
            raise Refused(f"Node {name} not found")
        node = self.nodes[name]
        state = node["state"] + ("+DRAIN" if node["drain"] else "")
        return (
            f"NodeName={name} Arch=x86_64 State={state} SlurmdStartTime=2026-01-01T00:00:00 Reason={node['reason']}\n"
        )

    def update_node(self, pairs: dict[str, str]) -> str:
        node = self.nodes[pairs["NodeName"]]
        node.update(drain=pairs["State"] == "DRAIN", reason=pairs.get("Reason", ""))
        return ""

    def update_job(self, pairs: dict[str, str]) -> str:
        job = self.job(pairs.pop("JobId"))
        if job["state"] != "PENDING" and ("ExcNodeList" in pairs or "StartTime" in pairs):
            raise Refused(self.message("running"))
        if "ExcNodeList" in pairs:
            excluded = [name for name in pairs["ExcNodeList"].split(",") if name]
            if set(excluded) - set(self.nodes):
                raise Refused(self.message("node"))
            self.usable(job, excluded)
            job["excluded"] = excluded
        if "StartTime" in pairs:
            job["start_at"] = 0.0
        if "Comment" in pairs:
            job["comment"] = pairs["Comment"]
        return ""

    def requeue(self, job: dict[str, Any], *, held: bool = False) -> str:
        if job["state"] == "PENDING":
            raise Refused(self.message("pending"))
        if not job["requeue"]:
            raise Refused(self.message("disabled"))
        job.update(
            state="PENDING", nodes=[], restarts=job["restarts"] + 1, held=held, start_at=time.time() + 121.0,
            reason="job_requeued_in_held_state" if held else "BeginTime", submitted=time.strftime("%Y-%m-%dT%H:%M:%S"),
        )  # fmt: skip
        return ""

    def requeuehold(self, job: dict[str, Any]) -> str:
        return self.requeue(job, held=True)

    def hold(self, job: dict[str, Any]) -> str:
        job.update(held=True, reason="JobHeldUser")
        return ""

    def release(self, job: dict[str, Any]) -> str:
        job.update(held=False, reason="")
        return ""
