"""The allocation of a job on Slurm: looked at, given other nodes, and given back, by Slurm's own commands.

What a person does to the job (hold, suspend, requeue, drain, resume) is taken as it is and never undone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingest.clock import Clock
from recovery.allocation import AllocationView, BackendSite, JobRecords, LauncherAddress
from recovery.backend import Rejected, Unavailable
from recovery.launcher.job_files import BrokenJobFile, JobFiles
from recovery.launcher.protocol import JobEnd

from .in_allocation import told_by
from .slurm_cli import SlurmCommands, SlurmTimes
from .slurm_requeue import POLL_SECONDS, Requeue, SlurmMemory, held_by_a_person
from .slurm_script import SlurmOptions, batch_script
from .slurm_text import PHASES, Mark, SlurmJob, SlurmNode, mark_of

GENERATIONS_PER_JOB = 10_000  # Slurm's counter of restarts begins anew with each Slurm job
SETTLED_SECONDS = 10.0  # what a slurmd found running when it came up is ended by then (measured: 0.1 s)
PROBE_SECONDS_MAX = 3.0  # for a question that a node answers itself
PROBE_AGAIN_SECONDS = 5.0
FRESH_SECONDS = 0.5  # a job's nodes, for whoever asks where its launchers are


class SlurmAllocation:
    """`Allocation` on Slurm. `jobs_folder` is on a file system that controller and nodes share."""

    name = "slurm"

    def __init__(
        self, jobs_folder: Path, commands: SlurmCommands, clock: Clock, options: SlurmOptions | None = None
    ) -> None:
        self._jobs_folder = jobs_folder
        self._commands = commands
        self._clock = clock
        self._options = options or SlurmOptions()
        self._ids: dict[str, int] = {}  # of the Slurm job that was found last
        self._had: dict[str, set[str]] = {}  # every node on which we have seen the job
        self._nodes: dict[str, tuple[float, tuple[str, ...]]] = {}  # when seen, and the nodes it had then
        self._probed: dict[tuple[str, str], float] = {}

    # Looking

    def look(self, job: str) -> AllocationView:
        found = self._find(job)
        return AllocationView(job, "absent") if found is None else self._view(job, found)

    def records(self, job: str) -> JobRecords:
        return self._files(job)

    def launchers(self, job: str) -> tuple[LauncherAddress, ...]:
        """By their files in the shared folder; while slurmctld is away, those of the nodes that were seen last."""
        try:
            files = tuple(self._files(job).nodes().values())
        except BrokenJobFile as error:
            raise Unavailable(str(error)) from error
        seen_at, nodes = self._nodes.get(job, (float("-inf"), tuple(file.node for file in files)))
        if files and self._clock.monotonic() - seen_at > FRESH_SECONDS:
            try:
                found = self._find(job)
            except Unavailable:
                found = None
            else:
                nodes = self._nodes_of(job, found) if found is not None else ()
        return told_by(files, nodes)

    def nothing_runs_on(self, job: str, node: str) -> bool:
        return self.why_nothing_runs_on(job, node) != ""

    def why_nothing_runs_on(self, job: str, node: str) -> str:
        """The sentence by which Slurm vouches for `nothing_runs_on`; empty where it does not.

        A slurmd that was killed leaves its steps running, so silence vouches for nothing: either the node itself
        answers that they are gone, or it is down and excluded, so that nothing meets what may still run there.
        """
        found, told = self._find(job), self._commands.node(node)
        if told is None:
            return ""
        if not told.answers:
            down = told.state == "DOWN" and node in self._files(job).excluded()
            return f"{node} is down, and excluded: what may still run there meets nothing of this job" if down else ""
        if found is not None and found.phase == "ending":
            return ""
        if found is not None and found.phase == "running" and node in self._nodes_of(job, found):
            return self._probe(job, node, found)
        if "COMPLETING" in told.flags or not self._ended_what_it_had(told, found):
            return ""
        return f"the slurmd of {node} answers, and has ended every step of this job"

    def groups(self, job: str, nodes: Sequence[str]) -> Mapping[str, str]:
        """The switch, or block, that each node hangs on, where the site has a topology."""
        found: dict[str, str] = {}
        for leaf, host_list in self._commands.leaves():
            for node in self._commands.hostnames(host_list):
                found.setdefault(node, leaf)
        return {node: found[node] for node in nodes if node in found}

    # Acting

    def submit(self, job: str, *, nodes: int, command: Sequence[str]) -> AllocationView:
        found, end = self._find(job), self._files(job).end()
        if end is not None:
            raise Rejected(f"job {job} is over ({end.outcome}: {end.reason}); take another job name")
        if found is not None and found.phase != "ended":
            return self._view(job, found)
        self._ids[job] = self._commands.submit(self.script(job, nodes=nodes, command=command))
        return self.look(job)

    def script(self, job: str, *, nodes: int, command: Sequence[str]) -> str:
        """What `submit` gives to sbatch."""
        wanted = self._nodes_wanted(job) or nodes
        folder = self._files(job).folder.absolute()
        return batch_script(
            job, nodes_min=min(wanted, nodes), nodes_max=nodes, command=command, folder=folder, options=self._options
        )

    def replace(self, job: str, *, attempt: int, token: str, excluded_nodes: Sequence[str]) -> AllocationView:
        found = self._find(job)
        if found is None:
            raise Rejected(f"Slurm has no job {job}; `transom run --backend slurm` submits one")
        end = self._files(job).end()
        if end is not None or found.is_over:
            how = f"{end.outcome}: {end.reason}" if end is not None else found.state
            raise Rejected(f"job {job} is over ({how}; Slurm job {found.job_id}); terminal stays terminal")
        if held_by_a_person(found):
            return self._view(job, found)
        return self._view(job, self._requeue(job).run(found, Mark(job, attempt, token), sorted(set(excluded_nodes))))

    def release(self, job: str, end: JobEnd) -> None:
        """A job whose launchers were told ends by itself, with the right exit code; what does not is cancelled."""
        deadline = self._clock.monotonic() + self._options.end_seconds_max
        while True:
            found = self._find(job)
            if found is None or found.phase == "ended":
                return
            if found.phase == "pending" or self._clock.monotonic() >= deadline:
                self._commands.cancel(found.job_id)
                return
            self._clock.sleep(POLL_SECONDS)

    def cancel(self, job: str) -> None:
        """All nodes back at once, whatever runs there. Idempotent."""
        found = self._find(job)
        if found is not None and found.phase != "ended":
            self._commands.cancel(found.job_id)

    # Inside

    def _find(self, job: str) -> SlurmJob | None:
        """The Slurm job that runs this job now, else the next in the queue, else the last that ended."""
        known = self._ids.get(job)
        if known is not None:
            found = self._commands.job(known)
            if found is not None and found.phase != "ended" and _is_of(found.comment, job):
                return found
        rows = [(number, state) for number, state, comment in self._commands.jobs_named(job) if _is_of(comment, job)]
        if not rows:
            self._ids.pop(job, None)
            return None
        self._ids[job] = min(rows, key=_precedence)[0]
        return self._commands.job(self._ids[job])

    def _nodes_of(self, job: str, found: SlurmJob) -> tuple[str, ...]:
        has_nodes = found.phase in ("running", "ending")
        nodes = self._commands.hostnames(found.nodes) if has_nodes else ()
        self._nodes[job] = (self._clock.monotonic(), nodes)
        self._had.setdefault(job, set()).update(nodes)
        return nodes

    def _view(self, job: str, found: SlurmJob) -> AllocationView:
        mark = mark_of(found.comment) or Mark(job)
        nodes = self._nodes_of(job, found)
        excluded = self._commands.hostnames(found.excluded)
        files = self._files(job)
        return AllocationView(
            job,
            found.phase,
            found.job_id * GENERATIONS_PER_JOB + found.restarts,
            nodes,
            mark.attempt,
            mark.token,
            excluded,
            self._commands.down_nodes({*self._had[job], *excluded, *files.nodes()}),
            _why(found, self._requeue(job).memory()),
            held_by_a_person(found),
        )

    def _ended_what_it_had(self, told: SlurmNode, found: SlurmJob | None) -> bool:
        """A slurmd that came up after the job was requeued is given time to end what it found running."""
        if found is not None and told.slurmd_started and told.slurmd_started < found.submitted:
            return True
        up = self._clock.now() - _seconds_of(told.slurmd_started)
        return up >= SETTLED_SECONDS

    def _probe(self, job: str, node: str, found: SlurmJob) -> str:
        """Ask the node itself, by a step beside the launchers', whether its launcher and all of its ranks are dead."""
        key, now = (job, node), self._clock.monotonic()
        file = self._files(job).nodes().get(node)
        if file is None or now < self._probed.get(key, float("-inf")):
            return ""
        command = (sys.executable, "-P", "-m", "recovery.backends.left_behind", str(self._jobs_folder), job, node)
        if self._commands.run_beside(found.job_id, node, command, seconds_max=PROBE_SECONDS_MAX):
            return f"{node} itself says that its launcher is dead and no rank of it lives"
        self._probed[key] = self._clock.monotonic() + PROBE_AGAIN_SECONDS
        return ""

    def _requeue(self, job: str) -> Requeue:
        return Requeue(
            self._commands,
            self._clock,
            self._files(job).folder / "slurm.json",
            nodes_wanted=self._nodes_wanted(job),
            drain=self._options.drain,
        )

    def _nodes_wanted(self, job: str) -> int | None:
        try:
            spec = self._files(job).spec()
        except BrokenJobFile as error:
            raise Unavailable(str(error)) from error
        return None if spec is None else spec.nodes

    def _files(self, job: str) -> JobFiles:
        try:
            return JobFiles(self._jobs_folder, job)
        except ValueError as error:
            raise Rejected(str(error)) from error


