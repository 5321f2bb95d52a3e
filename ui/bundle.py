"""One incident as a zip that can be sent to somebody: its story, the series that the page shows, the log around it."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Sequence

import msgspec

from pipelines.ledger.shapes import IncidentStory, LogRow, Series

READ_ME = """An incident of Transom, as its ledger had it.
incident.json  the incident and all verdicts, actions, receipts, transitions and commands (docs/messages.md)
series.csv     {metric} by rank: event_at in UTC seconds, step, value
log.jsonl      log records around the onset
On the command line: transom explain {incident}
"""


def bundle(story: IncidentStory, series: Series, lines: Sequence[LogRow]) -> bytes:
    """The zip's bytes; the same story gives the same bytes."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        incident = msgspec.json.format(msgspec.json.encode(story), indent=1)
        words = READ_ME.format(metric=series.metric, incident=story.incident.incident_id)
        for name, content in (
            ("README.txt", words.encode()),
            ("incident.json", incident),
            ("series.csv", _csv(series).encode()),
            ("log.jsonl", b"".join(msgspec.json.encode(line) + b"\n" for line in lines)),
        ):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return sink.getvalue()


def file_name(incident_id: str) -> str:
    """A name that any file system takes."""
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in incident_id)
    return f"incident-{safe[:120]}.zip"


def _csv(series: Series) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "event_at", "step", series.metric])
    for rank in sorted(series.ranks, key=int):
        writer.writerows([rank, repr(at), step, "" if value is None else repr(value)]
                         for at, step, value in series.ranks[rank])  # fmt: skip
    return text.getvalue()
