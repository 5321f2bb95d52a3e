"""A table as a historic run: sorted by time on disk where memory does not hold it, then cut into blocks of steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from detectors.diagnosis.places import Speaker
from detectors.step_block import StepBlock
from ingest.events import AT_MAX, RANK_MAX, STEP_MAX, AttemptStarted, RankPlace
from pipelines.ledger.engine import duckdb, pa

from .blocks import TICKS_A_SECOND, BlockCutter, Places
from .mapping import ColumnMap, MappingFile, MetricColumn, map_columns, metrics_of
from .run import NotARun, Told
from .tables import FILE, Columns, Table, connect, literal, quoted

READ_ROWS = 65_536
RANKS_MAX = 200_000  # of all attempts together
METRICS_MAX = 512
DURATION = "train.step.duration"
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "iso": "dates"}


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is asked of the table."""

    select: str  # attempt, rank, node, step, at and metrics, in no order
    metrics: tuple[str, ...]
    plain: bool  # rows come as they stand in the file, whichever columns are asked for


class TableRun:
    """See `HistoricRun`. `speakers`: what a file's name tells of those whose rows it holds."""

    def __init__(self, table: Table, job: str, given: MappingFile, speakers: dict[Path, Speaker]) -> None:
        self.job = given.job or job
        self.kind = table.kind
        self.notes: tuple[str, ...] = ()
        self.interval_seconds = 0.0
        self._table = table
        self._given = given
        self._speakers = speakers

    def told(self) -> Iterator[Told]:
        with tempfile.TemporaryDirectory(prefix="transom-") as spill:
            connection = connect(Path(spill))
            try:
                yield from self._told(connection)
            except duckdb.Error as error:
                raise NotARun(f"{self._table.files[0]} cannot be read: {str(error).splitlines()[0]}") from error
            finally:
                connection.close()

    def _told(self, connection: duckdb.DuckDBPyConnection) -> Iterator[Told]:
        source, columns = self._table.open(connection)
        if source == "rows":  # a stream is read once, and we ask more than once
            connection.execute("CREATE TABLE held AS SELECT * FROM rows")
            source = "held"
        plan = self._plan(connection, source, columns)
        places = self._look(connection, plan)
        asked = f"FROM ({plan.select}) WHERE step IS NOT NULL AND event_at IS NOT NULL"
        # a tick of detection sees what had ended by then: rows are taken together by ticks, not by their own times
        ordered_already = plan.plain and _in_order(connection, asked)
        order = "" if ordered_already else " ORDER BY ceil(event_at * 4), attempt, step, rank, event_at"
        ordered = connection.sql(f"SELECT * {asked}{order}")
        cutter = BlockCutter(self.job, plan.metrics, places)
        started, before = set[int](), 0.0
        batches = (_arrays(batch, plan.metrics) for batch in ordered.to_arrow_reader(READ_ROWS))
        for one in chain(chain.from_iterable(cutter.cut(*batch) for batch in batches), cutter.rest()):
            if one.attempt not in started:
                started.add(one.attempt)
                yield self._start(one, places, before)
            before = one.at
            yield one

    def _start(self, first: Told, places: Places, before: float) -> AttemptStarted:
        ranks = places.of_attempt(first.attempt)
        nodes = sorted({node for _, node in ranks})
        seen: dict[str, int] = dict.fromkeys(nodes, 0)
        told = []
        for rank, node in ranks:
            told.append(RankPlace(rank=rank, local_rank=seen[node], node=node))
            seen[node] += 1
        began = float(min(first.ended_at)) if isinstance(first, StepBlock) else first.at
        return AttemptStarted(
            job=self.job, attempt=first.attempt, rank=-1, node=nodes[0], sequence=0, at=max(before, began - 1.0),
            world_size=len(ranks), places=tuple(told),
        )  # fmt: skip

    def _plan(self, connection: duckdb.DuckDBPyConnection, source: str, columns: Columns) -> _Plan:
        names = [name for name in (*columns.numbers, *columns.text, *columns.times) if name != FILE]
        found = map_columns(names, columns.numbers, self._given)
        notes = list(found.notes)
        if "step" not in found.roles:
            raise NotARun(
                f'{self._table.files[0]} has no column that looks like a step; name it in --mapping: step = "COLUMN" '
                f"(there are: {', '.join(names[:12])})"
            )
        if found.long:
            source, metrics = self._widened(connection, source, found, notes)
        else:
            metrics = {name: (column, _number(column.column)) for name, column in found.metrics.items()}
        if not metrics:
            raise NotARun(
                f"{self._table.files[0]} has no column of numbers beside step and time; give one with metrics"
            )
        if len(metrics) > METRICS_MAX:
            raise NotARun(f"more than {METRICS_MAX} metrics; name those that matter in --mapping")
        scaled = {
            name: f"{told} * {column.scale!r}" if column.scale != 1.0 else told
            for name, (column, told) in metrics.items()
        }
        select = self._selected(connection, source, found, scaled, notes)
        plain = not found.long and "time" in found.roles and DURATION in metrics
        if DURATION not in metrics:
            scaled[DURATION] = ""
            select = (
                f"SELECT *, CASE WHEN step > lag(step) OVER turn THEN (event_at - lag(event_at) OVER turn) /"
                f" (step - lag(step) OVER turn) END AS {quoted(DURATION)} FROM ({select})"
                " WINDOW turn AS (PARTITION BY attempt, rank ORDER BY event_at, step)"
            )
            notes.append("How long a step takes is told by no column: it is taken from the times between steps.")
        self.notes = tuple(notes)
        return _Plan(select, tuple(scaled), plain)

    def _widened(
        self, connection: duckdb.DuckDBPyConnection, source: str, found: ColumnMap, notes: list[str]
    ) -> tuple[str, dict[str, tuple[MetricColumn, str]]]:
        """One row for each rank and step of a table with one row for each sample."""
        metric, value = quoted(found.roles["metric"]), quoted(found.roles["value"])
        rows = connection.execute(
            f"SELECT DISTINCT {metric} FROM {source} ORDER BY 1 LIMIT {METRICS_MAX + 1}"
        ).fetchall()
        told = [str(name) for (name,) in rows if name is not None]
        metrics, more = metrics_of(told, self._given)
        notes += more
        keys = [column for role, column in found.roles.items() if role not in ("metric", "value", "time")]
        group = ", ".join(quoted(column) for column in (*keys, FILE))
        time = found.roles.get("time")
        late = f", max({quoted(time)}) AS {quoted(time)}" if time is not None else ""
        picked = "".join(
            f", max(TRY_CAST({value} AS DOUBLE)) FILTER ({metric} = {literal(column.column)}) AS {quoted('m' + name)}"
            for name, column in metrics.items()
        )
        wide = f"(SELECT {group}{late}{picked} FROM {source} GROUP BY {group})"
        return wide, {name: (column, quoted("m" + name)) for name, column in metrics.items()}

    def _selected(
        self, connection: duckdb.DuckDBPyConnection, source: str, found: ColumnMap, metrics: dict[str, str],
        notes: list[str],
    ) -> str:  # fmt: skip
        roles = found.roles
        rank = f"TRY_CAST({quoted(roles['rank'])} AS BIGINT)" if "rank" in roles else self._by_file("rank", "0", notes)
        step = f"TRY_CAST(TRY_CAST({quoted(roles['step'])} AS DOUBLE) AS BIGINT)"
        attempt = f"TRY_CAST({quoted(roles['attempt'])} AS BIGINT)" if "attempt" in roles else "1"
        if "node" in roles:
            node = f"CAST({quoted(roles['node'])} AS VARCHAR)"
        elif found.ranks_per_node:
            node = f"'node' || CAST({rank} // {found.ranks_per_node} AS VARCHAR)"
        else:
            node = self._by_file("node", "'node0'", notes)
        at = self._time(connection, source, found, metrics, f"{attempt}, {rank}", step, notes)
        told = "".join(f", {expression} AS {quoted(name)}" for name, expression in metrics.items())
        keys = f"{attempt} AS attempt, {rank} AS rank, {node} AS node, {step} AS step, {at} AS event_at"
        return f"SELECT {keys}{told} FROM {source}"

    def _by_file(self, what: str, otherwise: str, notes: list[str]) -> str:
        """Rank or node by the name of the file where it tells, or by the files' order where there are several."""
        told: dict[Path, str] = {}
        for file, speaker in self._speakers.items():
            value = speaker.node if what == "node" else speaker.rank if speaker.rank is not None else speaker.local
            if value not in (None, ""):
                told[file] = literal(str(value)) if what == "node" else str(value)
        if what == "rank" and len(self._speakers) > 1 and len(set(told.values())) < len(self._speakers):
            told = {file: str(number) for number, file in enumerate(self._speakers)}
            notes.append(f"No column is a rank: the {len(told)} files are ranks 0 to {len(told) - 1} in their order.")
        elif not told:
            if what == "rank":
                notes.append("No column is a rank: all rows are rank 0.")
            else:
                notes.append("Nothing says which rank runs where: all are taken to be on one node (ranks_per_node).")
            return otherwise
        cases = " ".join(f"WHEN {literal(str(file))} THEN {value}" for file, value in told.items())
        return f"CASE {quoted(FILE)} {cases} ELSE {otherwise} END"

    def _time(
        self, connection: duckdb.DuckDBPyConnection, source: str, found: ColumnMap, metrics: dict[str, str],
        turn: str, step: str, notes: list[str],
    ) -> str:  # fmt: skip
        """When a row was told, UTC seconds; where no column says it, by how long the steps took."""
        column = found.roles.get("time")
        if column is None:
            if DURATION not in metrics:
                raise NotARun(
                    f"{self._table.files[0]} has no column of times and none of step durations; name one in --mapping: "
                    'time = "COLUMN"'
                )
            notes.append("No column is a time: the clock begins at 0 and goes by how long the steps took.")
            return f"1.0 + sum({metrics[DURATION]}) OVER (PARTITION BY {turn} ORDER BY {step})"
        name = quoted(column)
        number, date = f"TRY_CAST({name} AS DOUBLE)", f"epoch(TRY_CAST(CAST({name} AS VARCHAR) AS TIMESTAMP))"
        unit = found.time_unit
        if unit is None:
            middle = connection.execute(f"SELECT median({number}) FROM {source}").fetchone()
            unit = _unit_of(middle[0] if middle else None)
            notes.append(f"Times in {column!r} are read as {UNIT_NAMES[unit]}.")
        if unit == "iso":
            return date
        return number if unit == "s" else f"{number} * {UNITS[unit]!r}"

    def _look(self, connection: duckdb.DuckDBPyConnection, plan: _Plan) -> Places:
        """Who there is, and how often they report. Raises NotARun for what no run can hold."""
        rows = connection.execute(
            "SELECT attempt, rank, min(node), count(*), min(event_at), max(event_at), min(step), max(step),"
            f" count(*) FILTER (step IS NULL OR event_at IS NULL) FROM ({plan.select}) GROUP BY attempt, rank"
            f" ORDER BY attempt, rank LIMIT {RANKS_MAX + 1}"
        ).fetchall()
        first = self._table.files[0]
        if not rows:
            raise NotARun(f"{first} has no rows; there is nothing to replay")
        if len(rows) > RANKS_MAX:
            raise NotARun(f"{first} names more than {RANKS_MAX:,} ranks; name the right column in --mapping: rank = …")
        lost = sum(row[8] for row in rows)
        if lost == sum(row[3] for row in rows):
            raise NotARun(f"no row of {first} has both a step and a time that can be read; name them in --mapping")
        if lost:
            self.notes += (f"{lost} rows without step or time are left out.",)
        for attempt, rank, _, _, low, high, lowest, highest, _ in rows:
            if attempt is None or rank is None or not 0 <= rank <= RANK_MAX or attempt < 0:
                raise NotARun(f"{first} has a rank or attempt that is no count ({rank}, {attempt}); name the columns")
            if low is not None and not 0.0 <= low <= high <= AT_MAX:
                raise NotARun(f"{first} has times from {low:g} to {high:g}; say time_unit in --mapping (s, ms, us, ns)")
            if lowest is not None and not -1 <= lowest <= highest <= STEP_MAX:
                raise NotARun(f"{first} has steps from {lowest} to {highest}; name the right column in --mapping")
        gaps = [(high - low) / (count - 1) for _, _, _, count, low, high, *_ in rows if count > 1 and low is not None]
        self.interval_seconds = max(gaps, default=0.0)
        return Places({(row[0], row[1]): row[2] or "node0" for row in rows})


