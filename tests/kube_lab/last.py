"""Tests on Kubernetes come last: their control plane is built beside the others."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "kube" in item.nodeid)
