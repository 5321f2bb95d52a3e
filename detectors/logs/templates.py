"""Shapes of log lines that a job has shown before: numbers, addresses and paths masked, the oldest forgotten."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

TEMPLATES_MAX = 2_000
TEXT_CHARACTERS_MAX = 300

_PARTS_WORDS = str.maketrans(dict.fromkeys("_.,:;()[]{}'\"=|<>", " "))


def template_of(text: str) -> str:
    """The shape of a line, as Drain masks it before it clusters: its words, without what differs from one time to the
    next. A token with a digit, a slash or a sign in it is such; that costs no regular expression."""
    return " ".join([word for word in text[:TEXT_CHARACTERS_MAX].translate(_PARTS_WORDS).split() if word.isalpha()])


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