def _in_order(connection: duckdb.DuckDBPyConnection, asked: str) -> bool:
    """Whether the rows come as blocks are cut: most programs write them so, and sorting costs more than all else."""
    last: npt.NDArray[np.float64] | None = None
    for batch in connection.sql(f"SELECT event_at, attempt, step, rank {asked}").to_arrow_reader(READ_ROWS):
        at, *keys = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
        rows = np.stack([np.ceil(at * TICKS_A_SECOND), *keys]).astype(np.float64)
        rows = rows if last is None else np.column_stack([last, rows])
        later = np.diff(rows) > 0.0
        same = np.diff(rows) == 0.0
        # each row comes after the one before: in the first key that differs, or as its equal
        if not (later[0] | same[0] & (later[1] | same[1] & (later[2] | same[2] & (later[3] | same[3])))).all():
            return False
        last = rows[:, -1:]
    return True


def _unit_of(middle: float | None) -> Any:
    """The unit by the size of a number: of this century in seconds, milliseconds …; small ones count from a start."""
    if middle is None:
        return "iso"
    for unit, limit in (("s", 1e11), ("ms", 1e14), ("us", 1e17)):
        if middle < limit:
            return unit
    return "ns"


def _number(column: str) -> str:
    return f"TRY_CAST({quoted(column)} AS DOUBLE)"


def _arrays(
    batch: pa.RecordBatch, metrics: tuple[str, ...]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.bool_] | None]:
    """Columns attempt, rank, step (rows × 3), times, samples (NaN: none), and which NaN and infinities were told."""
    keys = np.column_stack([batch.column(name).to_numpy(zero_copy_only=False) for name in ("attempt", "rank", "step")])
    at = batch.column("event_at").to_numpy(zero_copy_only=False)
    values = np.empty((batch.num_rows, len(metrics)))
    odd: npt.NDArray[np.bool_] | None = None
    for index, name in enumerate(metrics):
        column = batch.column(name)
        values[:, index] = samples = column.to_numpy(zero_copy_only=False)
        if column.null_count == 0 and np.isfinite(samples).all():
            continue
        told = ~np.isfinite(samples) & column.is_valid().to_numpy(zero_copy_only=False)
        if told.any():
            odd = np.zeros(values.shape, dtype=np.bool_) if odd is None else odd
            odd[:, index] = told
    return keys.astype(np.int64, copy=False), at, values, odd
