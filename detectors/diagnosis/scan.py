"""Which lines of a block of bytes can matter: four letters of every gate are looked for in the whole block at once.

A log of gigabytes has few lines that any rule can match. Every piece of a rule's gate hands in one of its windows of
four bytes, the one least common in training logs; a line that holds the piece holds the window, so nothing that a rule
matches is passed over. All windows of the block are compared in a few numpy operations instead of one search a piece.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from detectors.logs.rule_book import Rule

BLOCK_BYTES = 1 << 18
WINDOW = 4
HASH_FACTOR = np.uint32(2_654_435_761)  # Knuth's multiplicative hash
HASH_SHIFT = np.uint32(16)
COMMON = (
    "  iteration/ consumed samples: elapsed time per iteration (ms): learning rate: global batch size: lm loss:"
    " grad norm number of skipped iterations: number of nan iterations: loss scale: throughput tokens/s step"
    " epoch info nccl info channel via p2p saving checkpoint loading memory allocated reserved rank device"
    " python file line warning train eval from workers process group values types model down using size input"
    " back compiled mapped kernel limited signal services sharding found implementation foundation on_fit"
    " setting hand index runtime queue block user backend failed attention synchronize unhandled distributed"
    " shared compute directory operations initialized gpu memory of max mem"
)
FREQUENT = " etaoinsrlcdmpu0123456789"
# "nan" and "inf" as a value; Megatron names them in every line of progress
NUMBERS = (
    re.compile(rb"nan(?![a-z0-9_]| iterations: +0| count)"),
    re.compile(rb"inf(?![a-z0-9_]| count)|infinity(?![a-z])"),
    re.compile(rb"nan iterations: *[1-9]"),
)
BEFORE_NUMBER = frozenset(b":= \t'\"(+-[,|")


class LineGate:
    """The windows of a rule book, ready to be looked for."""

    def __init__(self, rules: Iterable[Rule], remarks: Iterable[str] = ()) -> None:
        """`remarks`: pieces that no rule asks for and a reader wants to see all the same."""
        windows: set[bytes] = {_rarest(remark.encode()) for remark in remarks}
        short: set[bytes] = set()
        for rule in rules:
            for piece in rule.gate:
                encoded = piece.encode()
                if rule.fault_class == "nan" and encoded in COMMON.encode():
                    continue  # the pattern of numbers stands for it
                if len(encoded) < WINDOW:
                    short.add(encoded)
                else:
                    windows.add(_rarest(encoded))
        self.short = tuple(sorted(short))
        self._windows = np.array(sorted(int.from_bytes(window, "little") for window in windows), dtype="<u4")
        self._table = np.zeros(1 << 16, dtype=np.bool_)
        self._table[self._hash(self._windows)] = True

    @staticmethod
    def _hash(values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        hashed: npt.NDArray[np.uint32] = (values * HASH_FACTOR) >> HASH_SHIFT
        return hashed

    def positions(self, lower: bytes) -> list[int]:
        """Where in a block (ASCII letters in lower case) a line may matter, in order."""
        found: list[int] = []
        octets = np.frombuffer(lower, dtype=np.uint8)
        for offset in range(min(WINDOW, max(0, len(lower) - WINDOW + 1))):
            count = (len(lower) - offset) // WINDOW
            values = octets[offset : offset + count * WINDOW].view("<u4")
            at = np.flatnonzero(self._table[self._hash(values)])
            if at.size:
                at = at[np.isin(values[at], self._windows)]
                found += (at * WINDOW + offset).tolist()
        for piece in self.short:
            found += _all_of(lower, piece)
        for pattern in NUMBERS:
            found += [m.start() for m in pattern.finditer(lower) if m.start() and lower[m.start() - 1] in BEFORE_NUMBER]
        return sorted(found)

    def lines(self, block: bytes, lower: bytes) -> Iterator[tuple[int, int]]:
        """Beginning and end of each line that may matter; a carriage return ends a line as a newline does."""
        end = -1
        for at in self.positions(lower):
            if at < end:
                continue
            begin, end = line_around(block, at)
            if begin < end:
                yield begin, end


def line_around(block: bytes, at: int) -> tuple[int, int]:
    """Beginning and end of the line at a position."""
    begin = max(block.rfind(b"\n", 0, at), block.rfind(b"\r", max(0, block.rfind(b"\n", 0, at)), at)) + 1
    end = block.find(b"\n", at)
    end = len(block) if end < 0 else end
    carriage = block.find(b"\r", at, end)
    return begin, end if carriage < 0 else carriage


def _all_of(text: bytes, piece: bytes) -> list[int]:
    found, at = [], text.find(piece)
    while at >= 0:
        found.append(at)
        at = text.find(piece, at + 1)
    return found


def _rarest(piece: bytes) -> bytes:
    """The window of a piece that ordinary training logs hold least."""
    common = COMMON.encode()
    windows = [piece[at : at + WINDOW] for at in range(len(piece) - WINDOW + 1)]
    return max(windows, key=lambda window: (window not in common, _rarity(window), window))


def _rarity(window: bytes) -> float:
    return sum(math.log(2 + FREQUENT.find(chr(octet))) if chr(octet) in FREQUENT else 4.0 for octet in window)
