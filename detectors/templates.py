"""Shapes of log lines that a job has shown before: numbers, addresses and paths masked, the oldest forgotten."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

TEMPLATES_MAX = 2_000
TEXT_CHARACTERS_MAX = 300

# As Drain masks before it clusters: whatever differs from one occurrence to the next.
_MASKED = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|(?:/[\w.@+-]+){2,}/?|[+-]?\d[\d.,:]*(?:[eE][+-]?\d+)?|'[^']{0,80}'|\"[^\"]{0,80}\"",
    re.ASCII,
)
_WHITE = re.compile(r"\s+")


def template_of(text: str) -> str:
    """The shape of a line: what stays when its numbers, hexadecimal words, paths and quoted names are taken out."""
    return _WHITE.sub(" ", _MASKED.sub("#", text[:TEXT_CHARACTERS_MAX])).strip()


class Templates:
    """The last `TEMPLATES_MAX` shapes, kept as digests; one that comes again is young again."""

    def __init__(self, digests: Iterable[str] = ()) -> None:
        self._digests = dict.fromkeys(digests)

    def __len__(self) -> int:
        return len(self._digests)

    def is_new(self, text: str) -> bool:
        """Whether the shape of `text` was not there; it is from now on."""
        digest = hashlib.blake2b(template_of(text).encode("utf-8", "replace"), digest_size=8).hexdigest()
        new = digest not in self._digests
        if not new:
            del self._digests[digest]
        elif len(self._digests) >= TEMPLATES_MAX:
            del self._digests[next(iter(self._digests))]
        self._digests[digest] = None
        return new

    def digests(self) -> list[str]:
        """Oldest first: what `Templates` is made from again."""
        return list(self._digests)
