"""Slurm's own commands, as argument vectors in the C locale, bounded in time, their errors told by what they mean."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ingest.clock import Clock, SystemClock
from recovery.backend import Ambiguous, BackendError, Conflict, Rejected, Unavailable

from .slurm_text import SlurmJob, SlurmNode, UnreadableAnswer, job_of, leaves_of, node_of

ANSWER_BYTES_MAX = 16 * 2**20
HOST_LISTS_MAX = 1_000
SILENT_SECONDS = 3.0  # after a question that took its whole time and was not answered
STDERR_CHARACTERS_MAX = 300
# Variables by which a person changes what these commands print; a program must see the plain form.
FORMATTING = ("SQUEUE_", "SINFO_", "SCONTROL_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SLURM_CLUSTERS")

# What slurm_strerror(3) says, as far as it proves that nothing was done; whatever is not here may have had its effect.
NO_EFFECT: tuple[tuple[str, type[BackendError], str], ...] = (
    ("access/permission denied", Rejected, "this user may not do it: it takes the job's owner or an operator"),
    ("invalid user id", Rejected, "this user may not do it: it takes the job's owner or an operator"),
    ("requested operation is presently disabled", Rejected, "the job may not be requeued (--no-requeue)"),
    ("requested node configuration is not available", Rejected, "too few nodes are left that it could run on"),
    ("invalid node name specified", Rejected, "Slurm knows no node of that name"),
    ("invalid job id specified", Rejected, "Slurm does not know the job any more"),
    ("invalid partition", Rejected, "Slurm knows no partition of that name"),
    ("job is pending execution", Conflict, "the job does not run"),
    ("job is no longer pending execution", Conflict, "the job does not wait any more"),
    ("job/step already completing or completed", Conflict, "the job is ending"),
    ("job has already finished", Conflict, "the job has ended"),
    ("connect failure", Unavailable, "slurmctld cannot be reached"),
    ("in standby mode", Unavailable, "slurmctld is the backup, in stand-by"),
)
Told = TypeVar("Told", SlurmJob, SlurmNode)
UNKNOWN = ("invalid job id specified", "invalid node name specified", "not found")  # an answer too: there is none


@dataclass(frozen=True, slots=True)
class SlurmTimes:
    """How long a command may take: Slurm's own MessageTimeout is 10 s unless the site has set another."""

    read_seconds_max: float = 5.0
    write_seconds_max: float = 15.0


@dataclass(frozen=True, slots=True)
class Printed:
    """What a command ended with."""

    code: int
    out: str
    err: str


