"""Whatever a rank asks of its engine about loading, or another rank leaves in the folder: an answer or a refusal."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.agreement import Agreement
from ckpt_engine.clock import HostClock
from ckpt_engine.copies import _source_of
from ckpt_engine.errors import CheckpointDamaged, EngineRefused, NoAgreement
from ckpt_engine.lending import _memfds, _tier, _without
from ckpt_engine.shardfile import Identity
from ckpt_engine.wire import WireError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(["memory", "disk"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_what_to_do_without_is_a_list_of_copies_or_refused(value: Any) -> None:
    with contextlib.suppress(EngineRefused):
        for tier, attempt, step in _without({"without": value}):
            assert (type(tier), isinstance(attempt, int), isinstance(step, int)) == (str, True, True)


@given(JSON)
def test_segments_in_use_are_a_list_of_memfds_or_refused(value: Any) -> None:
    with contextlib.suppress(EngineRefused):
        assert all(len(memfd) == 2 for memfd in _memfds({"memfds": value}))


@given(JSON)
def test_a_tier_is_one_of_ours_or_refused(value: Any) -> None:
    with contextlib.suppress(EngineRefused, WireError):
        assert _tier({"tier": value}) in ("memory", "disk")


@given(st.dictionaries(st.sampled_from(["tier", "step", "attempt", "crc32", "verified"]), JSON))
def test_an_answer_is_a_copy_or_none_or_not_our_language(reply: dict[str, Any]) -> None:
    with contextlib.suppress(WireError):
        source = _source_of(reply, [])
        assert source is None or source.descriptor == -1


@pytest.fixture(scope="module")
def agreement(tmp_path_factory: pytest.TempPathFactory) -> Agreement:
    folder = tmp_path_factory.mktemp("agreement")
    agreement = Agreement(folder, Identity("job", 1, 0, 2, -1), "a", 1, clock=HostClock(), seconds_max=0.0)
    agreement._folder.mkdir(parents=True)
    return agreement


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps({"world_size": 2, "candidates": value}).encode()))
@settings(max_examples=60)
def test_an_offer_is_a_set_of_steps_or_said_to_be_none(agreement: Agreement, raw: bytes) -> None:
    path: Path = agreement._folder / "offer-00001-b.json"
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointDamaged, NoAgreement):
        for candidate in agreement._read_offer(1, "b"):
            assert (type(candidate.attempt), type(candidate.step)) == (int, int)
