"""The base of errors that a person reads: one sentence, what was wrong and what to do."""

from __future__ import annotations


class StatedError(Exception):
    """The command line prints the text and ends with exit code 1; no traceback."""
