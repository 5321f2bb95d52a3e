"""Other nodes for a job on Slurm, step by step: the intent in its comment, on hold, its exclusions, released.

Each step looks first, so that it may be asked again after a crash or an answer that was lost: whoever finds
"requeueing" under its own attempt and token goes on, whoever finds a newer attempt leaves the job alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ingest.clock import Clock
from recovery.backend import BackendError, Conflict, Rejected, TooFewNodes, Unavailable
from recovery.launcher.job_files import BrokenJobFile, read_file, write_file

from .slurm_cli import SlurmCommands
from .slurm_text import Mark, SlurmJob, mark_of

SETTLE_SECONDS_MAX = 3.0  # for the old steps to end, within one call; asked again, it goes on
POLL_SECONDS = 0.03
CLOCKS_APART_SECONDS = 0.1  # of this host's, the controller's and the nodes' clocks
NOTES_MAX = 20


class SlurmMemory(msgspec.Struct, frozen=True, kw_only=True):
    """jobs/<job>/slurm.json: what we have asked of Slurm, so that what others have asked stays as it is."""

    excluded: tuple[str, ...] = ()  # nodes that we have put on ExcNodeList at any time
    drained: tuple[str, ...] = ()  # nodes that we have drained once: whoever resumes them is right
    notes: tuple[str, ...] = ()  # what was not allowed, in a sentence each


class Requeue:
    """The second rung of one job. `nodes_wanted` is what it cannot run without; `memory_file` is its slurm.json."""

    def __init__(
        self, commands: SlurmCommands, clock: Clock, memory_file: Path, *, nodes_wanted: int | None, drain: bool
    ) -> None:
        self._commands = commands
        self._clock = clock
        self._memory_file = memory_file
        self._nodes_wanted = nodes_wanted
        self._drain = drain

    def run(self, found: SlurmJob, wanted: Mark, excluded: Sequence[str]) -> SlurmJob:
        """From wherever it stands to a released job, or as far as it goes in one call. See `Allocation.replace`."""
        mark = mark_of(found.comment) or Mark(wanted.job)
        ours = (mark.attempt, mark.token) == (wanted.attempt, wanted.token)
        if mark.attempt > wanted.attempt or (mark.attempt == wanted.attempt and not ours):
            raise Conflict(f"attempt {mark.attempt} stands on Slurm job {found.job_id}, {wanted.attempt} is not newer")
        if ours and mark.stage == "requeued" and found.phase != "ended":
            return found
        if not (ours and mark.stage == "requeueing"):
            self._refuse_what_cannot_be(found, excluded)
            restarts = found.restarts if found.phase == "pending" else found.restarts + 1
            mark = Mark(wanted.job, wanted.attempt, wanted.token, "requeueing", restarts)
            # Before anything is stopped: the intent, and the proof that this user may change the job at all.
            self._commands.update_job(found.job_id, Comment=mark.text())
            found = self._again(found)
        return self._go_on(found, mark, excluded)

    def memory(self) -> SlurmMemory:
        try:
            return read_file(self._memory_file, SlurmMemory) or SlurmMemory()
        except BrokenJobFile as error:
            raise Unavailable(str(error)) from error

    def _go_on(self, found: SlurmJob, mark: Mark, excluded: Sequence[str]) -> SlurmJob:
        deadline = self._clock.monotonic() + SETTLE_SECONDS_MAX
        while True:
            if mark_of(found.comment) != mark:
                raise Conflict(f"somebody else has written {found.comment!r} on Slurm job {found.job_id}")
            if found.is_over:
                raise Rejected(f"Slurm job {found.job_id} has ended ({found.state}); terminal stays terminal")
            if held_by_a_person(found):
                return found
            if found.restarts < mark.restarts:
                if found.phase in ("running", "ended"):
                    self._hold(found)
            elif found.phase == "pending":
                return self._release(found, mark, excluded)
            elif found.phase == "running":  # released, by an earlier call of ours or by a person
                self._say_done(found, mark)
                return self._again(found)
            if self._clock.monotonic() >= deadline:
                return found
            self._clock.sleep(POLL_SECONDS)
            found = self._again(found)

    def _hold(self, found: SlurmJob) -> None:
        try:
            self._commands.requeue_hold(found.job_id)
        except Conflict:
            return  # it runs no more: the next look says what it does

    def _release(self, found: SlurmJob, mark: Mark, excluded: Sequence[str]) -> SlurmJob:
        self._set_exclusions(found, excluded)
        self._await_the_next_second()
        if found.held:
            self._commands.release(found.job_id)
        self._say_done(found, mark)
        return self._again(found)

    def _await_the_next_second(self) -> None:
        """A slurmd takes no new credential for a job from the second in which it revoked the old one: the job would
        fail at once on a node that it had before ("Job credential revoked", Slurm 22.05)."""
        self._clock.sleep(1.0 - self._clock.now() % 1.0 + CLOCKS_APART_SECONDS)

    def _say_done(self, found: SlurmJob, mark: Mark) -> None:
        done = Mark(mark.job, mark.attempt, mark.token, "requeued", mark.restarts)
        self._commands.update_job(found.job_id, Comment=done.text())

    def _set_exclusions(self, found: SlurmJob, excluded: Sequence[str]) -> None:
        """Ours in place of ours, others' as they are; and StartTime=now: alone, Slurm would wait for two minutes."""
        memory = self.memory()
        now = set(self._commands.hostnames(found.excluded))
        wanted = (now - set(memory.excluded)) | set(excluded)
        ours = tuple(sorted({*memory.excluded, *(set(excluded) - now)}))
        memory = msgspec.structs.replace(memory, excluded=ours)
        if self._drain:
            memory = self._drained(memory, mark_of(found.comment), excluded)
        write_file(self._memory_file, memory)
        fields = {"StartTime": "now"}
        if wanted != now:
            fields["ExcNodeList"] = ",".join(sorted(wanted))
        try:
            self._commands.update_job(found.job_id, **fields)
        except Conflict:  # a person has released it just now
            return

    def _drained(self, memory: SlurmMemory, mark: Mark | None, nodes: Sequence[str]) -> SlurmMemory:
        """Each bad node drained once; a missing right is said, and stops nothing."""
        job = mark.job if mark else ""
        for node in nodes:
            if node in memory.drained:
                continue  # a person who resumed it knows better
            try:
                told = self._commands.node(node)
                if told is not None and not told.draining:
                    self._commands.drain(node, f"transom {job}")
                memory = msgspec.structs.replace(memory, drained=(*memory.drained, node))
            except BackendError as error:  # the job is what matters; ExcNodeList keeps it off that node anyway
                notes = dict.fromkeys((*memory.notes, f"{node} is not drained: {error}"))
                memory = msgspec.structs.replace(memory, notes=tuple(notes)[-NOTES_MAX:])
        return memory

    def _refuse_what_cannot_be(self, found: SlurmJob, excluded: Sequence[str]) -> None:
        """Before anything is stopped: a requeue after which the job could never run again."""
        number = found.job_id
        if found.held:
            raise Rejected(f"Slurm job {number} is held ({found.reason}); `scontrol release {number}` lets it run")
        if not found.requeue:
            raise Rejected(
                f"Slurm job {number} may not be requeued (--no-requeue, or JobRequeue=0 at this site); "
                f"`scontrol update JobId={number} Requeue=1` allows it"
            )
        without = set(excluded)
        asked = sorted(set(self._commands.hostnames(found.requested)) & without)
        if asked:
            raise Rejected(f"Slurm job {number} asks for {asked[0]} by name (--nodelist), which is excluded")
        others = set(self._commands.hostnames(found.excluded)) - set(self.memory().excluded)
        usable = self._commands.nodes_of_partition(found.partition) - without - others
        wanted = self._nodes_wanted or found.nodes_wanted
        if len(usable) < wanted:
            raise TooFewNodes(
                f"Slurm job {number} needs {wanted} nodes, and partition {found.partition} has {len(usable)} that can "
                f"be used ({len(without | others)} excluded)",
                len(usable),
            )

    def _again(self, found: SlurmJob) -> SlurmJob:
        now = self._commands.job(found.job_id)
        if now is None:
            raise Rejected(f"Slurm does not know its job {found.job_id} any more")
        return now


def held_by_a_person(found: SlurmJob) -> str:
    """How to say it; empty where nobody holds it, or only we do, for the moment between requeue and release."""
    number = found.job_id
    if found.state in ("SUSPENDED", "STOPPED"):
        return f"Slurm job {number} is {found.state.lower()}; `scontrol resume {number}` lets it go on"
    if found.phase != "pending" or not found.held:
        return ""
    mark = mark_of(found.comment)
    if mark is not None and mark.stage == "requeueing" and not found.reason.startswith("JobHeld"):
        return ""
    return f"Slurm job {number} is held ({found.reason}); `scontrol release {number}` lets it run"
