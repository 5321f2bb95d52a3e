"""What shares memory is stored once and shares it again; what only lies side by side is stored by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.aliasing import Span, find_runs, group_spans
from ckpt_engine.client import Checkpointer
from pipelines.bench_ckpt_states import difference
from tests.ckpt_lab import Lab, engine_in_thread


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


@pytest.fixture
def checkpointer(lab: Lab) -> Iterator[Checkpointer]:
    checkpointer = Checkpointer(str(lab.socket), None, job="job", attempt=1, rank=0, world_size=1, node="n0")
    yield checkpointer
    checkpointer.close()


def stored_bytes(lab: Lab) -> int:
    return lab.admin.status().shards[0].size_bytes


def base() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(4, 6)


def mixed() -> torch.Tensor:
    return torch.arange(40, dtype=torch.uint8)


CASES: dict[str, tuple[Callable[[], list[torch.Tensor]], int]] = {
    "the same twice": (lambda: [(x := base()), x], 96),
    "detached": (lambda: [(x := base()), x.detach()], 96),
    "transposed": (lambda: [(x := base()).T, x], 96),
    "a slice of the whole": (lambda: [(x := base())[1:3], x], 96),
    "flat and in pieces": (lambda: [(x := torch.arange(10.0))[:4], x[4:].view(2, 3), x], 40),
    "windows that overlap": (lambda: [(x := torch.arange(10.0))[:6], x[4:]], 40),
    "windows and what is between": (lambda: [(x := torch.arange(100.0))[10:40], x[30:60], x[90:]], 50 * 4 + 10 * 4),
    "side by side": (lambda: [(x := base())[:2], x[2:]], 96),
    "columns that do not meet": (lambda: [(x := torch.arange(10_000.0).view(100, 100))[:, 3], x[:, 5]], 800),
    "columns that do": (lambda: [(x := torch.arange(1000.0).view(100, 10))[:, 3], x[:, 3:5][::50, 0]], 991 * 4),
    "expanded": (lambda: [torch.arange(3.0).unsqueeze(0).expand(5, 3)], 12),
    "unfolded": (lambda: [torch.arange(6.0).unfold(0, 3, 1)], 24),
    "read as another dtype": (lambda: [(x := base()), x.view(torch.int32), x.view(torch.uint8)[:, 3:9]], 96),
    "parts of several dtypes": (lambda: [(x := mixed())[3:20], x[8:24].view(torch.int64)], 24),
    "real and imaginary": (lambda: [(x := torch.complex(base(), -base())), x.real, x.imag], 192),
    "conjugate": (lambda: [(x := torch.complex(base(), -base())), x.conj(), x.conj().imag], 192),
    "bfloat16": (lambda: [(x := base().bfloat16()), x[0], x[:, 1]], 48),
    "nothing": (lambda: [(x := base())[:0], x, x[4:]], 96),
}


@pytest.mark.parametrize("case", CASES)
def test_shared_memory_is_stored_once_and_is_shared_again(lab: Lab, checkpointer: Checkpointer, case: str) -> None:
    make, size_bytes = CASES[case]
    tensors = make()
    checkpointer.save({"tensors": tensors}, 1)
    into: dict[str, Any] = {"tensors": None}
    checkpointer.load(into, step=1)
    assert difference(torch, tensors, into["tensors"]) == ""
    assert stored_bytes(lab) == size_bytes


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("expanded", "unfolded")])
def test_it_is_loaded_into_living_tensors_that_share(checkpointer: Checkpointer, case: str) -> None:
    make, _ = CASES[case]
    checkpointer.save({"tensors": make()}, 1)
    live = make()
    for tensor in live:
        tensor.zero_()
    checkpointer.load({"tensors": live}, step=1)
    assert difference(torch, make(), live) == ""


def test_a_write_to_one_is_seen_in_the_other_after_a_load(checkpointer: Checkpointer) -> None:
    x = base()
    checkpointer.save({"pair": [x.T, x[0]]}, 1)
    into: dict[str, Any] = {"pair": None}
    checkpointer.load(into, step=1)
    columns, first = into["pair"]
    columns[2, 0] = 77
    assert first[2] == 77


def test_a_tie_that_is_cut_or_made_between_two_saves_is_seen(lab: Lab, checkpointer: Checkpointer) -> None:
    """Same names, same shapes, other addresses: the layout of the save before would be wrong."""
    one, two = torch.ones(1000), torch.ones(1000)
    states = [[one, one], [one, two], [two, two], [two, one], [one, one]]
    for step, tensors in enumerate(states):
        checkpointer.save({"tensors": tensors}, step)
        assert stored_bytes(lab) == 4000 * len({id(tensor) for tensor in tensors})
        into: dict[str, Any] = {"tensors": None}
        checkpointer.load(into, step=step)
        assert difference(torch, tensors, into["tensors"]) == ""


def test_a_view_that_moves_within_its_base_is_seen(checkpointer: Checkpointer) -> None:
    x = torch.arange(100.0)
    for step in range(4):
        tensors = [x, x[10 * step : 10 * step + 20]]
        checkpointer.save({"tensors": tensors}, step)
        into: dict[str, Any] = {"tensors": None}
        checkpointer.load(into, step=step)
        assert difference(torch, tensors, into["tensors"]) == ""


def test_arrays_that_share_memory_share_it_again(checkpointer: Checkpointer) -> None:
    array = torch.arange(10.0).numpy()
    checkpointer.save({"arrays": [array, array[2:5]]}, 1)
    into: dict[str, Any] = {"arrays": None}
    checkpointer.load(into, step=1)
    whole, part = into["arrays"]
    whole[3] = 50
    assert part.tolist() == [2, 50, 4]


def span(start: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, name: str = "x") -> Span:
    return Span(name, "float32", shape, strides or (1,), start, 0, contiguous=strides is None)


def test_runs_are_found_by_address_whatever_the_order() -> None:
    assert find_runs([100, 0, 40, 96], [8, 44, 20, 4]) == {1: ((1, 2), (0, 40))}
    assert find_runs([0, 0, 0], [0, 0, 4]) == {}, "what is empty shares nothing"
    assert find_runs([8, 0, 4, 20, 20], [4, 100, 4, 1, 1]) == {0: ((1, 2, 0, 3, 4), (0, 4, 8, 20, 20))}
    assert find_runs([], []) == {}


def test_the_tensor_that_covers_a_run_is_stored_under_its_own_name() -> None:
    spans = [span(8, (2,), name="part"), span(0, (10,), name="whole")]
    grouping = group_spans(spans, find_runs([8, 0], [8, 40]), lambda parts: pytest.fail("they surely overlap"))
    assert [(stored.name, stored.shape) for stored in grouping.stored] == [("whole", (10,))]
    assert grouping.index_of == (1, 0)
    assert (grouping.views[0].place, grouping.views[0].offset) == (0, 2)


def test_whether_sparse_tensors_meet_is_asked_and_believed() -> None:
    spans = [span(0, (3,), (100,)), span(4, (3,), (100,))]
    runs = find_runs([part.start for part in spans], [part.extent_bytes for part in spans])
    assert len(runs) == 1
    assert len(group_spans(spans, runs, lambda parts: False).stored) == 2
    together = group_spans(spans, runs, lambda parts: True)
    assert [stored.shape for stored in together.stored] == [(202,)]
    assert [view.offset for view in together.views] == [0, 1]
