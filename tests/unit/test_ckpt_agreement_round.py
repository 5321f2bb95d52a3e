"""How ranks agree on a step through files: all on the same, and none on what one of them cannot load."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.agreement import FOLDER, Agreement, Candidate
from ckpt_engine.clock import HostClock
from ckpt_engine.errors import CheckpointDamaged, NoAgreement
from ckpt_engine.shardfile import Identity

OLD, NEW = Candidate(1, 10), Candidate(1, 20)


def round_of(
    directory: Path, rank: int, world_size: int = 3, *, nonce: str = "", number: int = 1, attempt: int = 1,
    seconds_max: float = 20.0,
) -> Agreement:  # fmt: skip
    identity = Identity("job", attempt, rank, world_size, -1)
    return Agreement(directory, identity, nonce or f"{rank + 10:x}", number, clock=HostClock(), seconds_max=seconds_max)


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def common(rounds: Sequence[Agreement], offers: Sequence[Sequence[Candidate]]) -> list[list[Candidate]]:
    return together([partial(entry.common, offer) for entry, offer in zip(rounds, offers, strict=True)])


def votes(rounds: Sequence[Agreement], number: int, good: Sequence[bool]) -> list[bool]:
    return together([partial(entry.vote, number, each) for entry, each in zip(rounds, good, strict=True)])


def test_common_is_what_all_have_newest_first(tmp_path: Path) -> None:
    rounds = [round_of(tmp_path, rank) for rank in range(3)]
    later = Candidate(2, 5)
    found = common(rounds, [[OLD, NEW, later], [later, OLD, Candidate(1, 30)], [OLD, later]])
    assert found == [[later, OLD]] * 3, "a later attempt is the newer, whatever its step"


def test_nothing_in_common_is_nothing_for_all(tmp_path: Path) -> None:
    rounds = [round_of(tmp_path, rank) for rank in range(3)]
    assert common(rounds, [[OLD], [NEW], []]) == [[]] * 3


def test_a_step_is_good_when_it_is_for_all(tmp_path: Path) -> None:
    rounds = [round_of(tmp_path, rank) for rank in range(3)]
    common(rounds, [[OLD, NEW]] * 3)
    assert votes(rounds, 0, [True, False, True]) == [False] * 3
    assert votes(rounds, 1, [True] * 3) == [True] * 3


def test_one_bad_vote_is_enough_to_go_on(tmp_path: Path) -> None:
    """The others need not have fetched theirs."""
    rounds = [round_of(tmp_path, rank, seconds_max=5.0) for rank in range(3)]
    common(rounds, [[OLD, NEW]] * 3)
    assert rounds[0].vote(0, False) is False
    assert rounds[2].vote(0, True) is False


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoAgreement, match=r"after 0\.05 s rank 1, 2 has not asked for a checkpoint"):
        round_of(tmp_path, 0, seconds_max=0.05).common([OLD])


def test_a_rank_that_does_not_vote_is_said(tmp_path: Path) -> None:
    rounds = [round_of(tmp_path, rank, seconds_max=5.0) for rank in range(3)]
    common(rounds, [[OLD]] * 3)
    rounds[0]._seconds_max = 0.05
    with pytest.raises(NoAgreement, match="a rank has not said whether its checkpoint is whole"):
        rounds[0].vote(0, True)


def test_what_an_earlier_process_of_the_same_attempt_left_does_not_count(tmp_path: Path) -> None:
    """Started again by hand, with the same attempt number: offers and votes of the first run lie there still."""
    first = [round_of(tmp_path, rank) for rank in range(3)]
    common(first, [[OLD, NEW]] * 3)
    votes(first, 0, [True] * 3)
    again = [round_of(tmp_path, rank, nonce=f"{rank + 100:x}") for rank in range(3)]
    assert common(again, [[OLD, NEW], [OLD], [OLD, NEW]]) == [[OLD]] * 3
    assert votes(again, 0, [False, True, True]) == [False] * 3


def test_a_new_process_does_not_agree_with_an_old_one(tmp_path: Path) -> None:
    common([round_of(tmp_path, rank) for rank in range(3)], [[OLD]] * 3)
    with pytest.raises(NoAgreement, match="have not seen each other's offers"):
        round_of(tmp_path, 0, nonce="abc", seconds_max=0.05).common([OLD])


def test_ranks_of_two_sizes_do_not_agree(tmp_path: Path) -> None:
    rounds = [round_of(tmp_path, 0, 2, seconds_max=0.3), round_of(tmp_path, 1, 3, seconds_max=0.3)]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(entry.common, [OLD]) for entry in rounds]
        for call in calls:
            with pytest.raises(NoAgreement):
                call.result()


def test_old_rounds_and_attempts_are_removed(tmp_path: Path) -> None:
    for attempt, number in ((1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (2, 4)):
        rounds = [round_of(tmp_path, rank, 2, attempt=attempt, number=number) for rank in range(2)]
        common(rounds, [[OLD]] * 2)
    left = sorted(str(path.relative_to(tmp_path / FOLDER)) for path in (tmp_path / FOLDER).glob("*/*"))
    assert left == ["a0002/r0003", "a0002/r0004"]


def test_folders_and_files_are_private(tmp_path: Path) -> None:
    common([round_of(tmp_path, rank, 2) for rank in range(2)], [[OLD]] * 2)
    paths = list((tmp_path / FOLDER).rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"world_size": 2}', b'{"world_size": 2, "candidates": [["a", 1]]}'])
def test_an_offer_that_is_not_readable_is_said(tmp_path: Path, raw: bytes) -> None:
    rounds = [round_of(tmp_path, rank, 2) for rank in range(2)]
    common(rounds, [[OLD]] * 2)
    (offer,) = (tmp_path / FOLDER).rglob("offer-00001-*")
    offer.write_bytes(raw)
    with pytest.raises(CheckpointDamaged, match="what rank 1 offers to load is not"):
        rounds[0].common([OLD])


@pytest.mark.parametrize("nonce", ["../x", "A", "g", "a" * 33, "a\n"])
def test_a_nonce_is_no_path(tmp_path: Path, nonce: str) -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        round_of(tmp_path, 0, nonce=nonce)
