"""Measured figures and the file that carries them: every command that measures writes the same shape."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

VERSIONED = ("transom", "torch", "pyod", "duckdb", "kafka-python", "streamlit")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number: `n` says how many observations stand behind it."""

    name: str
    value: float
    unit: str
    n: int = 1
    versions: dict[str, str] = field(default_factory=lambda: installed_versions())


def installed_versions() -> dict[str, str]:
    """Python's version and those of the packages a figure may depend on."""
    versions = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def write_figures(path: Path, figures: Iterable[Figure], **more: object) -> None:
    """Write `{"figures": [...]}`, and what else the command has to say beside them."""
    tree = {"figures": [asdict(figure) for figure in figures], **more}
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
