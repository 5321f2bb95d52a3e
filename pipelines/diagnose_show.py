"""A diagnosis for the eye: a panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from detectors.diagnosis.diagnosis import Consequence, Diagnosis, LogLine
from pipelines.diagnose import Reading

ROWS_MAX = 6
RANKS_MAX = 8
NOTES_SHOWN_MAX = 3
LINE_CHARACTERS_MAX = 300
STYLE = {"none": "green", "stop": "red"}
SPOKEN = {
    "none": "nothing to do",
    "restart_in_place": "restart in place",
    "restart_new_port": "restart on another port",
    "restart_exclude_node": "restart without the node",
    "rollback_restart": "restart from an earlier checkpoint",
    "stop": "stop, do not restart",
    "diagnose_then_restart": "look first, then restart",
}


def show(found: Diagnosis, reading: Reading, console: Console) -> None:
    """Print it."""
    rows = _rows(found)
    read = _read(found, reading)
    if not console.is_terminal:
        for name, text in [*rows, ("read", read)]:
            console.print(Text(f"{name:<9} {text}"), soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows[1:]:
        table.add_row(name, Text(text, style="bold" if name == "do" else ""))
    style = STYLE.get(found.action, "yellow") if found.found else "green"
    body = Group(Text(rows[0][1], style="bold"), Padding(table, (1, 0, 0, 0))) if rows[1:] else Text(rows[0][1])
    title = f"{found.symptom} — {SPOKEN[found.action]}" if found.found else "nothing found"
    console.print(
        Panel(body, title=Text(title), title_align="left", subtitle=Text(read, style="dim"), border_style=style)
    )


def _rows(found: Diagnosis) -> list[tuple[str, str]]:
    rows = [("cause" if found.found else "nothing", found.summary)]
    if found.found:
        rows.append(("class", f"{found.symptom} ({found.fault_class}), confidence {found.confidence:.2g}"))
        if who := _who(found):
            rows.append(("who", who))
        rows.append(("do", f"{SPOKEN[found.action]}. {found.mend}"))
    rows += [("line" if at == 0 else "", _place(line)) for at, line in enumerate(found.lines)]
    rows += [("only after" if at == 0 else "", _folded(one)) for at, one in enumerate(found.consequences[:ROWS_MAX])]
    rows += [("beside" if at == 0 else "", _folded(one)) for at, one in enumerate(found.beside[:ROWS_MAX])]
    rows += [("went on" if at == 0 else "", _folded(one)) for at, one in enumerate(found.recovered[:ROWS_MAX])]
    return rows


def _who(found: Diagnosis) -> str:
    parts = []
    if found.workload:
        parts.append("all ranks: the program")
    if found.rank is not None:
        parts.append(f"rank {found.rank}")
    elif found.local_rank is not None:
        parts.append(f"local rank {found.local_rank}")
    if found.node:
        parts.append(f"node {found.node}")
    if found.device:
        parts.append(f"GPU {found.device}")
    if found.suspects:
        parts.append("suspect " + ", ".join(found.suspects[:RANKS_MAX]))
    return ", ".join(parts)


def _place(line: LogLine) -> str:
    return f"{line.source}:{line.line}  {line.text[:LINE_CHARACTERS_MAX]}"


def _folded(one: Consequence) -> str:
    text = f"{one.symptom} × {one.count:,}"
    if one.ranks:
        more = ", …" if len(one.ranks) > RANKS_MAX else ""
        ranks = ", ".join(map(str, one.ranks[:RANKS_MAX]))
        text += f" (rank{'s' if len(one.ranks) > 1 else ''} {ranks}{more})"
    return f"{text}, first {one.first.source}:{one.first.line}"


def _read(found: Diagnosis, reading: Reading) -> str:
    looked = found.looked
    text = (
        f"{looked.sources:,} file{'' if looked.sources == 1 else 's'}, "
        f"{looked.lines:,} line{'' if looked.lines == 1 else 's'}, {_size(looked.octets)}"
    )
    if reading.skipped:
        named = "; ".join(f"{note.source} ({note.why})" for note in reading.notes[:NOTES_SHOWN_MAX])
        more = f" and {reading.skipped - NOTES_SHOWN_MAX:,} more" if reading.skipped > NOTES_SHOWN_MAX else ""
        text += f"; not read: {named}{more}"
    return text


def _size(octets: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if octets < 1000 or unit == "GB":
            return f"{octets:,.0f} {unit}" if unit == "bytes" else f"{octets:,.1f} {unit}"
        octets /= 1000
    raise AssertionError("unreachable")