class SlurmCommands:
    """The few commands that recovery needs. `environ`: PATH, and SLURM_CONF where the site uses it.

    Reads raise Unavailable where nobody answers, and for a while without asking again, so that who can do without
    (launchers answer for themselves) does not wait each time; writes raise Ambiguous where they may have had their
    effect.
    """

    def __init__(self, environ: Mapping[str, str], times: SlurmTimes | None = None, clock: Clock | None = None) -> None:
        plain = {name: value for name, value in environ.items() if not name.startswith(FORMATTING)}
        self._environ = {**plain, "LC_ALL": "C", "LANG": "C", "SLURM_TIME_FORMAT": "standard"}
        self._times = times or SlurmTimes()
        self._clock = clock or SystemClock()
        self._silent: tuple[float, str] = (float("-inf"), "")  # until when nobody is asked, and why
        self._hostnames: dict[str, tuple[str, ...]] = {}

    # Reading

    def jobs_named(self, name: str) -> list[tuple[int, str, str]]:
        """Id, state and comment of every job of that name that Slurm still knows, ended ones too."""
        out = self._read("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%A|%T|%k")
        rows = []
        for line in (out or "").splitlines():
            parts = line.split("|", 2)
            if len(parts) != 3 or not parts[0].strip().isdecimal():
                raise Unavailable(f"squeue told a job in a way that is not understood: {line[:80]!r}")
            rows.append((int(parts[0]), parts[1].strip(), parts[2].strip()))
        return rows

    def job(self, job_id: int) -> SlurmJob | None:
        """None only where slurmctld itself says that it does not know it."""
        out = self._read("scontrol", "--oneliner", "show", "job", str(job_id))
        return None if out is None else _understood(job_of, out)

    def node(self, name: str) -> SlurmNode | None:
        """None only where slurmctld itself says that it does not know it."""
        out = self._read("scontrol", "--oneliner", "show", "node", name)
        return None if out is None else _understood(node_of, out)

    def nodes_of_partition(self, partition: str) -> frozenset[str]:
        """Every node that a job of this partition (or these, with commas) could ever get, whatever its state."""
        out = self._read("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N")
        return frozenset((out or "").split())

    def down_nodes(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of these nodes that Slurm has given up: DOWN, whether by itself or by an operator's word."""
        wanted = sorted(set(names))
        if not wanted:
            return ()
        out = self._read("sinfo", "--noheader", "--Node", f"--nodes={','.join(wanted)}", "--format=%N|%T")
        rows = {name: state for name, _, state in (line.strip().partition("|") for line in (out or "").splitlines())}
        return tuple(name for name in wanted if rows.get(name, "").lower().startswith("down"))

    def leaves(self) -> tuple[tuple[str, str], ...]:
        """Each lowest switch or block with its host list; empty where the site has told Slurm of none."""
        return leaves_of(self._read("scontrol", "show", "topology") or "")

    def hostnames(self, host_list: str) -> tuple[str, ...]:
        """`n[1-2]` as n1, n2. scontrol does this without a controller."""
        if not host_list:
            return ()
        if host_list not in self._hostnames:
            printed = self._run(
                ("scontrol", "show", "hostnames", host_list), self._times.read_seconds_max, late=Unavailable
            )
            names = tuple(printed.out.split())
            if printed.code != 0 or not names:
                raise Unavailable(f"scontrol did not read the host list {host_list!r} ({_short(printed)})")
            if len(self._hostnames) >= HOST_LISTS_MAX:
                self._hostnames.clear()
            self._hostnames[host_list] = names
        return self._hostnames[host_list]

    # Writing

    def update_job(self, job_id: int, **fields: str) -> None:
        """`scontrol update`; fields as scontrol(1) names them. Raises any BackendError."""
        self._write("scontrol", "update", f"JobId={job_id}", *(f"{key}={value}" for key, value in fields.items()))

    def requeue_hold(self, job_id: int) -> None:
        """Stop the job and put it back into the queue, where it waits until it is released."""
        self._write("scontrol", "requeuehold", str(job_id))

    def release(self, job_id: int) -> None:
        self._write("scontrol", "release", str(job_id))

    def cancel(self, job_id: int) -> None:
        self._write("scancel", str(job_id))

    def drain(self, node: str, reason: str) -> None:
        """No further job starts there; those that run go on. Takes an operator."""
        self._write("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def submit(self, script: str, *options: str) -> int:
        """`sbatch` with the script on standard input; the job's id."""
        out = self._write("sbatch", "--parsable", *options, given=script)
        number = out.strip().split(";")[0]
        if not number.isdecimal():
            raise Ambiguous(f"sbatch did not say which job it made ({out.strip()[:80]!r}); look with squeue")
        return int(number)

    def run_beside(self, job_id: int, node: str, command: Sequence[str], *, seconds_max: float) -> bool:
        """Whether a short command, run on one node of a running job beside what runs there, ended with 0 in time."""
        beside = (
            "srun", f"--jobid={job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap", "--mpi=none",
            "--chdir=/", "--quiet", *command,
        )  # fmt: skip
        # Not what an allocation has put into our own environment: the step is to be what the arguments say.
        kept = {name: text for name, text in self._environ.items() if name == "SLURM_CONF" or name[:5] != "SLURM"}
        try:
            return self._run(beside, seconds_max, late=Unavailable, environ=kept).code == 0
        except Unavailable:
            return False

    # Running

    def _read(self, *command: str) -> str | None:
        silent_until, why = self._silent
        if self._clock.monotonic() < silent_until:
            raise Unavailable(why)
        try:
            printed = self._run(command, self._times.read_seconds_max, late=Unavailable)
        except Unavailable as error:
            self._silent = (self._clock.monotonic() + SILENT_SECONDS, str(error))
            raise
        if printed.code == 0:
            return printed.out
        said = printed.err.lower()
        if any(words in said for words in UNKNOWN):
            return None
        if "access/permission denied" in said:
            raise Rejected(f"{command[0]} refused: this user may not see it ({_short(printed)})")
        raise Unavailable(f"{command[0]} got no answer from slurmctld ({_short(printed)})")

    def _write(self, *command: str, given: str | None = None) -> str:
        printed = self._run(command, self._times.write_seconds_max, late=Ambiguous, given=given)
        if printed.code == 0:
            return printed.out
        what = " ".join(command[:2])
        said = printed.err.lower()
        for words, error, meaning in NO_EFFECT:
            if words in said:
                raise error(f"`{what}` was not done: {meaning} ({_short(printed)})")
        raise Ambiguous(f"`{what}` ended with {printed.code} and may have been done all the same ({_short(printed)})")

    def _run(
        self,
        command: Sequence[str],
        seconds_max: float,
        *,
        late: type[BackendError],
        given: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Printed:
        try:
            done = subprocess.run(
                list(command),
                env=environ or self._environ,
                input=(given or "").encode(),
                capture_output=True,
                timeout=seconds_max,
                check=False,
            )
        except FileNotFoundError as error:
            raise Rejected(f"there is no {command[0]} on the path; install Slurm's client commands here") from error
        except subprocess.TimeoutExpired as error:
            raise late(f"`{' '.join(command[:2])}` did not end within {seconds_max:g} s") from error
        except OSError as error:
            raise Unavailable(f"{command[0]} cannot be started ({error.strerror})") from error
        if len(done.stdout) > ANSWER_BYTES_MAX:
            raise late(f"{command[0]} printed more than {ANSWER_BYTES_MAX} bytes")
        return Printed(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def _understood(parse: Callable[[str], Told], out: str) -> Told:
    try:
        return parse(out)
    except UnreadableAnswer as error:
        raise Unavailable(str(error)) from error


def _short(printed: Printed) -> str:
    words = " ".join((printed.err or printed.out).split())
    return words[:STDERR_CHARACTERS_MAX] or "it said nothing"
