"""A real Slurm in a folder of its own: slurmctld and virtual nodes, each with its slurmd, on ports that were free."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from recovery.backends.slurm_cli import SlurmCommands, SlurmTimes
from recovery.backends.slurm_text import SlurmJob
from tests.launcher_lab import wait_for
from tests.machine import program

CPUS_OF_A_NODE = 8  # more than there are, so that nobody waits for a processor
UP_SECONDS_MAX = 60.0
END_SECONDS_MAX = 30.0
CONFIG = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
MailProg=/bin/true
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
SlurmctldTimeout=30
SlurmdTimeout={slurmd_timeout}
KillWait=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
"""


class SlurmLab:
    """Nodes n1 … nN. Needs the packages slurmctld, slurmd and slurm-client; skips, with the reason, without them."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 4,
        *,
        slurmd_timeout_seconds: int = 30,
        switches: Mapping[str, str] | None = None,
    ) -> None:
        """`switches`: the nodes below each, as Slurm spells host lists; all of them hang on one more."""
        self._slurmctld = str(program("slurmctld"))
        self._slurmd = str(program("slurmd"))
        program("srun")
        self.folder = folder
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "run", "log", *(f"spool/{node}" for node in self.nodes)):
            (folder / name).mkdir(parents=True)
        host = socket.gethostname().split(".")[0]
        ports = free_ports(1 + nodes)
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_OF_A_NODE}"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        self.config = folder / "slurm.conf"
        self.config.write_text(
            CONFIG.format(
                host=host, port=ports[0], user=getpass.getuser(), folder=folder, slurmd_timeout=slurmd_timeout_seconds
            )
            + "\n".join([*lines, "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP", ""])
        )
        if switches:
            leaves = [f"SwitchName={name} Nodes={below}" for name, below in switches.items()]
            top = f"SwitchName=core Switches={','.join(switches)}"
            (folder / "topology.conf").write_text("\n".join([*leaves, top, ""]))
            with self.config.open("a") as config:
                config.write("TopologyPlugin=topology/tree\n")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        self.environ: Mapping[str, str] = {**kept, "SLURM_CONF": str(self.config)}
        self.commands = self.commands_within(SlurmTimes())

    def commands_within(self, times: SlurmTimes) -> SlurmCommands:
        return SlurmCommands(self.environ, times)

    # Up and down

    def start_controller(self) -> None:
        self._start("slurmctld", self._slurmctld, "-D", "-f", str(self.config))

    def start_slurmd(self, node: str) -> None:
        self._start(node, self._slurmd, "-D", "-f", str(self.config), "-N", node)

    def up(self) -> None:
        self.start_controller()
        for node in self.nodes:
            self.start_slurmd(node)
        wait_for(lambda: self.idle() == set(self.nodes), f"all nodes idle; see {self.folder}/log", UP_SECONDS_MAX)

    def down(self) -> None:
        """Everything that was started in this lab ends, also the steps of a slurmd that was killed."""
        with suppress(OSError, subprocess.SubprocessError):
            self.thaw_controller()
            self.run("scancel", f"--user={getpass.getuser()}", check=False)
        for _ in range(2):
            for process in self._processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
            for pid in self._ours():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(AssertionError):
                wait_for(lambda: not self._ours(), "nothing of the lab runs", 5.0)

    # Asking and breaking

    def run(self, *command: str, check: bool = True, given: str | None = None) -> str:
        """One of Slurm's commands, as a person would type it."""
        done = subprocess.run(
            command, env=dict(self.environ), input=given, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def idle(self) -> set[str]:
        with suppress(AssertionError):
            return set(self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split())
        return set()

    def job(self, job_id: int) -> SlurmJob:
        found = self.commands.job(job_id)
        assert found is not None
        return found

    def state(self, job_id: int) -> str:
        return self.job(job_id).state

    def wait_for_phase(self, job_id: int, phase: str) -> SlurmJob:
        wait_for(lambda: self.job(job_id).phase == phase, f"job {job_id} is {phase}", END_SECONDS_MAX)
        return self.job(job_id)

    def cancel(self, job_id: int) -> None:
        """Returns when it has ended and its nodes are free."""
        self.run("scancel", str(job_id), check=False)
        self.wait_for_phase(job_id, "ended")

    def freeze_controller(self) -> None:
        self._processes["slurmctld"].send_signal(signal.SIGSTOP)

    def thaw_controller(self) -> None:
        if self._processes["slurmctld"].poll() is None:
            self._processes["slurmctld"].send_signal(signal.SIGCONT)

    def stop_controller(self) -> None:
        self._processes["slurmctld"].terminate()
        self._processes["slurmctld"].wait(END_SECONDS_MAX)

    def kill_slurmd(self, node: str) -> None:
        """As when a host dies for the controller; its steps live on, which is the point."""
        self._processes[node].kill()
        self._processes[node].wait()

    def take_down(self, node: str) -> None:
        """A host dies, and Slurm has noticed: its slurmd is heard of no more, and what it ran lives on."""
        self.kill_slurmd(node)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def bring_up(self, node: str) -> None:
        if self._processes[node].poll() is not None:
            self.start_slurmd(node)
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    def clear(self) -> None:
        """No job is left, and what a test broke is whole for the next one."""
        self.thaw_controller()
        if self._processes["slurmctld"].poll() is not None:
            self.start_controller()
        for node in self.nodes:
            if self._processes[node].poll() is not None:
                self.start_slurmd(node)

        def whole() -> bool:
            queued = bool(self.run("squeue", "--noheader", "--format=%A", check=False).split())
            if queued:
                self.run("scancel", f"--user={getpass.getuser()}", check=False)
            bad = set(self.nodes) - self.idle()
            for node in bad:
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
            return not bad and not queued

        wait_for(whole, f"all nodes idle again; see {self.folder}/log", UP_SECONDS_MAX)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command, env=dict(self.environ), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, cwd=self.folder,
            )  # fmt: skip

    def _ours(self) -> list[int]:
        """Processes of this lab's steps: they carry its SLURM_CONF, or hold a file below its folder open."""
        mark = f"SLURM_CONF={self.config}".encode()
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal() and int(path.name) != os.getpid():
                with suppress(OSError):
                    if mark in (path / "environ").read_bytes() or any(
                        str(link.readlink()).startswith(f"{self.folder}/") for link in (path / "fd").iterdir()
                    ):
                        found.append(int(path.name))
        return found


def free_ports(count: int) -> list[int]:
    """So many different ports that nobody listens on just now."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
        return ports


@contextmanager
def slurm_lab(folder: Path, nodes: int = 4) -> Iterator[SlurmLab]:
    """Up when it is entered, down when it is left, whatever happened in between."""
    lab = SlurmLab(folder, nodes)
    try:
        lab.up()
        yield lab
    finally:
        lab.down()
