"""Any state comes back bit for bit, saved for the first time or again after a change, with its shared memory shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_engine.client import Checkpointer
from pipelines.bench_ckpt_states import StateMaker, difference, round_trip, round_trips, shared_bytes
from tests.ckpt_lab import engine_in_thread

PLACE: dict[str, Any] = {"job": "job", "attempt": 1, "rank": 0, "world_size": 1, "node": "n0"}


class Steps:
    """A checkpointer, and steps that nobody has saved yet."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self.last = 0

    def next(self) -> int:
        self.last += 1
        return self.last


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    with engine_in_thread(tmp_path_factory.mktemp("round_trips")) as lab:
        checkpointer = Checkpointer(str(lab.socket), None, **PLACE, busy_wait_seconds=20.0)
        yield Steps(checkpointer)
        checkpointer.close()


@given(st.randoms(use_true_random=False, note_method_calls=False))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_made_up_state_comes_back_and_comes_back_changed(steps: Steps, dice: Random) -> None:
    maker = StateMaker(torch, dice)
    state = maker.state()
    for _ in range(2):
        assert round_trip(torch, steps.checkpointer, state, steps.next()) == ""
        maker.change(state)


def test_states_come_back_from_disk(tmp_path: Path) -> None:
    checkpointer = Checkpointer(None, str(tmp_path), **PLACE)
    assert round_trips(torch, checkpointer, 5, seed=1) == []
    checkpointer.close()


def test_the_comparison_sees_every_kind_of_difference() -> None:
    base = torch.arange(6.0)
    saved = {"base": base, "half": base[:3], "n": -0.0, "t": (1, True)}
    assert difference(torch, saved, saved) == ""
    for wrong, text in (
        ({**saved, "half": base[:3].clone()}, "other bytes share memory"),
        ({**saved, "base": base + 1}, "state.base has other bits"),
        ({**saved, "base": base.double()}, "state.base became"),
        ({**saved, "n": 0.0}, "state.n was -0.0"),
        ({**saved, "t": (1, 1)}, "state.t.1 was a bool"),
        ({**saved, "t": [1, True]}, "state.t was a tuple"),
        ({"half": base[:3], "base": base, "n": -0.0, "t": (1, True)}, "state has other keys"),
    ):
        assert text in difference(torch, saved, wrong)


def test_bytes_at_one_address_have_one_number() -> None:
    pair = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
    assert shared_bytes(iter([pair, pair.T, pair[1]])) == [[0, 1, 2, 3], [0, 2, 1, 3], [2, 3]]