def _is_of(comment: str, job: str) -> bool:
    mark = mark_of(comment)
    return mark is not None and mark.job == job


def _precedence(row: tuple[int, str]) -> tuple[int, int]:
    """The one that has nodes first, then the one that has waited for longest, then the one that ended last."""
    number, state = row
    phase = PHASES.get(state, "running")
    return (0, number) if phase in ("running", "ending") else (1, number) if phase == "pending" else (2, -number)


def _why(found: SlurmJob, memory: SlurmMemory) -> str:
    if found.phase == "ended":
        return found.state if not found.reason else f"{found.state}: {found.reason}"
    return "; ".join((*((found.reason,) if found.phase == "pending" and found.reason else ()), *memory.notes))


def _seconds_of(told: str) -> float:
    """Seconds since the epoch of a time that Slurm printed; now or later where it printed none."""
    try:
        return time.mktime(time.strptime(told, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return float("inf")


def make_allocation(site: BackendSite) -> SlurmAllocation:
    """What `recover.backend = "slurm"` is made by. Raises ValueError for options that do not fit."""
    options = site.read_options(SlurmOptions)
    times = SlurmTimes(options.read_seconds_max, options.write_seconds_max)
    # Slurm's commands want the environment as it is (PATH, SLURM_CONF); nothing of ours is read from it.
    return SlurmAllocation(site.jobs_folder, SlurmCommands(os.environ, times, site.clock), site.clock, options)
