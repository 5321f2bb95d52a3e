"""The cheap gate before the patterns: which of them a line can match at all, by the pieces it has in it."""

from __future__ import annotations

from collections.abc import Sequence

FRAGMENT_CHARACTERS = 4
# What healthy logs are full of: fragments of it would let every line through.
ORDINARY = (
    "iteration consumed samples elapsed time per iteration (ms) learning rate global batch size lm loss grad norm"
    " number of skipped nan iterations loss scale throughput tokens/s step epoch info nccl info channel via p2p net/ib"
    " using saving checkpoint loading memory allocated reserved rank device python file line warning train eval from"
    " worker process group values types model down using size input compiled mapped kernel limited services found setting"
    " index runtime queue user backend attention distributed shared compute directory operations initialized gpu"
    " memory of max mem world connected all rings trees /usr/lib/python3/site-packages/torch /home/user/train.py with timeout"
    " default connection to node started connect dataset cache config version number of parameters gib available free session"
)


class LineGate:
    """Lower-case pieces of text, each with the patterns it speaks for. A pattern whose pieces are all missing from a
    line cannot match it, so a line without any piece costs one look for each of a few shared fragments.
    """

    def __init__(self, gates: Sequence[Sequence[str]]) -> None:
        """`gates[i]`: the pieces of pattern i, one of which is in every line that it can match, in lower case."""
        speaks_for: dict[str, list[int]] = {}
        for number, pieces in enumerate(gates):
            for piece in pieces:
                speaks_for.setdefault(piece, []).append(number)
        self.fragments = _fragments(list(speaks_for))
        self._pieces = {
            fragment: [(piece, tuple(numbers)) for piece, numbers in speaks_for.items() if fragment in piece]
            for fragment in self.fragments
        }

    def open_for(self, lower: str) -> list[int]:
        """Numbers of the patterns that `lower` (a line in lower case) may match, smallest first."""
        found: set[int] = set()
        for fragment in self.fragments:
            if fragment in lower:
                for piece, numbers in self._pieces[fragment]:
                    if piece in lower:
                        found.update(numbers)
        return sorted(found) if found else []


def _fragments(pieces: Sequence[str]) -> tuple[str, ...]:
    """Few short texts of which every piece has at least one in it: the one that speaks for most pieces first, and of
    two alike the rarer one. A piece is looked for only where its fragment was found."""
    left = set(pieces)
    chosen: list[str] = []
    while left:
        spoken: dict[str, int] = {}
        for piece in left:
            for window in _windows(piece):
                spoken[window] = spoken.get(window, 0) + 1
        best = max(spoken, key=lambda window: (spoken[window] * _rarity(window), window))
        chosen.append(best)
        left = {piece for piece in left if best not in piece}
    return tuple(chosen)


def _windows(piece: str) -> set[str]:
    size = min(FRAGMENT_CHARACTERS, len(piece))
    return {piece[at : at + size] for at in range(len(piece) - size + 1)}


def _rarity(window: str) -> float:
    """How much a fragment keeps out: what ordinary lines hold is worth little."""
    return 0.02 if window in ORDINARY else 1.0
