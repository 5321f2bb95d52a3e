"""The documents tell the same truth as the code."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import typer

from detectors.verdict import FaultClass
from ingest.events import TOPICS
from pipelines.__main__ import app
from pipelines.settings import Settings
from recovery.action import RECOVERY_TYPES

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


def settings() -> list[str]:
    names = []
    for section, field in Settings.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        names += [section] if inner is None else [f"{section}.{key}" for key in inner]
    return names


@pytest.mark.parametrize("name", settings())
def test_every_setting_is_documented(name: str) -> None:
    assert f"| `{name}` |" in CONFIGURATION


@pytest.mark.parametrize("name", get_args(FaultClass))
def test_every_fault_class_is_documented(name: str) -> None:
    assert f"`{name}`" in CONFIGURATION
