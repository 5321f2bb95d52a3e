"""Runs of memory as torch's arrays of words, so that one call copies many of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any


class TorchWords:
    """`copying.Words` by a torch that is handed in."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._copy = getattr(torch, "_foreach_copy_", None)  # of torch 2.1 and later

    def at(self, runs: Sequence[tuple[int, int]]) -> list[Any]:
        """A tensor over each (address, bytes)."""
        torch = self._torch
        with torch.inference_mode(False):  # or no later save could write there outside of the caller's inference mode
            return [
                torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.int64)
                for address, size_bytes in runs
            ]

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Each source into its target."""
        if self._copy is not None:
            self._copy(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
