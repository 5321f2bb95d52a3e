"""Everything that Transom asks for by name may be used in an Apache-2.0 product."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
PERMISSIVE = re.compile(r"Apache|BSD|MIT|Mozilla Public License 2\.0|MPL-2\.0|Python Software Foundation|PSF|ISC", re.I)
COPYLEFT = re.compile(r"(?<!L)GPL|Affero|AGPL|Commercial", re.I)


def asked_for() -> list[str]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    groups = PROJECT["dependency-groups"].values()
    lists = [PROJECT["project"]["dependencies"], *extras, *groups]
    names = {re.split(r"[\[<>=!~; ]", item, maxsplit=1)[0] for items in lists for item in items}
    return sorted(names - {PROJECT["project"]["name"]})


@pytest.mark.parametrize("name", asked_for())
def test_a_dependency_has_a_permissive_licence(name: str) -> None:
    fields = metadata.metadata(name)
    told = [fields.get("License-Expression") or "", (fields.get("License") or "")[:300]]
    told += [line for line in fields.get_all("Classifier") or [] if line.startswith("License ::")]
    text = " ".join(told)
    assert PERMISSIVE.search(text), f"{name} says {text!r}"
    assert not COPYLEFT.search(text), f"{name} says {text!r}"
