"""Metrics messages as a pandas table, for notebooks; never in a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .events import Message, Metrics

if TYPE_CHECKING:
    import pandas

STAMP_COLUMNS = ("job", "attempt", "rank", "node", "step", "ended_at")


def metrics_frame(messages: Iterable[Message]) -> pandas.DataFrame:
    """One row per rank and step, in the order of the messages; other kinds of message are passed over."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("frame needs pandas: pip install 'transom[ledger]'") from error
    rows: list[dict[str, object]] = []
    for message in messages:
        if not isinstance(message, Metrics):
            continue
        columns = {name: message.column(name) for name in message.columns}
        for index, (step, ended_at) in enumerate(zip(message.steps, message.ended_at, strict=True)):
            stamp = (message.job, message.attempt, message.rank, message.node, step, ended_at)
            row: dict[str, object] = dict(zip(STAMP_COLUMNS, stamp, strict=True))
            row.update((name, values[index]) for name, values in columns.items())
            rows.append(row)
    return pandas.DataFrame(rows, columns=None if rows else list(STAMP_COLUMNS))
