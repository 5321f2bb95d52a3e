"""The batch script of a job on Slurm: one launcher on each node, in a step that outlives nodes and ranks. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .slurm_text import LAUNCHERS_LOST, Mark


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of `recover.backends` that is Slurm's; docs/slurm.md explains each."""

    sbatch: tuple[str, ...] = ()  # options of sbatch(1) as they are: --partition=gpu, --gres=gpu:8, --time=24:00:00
    notice_seconds: int = 120  # SIGTERM to the launchers so long before the time limit
    drain: bool = False  # drain a node that is excluded; takes an operator
    read_seconds_max: float = 5.0
    write_seconds_max: float = 15.0
    end_seconds_max: float = 60.0  # for a job to end by itself once its launchers have been told; then it is cancelled


def batch_script(
    job: str, *, nodes_min: int, nodes_max: int, command: Sequence[str], folder: Path, options: SlurmOptions
) -> str:
    """For sbatch(1). `folder`: the job's own, which all nodes see; `command` runs once on each node.

    `--no-kill` lets the job outlive a node, `singleton` one of that name at a time, and the exit code is the
    job's outcome, so that other jobs may depend on it.
    """
    span = str(nodes_max) if nodes_min == nodes_max else f"{nodes_min}-{nodes_max}"
    asked = [
        f"--job-name={job}",
        f"--comment={Mark(job).text()}",
        f"--nodes={span}",
        "--dependency=singleton",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        f"--output={folder / 'slurm.log'}",
        f"--signal=TERM@{options.notice_seconds}",
        *options.sbatch,
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {_directive(option)}" for option in asked)]
    outcome = shlex.quote(str(folder / "outcome.json"))
    return "\n".join(
        [
            *lines,
            f"grep -qs '\"outcome\"' {outcome} && exit 1  # over, and requeued all the same: terminal stays terminal",
            # --wait=0 and --kill-on-bad-exit=0: the launchers of other nodes stay when one has ended. A launcher is one
            # task, and all that the job has on its node is for its ranks: --cpu-bind=none, --mem=0.
            'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap \\',
            "  --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --mem=0 --mpi=none \\",
            f"  {shlex.join(command)}",
            f"[ -e {outcome} ] || exit {LAUNCHERS_LOST}  # every launcher is gone, and nobody has said that it is over",
            f'grep -qs \'"outcome": *"finished"\' {outcome}',
            "",
        ]
    )


def _directive(option: str) -> str:
    """As sbatch reads it from a comment: with quotes where there are spaces."""
    name, equals, value = option.partition("=")
    return f'{name}="{value}"' if equals and any(letter.isspace() for letter in value) else option
