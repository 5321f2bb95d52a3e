"""What a path holds, by its content: a recording of ours, tables, event files, W&B runs, or logs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

import msgspec

from detectors.diagnosis.places import Speaker, speaker_of_file
from detectors.logs.progress_lines import parse_progress
from pipelines.diagnose import gather

from .json_lines import is_json_lines, is_trainer_state, json_rows, state_rows
from .mapping import MappingFile, map_columns, plain
from .run import HistoricRun, NotARun

Format = Literal["parquet", "csv", "jsonl", "tensorboard", "wandb", "logs"]
FORMATS: tuple[Format, ...] = get_args(Format)
HEAD_BYTES = 8_192
JSON_TEXT = ("message", "msg", "log", "text")  # what a line of a log has, and one of measurements has not
EVENT_HOST = re.compile(r"events\.out\.tfevents\.\d+\.(.+?)(?:\.\d+)*(?:\.v2)?$")
STATE = "trainer_state.json"


def open_run(path: Path, given: MappingFile, chosen: Format | None = None) -> HistoricRun:
    """The run under a path. Raises NotARun where it cannot be told what it is, or holds nothing."""
    if not path.exists():
        raise NotARun(f"there is no {path}; give a recording, a file of metrics, event files, W&B runs or logs")
    files = _files(path, chosen)
    found: dict[Format, list[Path]] = {}
    for file in files:
        kind = _format_of(file)
        if kind is not None:
            found.setdefault(kind, []).append(file)
    kind = chosen or _one(found, path)
    mine = found.get(kind, []) if path.is_dir() else [path]
    if not mine:
        raise NotARun(f"nothing in {path} is {kind}; leave --format out, or give another folder")
    job = given.job or _job_of(path)
    speakers = {file: speaker_of_file(str(file.relative_to(path)) if path.is_dir() else file.name) for file in mine}
    if kind == "logs":
        from .log_run import LogRun

        return LogRun(mine, job, speakers, _kind_of_logs(mine))
    return _table_run(kind, mine, job, given, speakers)


def _table_run(
    kind: Format, files: Sequence[Path], job: str, given: MappingFile, speakers: Mapping[Path, Speaker]
) -> HistoricRun:
    from .table_run import TableRun
    from .tables import CsvTable, ParquetTable, RowTable

    if kind == "parquet":
        return TableRun(ParquetTable(files), job, given, dict(speakers))
    if kind == "csv":
        return TableRun(CsvTable(files), job, given, dict(speakers))
    if kind == "jsonl":
        read = state_rows if all(file.name == STATE for file in files) else json_rows
        return TableRun(RowTable("JSON lines", files, lambda: read(files)), job, given, dict(speakers))
    if kind == "tensorboard":
        from .event_files import event_rows

        own = {}
        for file in files:
            host = EVENT_HOST.match(file.name)
            own[file] = Speaker(speaker_of_file(f"{file.parent.name}/log").rank, host[1] if host is not None else "")
        return TableRun(RowTable("TensorBoard", files, lambda: event_rows(files)), job, given, own)
    from .wandb_files import host_of, run_name, wandb_rows

    own = {file: speaker_of_file(run_name(file)).over(Speaker(node=host_of(file))) for file in files}
    return TableRun(RowTable("W&B", files, lambda: wandb_rows(files)), job, given, own)


def _files(path: Path, chosen: Format | None) -> list[Path]:
    if not path.is_dir():
        return [path]
    # what `diagnose` passes over as no log is here what matters most
    tables = sorted(file for file in path.rglob("*.parquet") if file.is_file())
    files = [*gather([str(path)]).files, *tables]
    if not files:
        raise NotARun(f"there are no files in {path}; give a run's folder")
    return files


def _one(found: Mapping[Format, Sequence[Path]], path: Path) -> Format:
    """The one structured format that is there; logs beside it are another telling of the same run."""
    structured = sorted(kind for kind in found if kind != "logs")
    if len(structured) > 1:
        kinds = " and ".join(structured)
        raise NotARun(f"{path} holds {kinds}; say which with --format {'|'.join(structured)}")
    if structured:
        return structured[0]
    if "logs" not in found:
        raise NotARun(f"nothing in {path} can be read as a run; give one of {', '.join(FORMATS)} with --format")
    return "logs"


def _format_of(file: Path) -> Format | None:
    """What a file holds by its first bytes; None for what is no run."""
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except OSError as error:
        raise NotARun(f"{file} cannot be read ({error.strerror}); give another file") from error
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b":W&B"):
        return "wandb"
    if len(head) > 24 and b"brain.Event:" in head[:64]:
        return "tensorboard"
    if is_trainer_state(head, file):
        return "jsonl"
    if head.startswith(b"\x1f\x8b"):
        return "jsonl" if ".jsonl" in file.name else "logs"
    if is_json_lines(head):
        return _json_kind(head, file)
    if b"\0" in head:
        return None
    return "csv" if _is_csv(head, file) else "logs" if head.strip() else None


def _json_kind(head: bytes, file: Path) -> Format | None:
    from .json_lines import flat, loose_json

    lines = [line for line in head.split(b"\n")[:20] if line.strip()]
    whole = lines[:-1] if len(lines) > 1 else lines
    if len(lines) == 1 and file.suffix not in (".jsonl", ".ndjson"):
        return None  # one object is a summary or a configuration
    told = []
    for line in whole:
        with suppress(msgspec.DecodeError):  # who reads the file will say which line it is
            told.append(flat("", loose_json(line)))
    names = {name for row in told for name in row}
    numbers = {name for row in told for name, cell in row.items() if isinstance(cell, float)}
    words = any(name.lower() in JSON_TEXT for name in names)
    steps = "step" in map_columns(sorted(names), sorted(numbers), MappingFile()).roles
    if words and steps:
        raise NotARun(f"{file} may be measurements or a log in JSON; say which with --format jsonl or --format logs")
    return "logs" if words else "jsonl"


def _is_csv(head: bytes, file: Path) -> bool:
    """Two lines with as many fields, the first one names. Raises NotARun for what may be a log as well."""
    lines = [line.rstrip("\r") for line in head.decode("utf-8", "replace").split("\n")[:3]]
    if len(lines) < 2:
        return False
    for mark in (",", "\t", ";", "|"):
        names, cells = [cell.strip().strip('"') for cell in lines[0].split(mark)], lines[1].split(mark)
        if len(names) < 2 or len(names) != len(cells) or len(set(names)) != len(names):
            continue
        if any(not name or _is_number(name) or len(plain(name)) > 80 for name in names):
            continue
        if not any(_is_number(cell) for cell in cells):
            continue
        if parse_progress(lines[1]) is not None:
            raise NotARun(f"{file} may be a table or a log; say which with --format csv or --format logs")
        return True
    return file.suffix in (".csv", ".tsv")


def _is_number(text: str) -> bool:
    try:
        float(text.strip().strip('"'))
    except ValueError:
        return False
    return True


def _job_of(path: Path) -> str:
    name = path.resolve().name
    return name if path.is_dir() else name.partition(".")[0] or name


def _kind_of_logs(files: Sequence[Path]) -> str:
    if any(part.startswith("attempt_") for file in files for part in file.parts):
        return "torchrun's logs"
    return "Slurm's outputs" if any(file.name.startswith("slurm-") for file in files) else "logs"
