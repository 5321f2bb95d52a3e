"""The cheap gate before the patterns: which of them a line can match at all, by the pieces it has in it."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 4
PIECE_CHARACTERS_MIN = 2 * WINDOW - 1  # a piece so long covers a whole window, wherever in the line it stands
# What healthy logs are full of: a piece is looked for by its windows that are not in here, if it has such.
ORDINARY = (
    "iteration consumed samples elapsed time per iteration (ms) learning rate global batch size lm loss grad norm"
    " number of skipped nan iterations loss scale throughput tokens/s step epoch info nccl info channel via p2p"
    " using saving checkpoint loading memory allocated reserved rank device python file line warning train eval from"
    " worker process group values types model down using size input compiled mapped kernel limited services found"
    " setting index runtime queue user backend attention distributed shared compute directory operations initialized"
    " gpu memory of max mem world connected all rings trees /usr/lib/python3/site-packages/torch with timeout default"
    " connection to node started connect dataset cache config version number of parameters gib available session"
)


class LineGate:
    """Lower-case pieces of text, each with the patterns it speaks for: a pattern none of whose pieces is in a line
    cannot match it.

    A line is cut into windows of four characters, one behind the other. A piece of seven or more holds one of these
    windows whole wherever it stands, at one of four alignments; so one look into a table for each window finds every
    piece that may be there. Shorter pieces are looked for one by one.
    """

    def __init__(self, gates: Sequence[Sequence[str]]) -> None:
        """`gates[i]`: the pieces of pattern i, one of which is in every line that it can match, in lower case."""
        speaks_for: dict[str, list[int]] = {}
        for number, pieces in enumerate(gates):
            for piece in pieces:
                speaks_for.setdefault(piece, []).append(number)
        self.short = [(piece, numbers) for piece, numbers in speaks_for.items() if len(piece) < PIECE_CHARACTERS_MIN]
        self._by_window: dict[str, list[tuple[str, list[int]]]] = {}
        for piece, numbers in speaks_for.items():
            if len(piece) >= PIECE_CHARACTERS_MIN:
                for alignment in range(WINDOW):
                    self._by_window.setdefault(_rarest(piece, alignment), []).append((piece, numbers))

    def open_for(self, lower: str) -> list[int]:
        """Numbers of the patterns that `lower` (a line in lower case) may match, smallest first."""
        found: set[int] = set()
        by_window = self._by_window
        for window in by_window.keys() & {lower[at : at + WINDOW] for at in range(0, len(lower), WINDOW)}:
            for piece, numbers in by_window[window]:
                if piece in lower:
                    found.update(numbers)
        for piece, numbers in self.short:
            if piece in lower:
                found.update(numbers)
        return sorted(found) if found else []


def _rarest(piece: str, alignment: int) -> str:
    """The window of a piece that healthy logs hold least, of those a line cut at this alignment shows."""
    windows = [piece[at : at + WINDOW] for at in range(alignment, len(piece) - WINDOW + 1, WINDOW)]
    return min(windows, key=lambda window: (ORDINARY.count(window), window))
