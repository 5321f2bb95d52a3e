"""Which column of a table is the rank, the step, the time and which metric: as a TOML file says, or guessed by name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from detectors.steps import FEATURES

from .run import NotARun

TimeUnit = Literal["s", "ms", "us", "ns", "iso"]
Role = Literal["rank", "step", "time", "node", "attempt", "metric", "value"]
OTHERS_MAX = 64  # metrics that detection does not know, carried for people
KEY_CHARACTERS_MAX = 200

ROLE_NAMES: Mapping[Role, tuple[str, ...]] = {
    "rank": ("rank", "global_rank", "process_index", "rank_id", "worker"),
    "step": ("step", "global_step", "iteration", "iter", "trainer_global_step", "train_step", "num_updates"),
    "time": (
        "ended_at", "event_at", "time", "timestamp", "wall_time", "walltime", "ts", "datetime", "date", "at",
        "created_at",
    ),
    "node": ("node", "host", "hostname", "node_name"),
    "attempt": ("attempt", "restart", "restart_count"),
    "metric": ("metric", "metric_name", "tag"),
    "value": ("value", "metric_value"),
}  # fmt: skip
METRIC_NAMES: Mapping[str, tuple[str, ...]] = {
    "train.step.duration": (
        "step_time", "step_seconds", "step_duration", "iteration_time", "iter_time", "time_per_step", "step_time_s",
        "perf_step_time", "elapsed_time_per_iteration", "train_step_timing_in_s", "batch_time",
    ),
    "train.data.duration": ("data_time", "data_seconds", "data_wait", "dataloader_time", "data_loading_time"),
    "train.forward.duration": ("forward_time", "forward_seconds", "fwd_time"),
    "train.backward.duration": ("backward_time", "backward_seconds", "bwd_time"),
    "train.optimizer.duration": ("optimizer_time", "optimizer_seconds", "optimizer_step_time"),
    "train.compute.duration": ("compute_time", "compute_seconds"),
    "train.compute.own": ("compute_own_time", "own_compute_time"),
    "train.collective.wait": ("comm_time", "collective_wait", "allreduce_time", "all_reduce_time", "nccl_time"),
    "train.loss": ("loss", "train_loss", "lm_loss", "training_loss", "loss_train"),
    "train.gradient.norm": ("grad_norm", "gradient_norm", "global_norm", "train_grad_norm", "gnorm"),
    "train.gradient.local_norm": ("local_grad_norm", "local_gradient_norm"),
    "train.learning_rate": ("lr", "learning_rate", "train_learning_rate", "train_lr"),
    "train.samples": ("samples", "batch_size", "global_batch_size"),
    "train.tokens": ("tokens", "num_tokens", "tokens_per_step"),
}  # fmt: skip
_MILLISECONDS = re.compile(r"_(?:ms|msec|milliseconds?)$")


class MetricColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column, and what to multiply it with."""

    column: str
    scale: float = 1.0


class MappingFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping as its TOML file has it. What it does not name is guessed."""

    job: str | None = None
    rank: str | None = None
    step: str | None = None
    time: str | None = None
    time_unit: TimeUnit | None = None
    node: str | None = None
    attempt: str | None = None
    metric: str | None = None  # of a long table: the column with the metric's name, and the one with its value
    value: str | None = None
    ranks_per_node: int | None = None
    metrics: dict[str, str | MetricColumn] = {}


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """What was found: columns by role, and metrics by the name that detection knows."""

    roles: Mapping[Role, str]
    metrics: Mapping[str, MetricColumn]
    time_unit: TimeUnit | None
    ranks_per_node: int | None
    job: str | None
    notes: tuple[str, ...] = field(default=())

    @property
    def long(self) -> bool:
        """One row for each sample."""
        return "metric" in self.roles and "value" in self.roles


def read_mapping(path: Path | None) -> MappingFile:
    """The TOML file; an empty mapping where there is none. Raises NotARun."""
    if path is None:
        return MappingFile()
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), MappingFile)
    except OSError as error:
        raise NotARun(f"the mapping {path} cannot be read ({error.strerror}); give another file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise NotARun(f"the mapping {path} is wrong: {error}; docs/replay.md shows one") from error


def map_columns(columns: Sequence[str], numbers: Sequence[str], given: MappingFile) -> ColumnMap:
    """Roles and metrics of these columns; `numbers` may be metrics. Raises NotARun for a column that is not there."""
    notes: list[str] = []
    roles = _roles(columns, given, notes)
    taken = set(roles.values())
    metrics: dict[str, MetricColumn] = {}
    for name, chosen in given.metrics.items():
        metric = MetricColumn(chosen) if isinstance(chosen, str) else chosen
        _check(metric.column, columns, f"metrics.{name}")
        metrics[name] = metric
    if not ("metric" in roles and "value" in roles):
        taken |= {metric.column for metric in metrics.values()}
        _guess_metrics([name for name in numbers if name not in taken], metrics, notes)
    return ColumnMap(roles, metrics, given.time_unit, given.ranks_per_node, given.job, tuple(notes))


def metrics_of(told: Sequence[str], given: MappingFile) -> tuple[dict[str, MetricColumn], tuple[str, ...]]:
    """The same for the metrics of a long table, by the names that stand in it."""
    notes: list[str] = []
    metrics = {
        name: MetricColumn(chosen) if isinstance(chosen, str) else chosen for name, chosen in given.metrics.items()
    }
    for name, metric in metrics.items():
        _check(metric.column, told, f"metrics.{name}")
    taken = {metric.column for metric in metrics.values()}
    _guess_metrics([name for name in told if name not in taken], metrics, notes)
    return metrics, tuple(notes)


def plain(column: str) -> str:
    """A column's name in lower case with nothing but letters, digits and single underscores."""
    return re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_")


def _roles(columns: Sequence[str], given: MappingFile, notes: list[str]) -> dict[Role, str]:
    roles: dict[Role, str] = {}
    by_plain: dict[str, str] = {}
    for column in columns:
        by_plain.setdefault(plain(column), column)
    for role, names in ROLE_NAMES.items():
        named: str | None = getattr(given, role)
        if named is not None:
            _check(named, columns, role)
            roles[role] = named
            continue
        found = [by_plain[name] for name in names if name in by_plain]
        if found:
            roles[role] = found[0]
            also = f" (and not {', '.join(repr(name) for name in found[1:])})" if found[1:] else ""
            notes.append(f"{role} is read from the column {found[0]!r}{also}.")
    if "metric" not in roles or "value" not in roles:
        lone = roles.keys() & {"metric", "value"}
        for role in lone:  # a column called `value` alone is a metric like any other
            notes[:] = [note for note in notes if not note.startswith(f"{role} is read")]
            del roles[role]
    return roles


def _guess_metrics(numbers: Sequence[str], metrics: dict[str, MetricColumn], notes: list[str]) -> None:
    left = [name for name in numbers if len(name) <= KEY_CHARACTERS_MAX]
    known = {name: feature for feature, names in METRIC_NAMES.items() for name in names}
    for column in list(left):
        if column in FEATURES:  # our own names
            metrics.setdefault(column, MetricColumn(column))
            left.remove(column)
    for column in list(left):
        short = plain(column)
        scale = 1e-3 if _MILLISECONDS.search(short) else 1.0
        short = _MILLISECONDS.sub("", short)
        feature = known.get(short) or known.get(short.removeprefix("train_")) or known.get(short.removeprefix("perf_"))
        if feature is None or feature in metrics:
            continue
        metrics[feature] = MetricColumn(column, scale)
        left.remove(column)
        notes.append(f"{feature} is read from {column!r}{', in milliseconds' if scale != 1.0 else ''}.")
    for column in left[:OTHERS_MAX]:
        name = column if column.startswith(("train.", "hw.", "process.", "system.")) else f"train.{plain(column)}"
        metrics.setdefault(name, MetricColumn(column))
    if len(left) > OTHERS_MAX:
        notes.append(f"{len(left) - OTHERS_MAX} more columns are left out; name those that matter in --mapping.")


def _check(column: str, columns: Sequence[str], key: str) -> None:
    if column not in columns:
        there = ", ".join(list(columns)[:12])
        raise NotARun(f"the mapping says {key} = {column!r}, but there is no such column; there are: {there}")
