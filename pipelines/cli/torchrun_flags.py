"""torchrun's flags that we cannot keep: each is refused with a sentence that says what to do."""

from __future__ import annotations

from pipelines.errors import StatedError

ONE_MACHINE = "all nodes of this job are on this machine, and each attempt gets a free port: leave it out"
OUTPUT = "what the ranks print is shown (not with --quiet) and recorded, by rank: leave it out"
PYTHON = "ranks are forked from a Python process: give a script or -m MODULE"
REFUSED = {
    "max-restarts": "restarts are recovery's: set recover.restarts_max and recover.same_cause_max in transom.toml, "
    "and run `transom up` beside the job",
    "master-addr": ONE_MACHINE,
    "master-port": ONE_MACHINE,
    "local-addr": ONE_MACHINE,
    "node-rank": ONE_MACHINE,
    "rdzv-backend": ONE_MACHINE,
    "rdzv-endpoint": ONE_MACHINE,
    "rdzv-conf": ONE_MACHINE,
    "log-dir": OUTPUT,
    "redirects": OUTPUT,
    "r": OUTPUT,
    "tee": OUTPUT,
    "t": OUTPUT,
    "local-ranks-filter": OUTPUT,
    "no-python": PYTHON,
    "run-path": PYTHON,
    "start-method": PYTHON,
    "monitor-interval": "the end of a rank is seen at once: leave it out",
    "role": "ranks have one role: leave it out",
}


class FlagRefused(StatedError):
    """A flag before the script cannot be done; the text says what to do instead."""


def refuse_flag(flag: str) -> None:
    """Raise FlagRefused for what stands where the script should: a flag that `transom run` does not have."""
    name = flag.partition("=")[0]
    why = REFUSED.get(name.lstrip("-").replace("_", "-"))
    if why is not None:
        raise FlagRefused(f"`transom run` does not take torchrun's {name}: {why}")
    raise FlagRefused(
        f"`transom run` has no flag {name}; flags of the script stand after the script, `transom run --help` lists ours"
    )


def refuse_more_machines(nnodes: str) -> None:
    """Raise FlagRefused unless --nnodes says one machine: ours are parts of this one, and --virtual-nodes says so."""
    if nnodes not in ("1", "1:1"):
        raise FlagRefused(
            f"--nnodes {nnodes} would be more than this machine, and `transom run` starts a job on one; "
            "to divide this machine into nodes use --virtual-nodes"
        )


def node_counts(backend: str, nnodes: str, virtual_nodes: int, min_nodes: int) -> tuple[int, int]:
    """How many nodes a job has, and on how few it may go on (0: on no fewer). Raises FlagRefused.

    On this machine `--virtual-nodes` says it, with a scheduler `--nnodes N` or, as torchrun has it, `MIN:MAX`.
    """
    nodes = virtual_nodes
    if backend == "local":
        refuse_more_machines(nnodes)
    else:
        low, _, high = nnodes.partition(":")
        if not (low.isdecimal() and (high or low).isdecimal()) or not 0 < int(low) <= int(high or low):
            raise FlagRefused(f"--nnodes {nnodes} is no number of nodes; give N, or MIN:MAX")
        nodes = int(high or low)
        min_nodes = min_nodes or (int(low) if int(low) < nodes else 0)
    if min_nodes > nodes:
        raise FlagRefused(f"--min-nodes {min_nodes} is more than the job's {nodes} nodes; give a smaller number")
    return nodes, min_nodes
