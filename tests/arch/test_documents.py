"""The documents tell the same truth as the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from detectors.verdict import FaultClass
from ingest.events import TOPICS
from pipelines.__main__ import app
from pipelines.settings import Settings
from recovery.action import RECOVERY_TYPES
from recovery.policy_config import PolicyConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MESSAGES = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    group = typer.main.get_command(app)
    return sorted(name for name, command in group.commands.items() if not command.hidden)


@pytest.mark.parametrize("name", commands())
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"transom {name}" in README or f"`{name}`" in README


@pytest.mark.parametrize("name", sorted(RECOVERY_TYPES))
def test_every_message_type_is_documented(name: str) -> None:
    assert f"`{name}`" in MESSAGES
    assert (ROOT / "docs" / "schemas" / f"{name}.json").is_file()


@pytest.mark.parametrize("name", TOPICS)
def test_every_topic_is_documented(name: str) -> None:
    assert f"| `{name}` |" in MESSAGES


def setting_rows() -> list[str]:
    """The lines of the table of settings, as the code has them."""
    return [f"| `{name}` | {_default(field)} | {field.description} |" for name, field in fields_of(Settings)]


def fields_of(model: type[BaseModel], prefix: str = "") -> list[tuple[str, FieldInfo]]:
    """Every setting with its dotted name; a section is not one."""
    found = []
    for name, field in model.model_fields.items():
        inner = field.annotation if isinstance(field.annotation, type) else None
        if inner is not None and issubclass(inner, BaseModel):
            found += fields_of(inner, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", field))
    return found


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value in ({}, ()):
        return "–" if value is None else "none"
    if isinstance(value, tuple):
        return f"`{json.dumps(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


@pytest.mark.parametrize("row", setting_rows())
def test_every_setting_is_documented_with_its_default(row: str) -> None:
    assert row in CONFIGURATION.splitlines()


@pytest.mark.parametrize("name", get_args(FaultClass))
def test_the_documented_mode_of_a_class_is_the_default(name: str) -> None:
    row = next(line for line in CONFIGURATION.splitlines() if line.startswith(f"| `{name}` |"))
    assert row.endswith(f" | {PolicyConfig().row(name).mode} |")


@pytest.mark.parametrize("name", get_args(FaultClass))
def test_every_fault_class_is_documented(name: str) -> None:
    assert f"`{name}`" in CONFIGURATION
