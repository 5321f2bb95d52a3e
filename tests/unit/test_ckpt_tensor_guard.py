"""One call of torch's tells whether tensors are what they were, or they are compared one by one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from ckpt_engine import plan as plan_module
from ckpt_engine import tensor_guard
from ckpt_engine.capture import Capture
from ckpt_engine.plan import GUARDED_AFTER, GUARDED_MIN, TensorPlan
from ckpt_engine.tensor_guard import TensorGuard, trusted_build
from ckpt_engine.tensors import TensorDoor


def guard(tensors: list[torch.Tensor]) -> TensorGuard:
    build = trusted_build(torch)
    assert build is not None, "the pinned torch tells all apart"
    return TensorGuard(torch, tensors, build)


def watched(count: int = GUARDED_MIN) -> tuple[Capture, dict[str, Any], TensorPlan]:
    """A state that was taken often enough to be watched."""
    capture = Capture(TensorDoor(torch))
    state: dict[str, Any] = {f"t{at}": torch.full((3, 2), float(at)) for at in range(count)}
    taken = capture.take(state)
    for _ in range(GUARDED_AFTER):
        taken = capture.take(state)
    return capture, state, taken.plan


def test_a_state_that_comes_again_is_compared_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    capture, state, plan = watched()
    monkeypatch.setattr(torch.Tensor, "is_contiguous", lambda *_: pytest.fail("it was asked one by one"))
    assert capture.take(state).plan is plan
    state["t0"] = torch.ones(3, 2)
    taken = capture.take(state)
    assert taken.plan is plan
    assert plan.addresses[0] == state["t0"].data_ptr(), "from where it is now"


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 3).T, torch.zeros(6),
        torch._neg_view(torch.zeros(3, 2)), torch.zeros(3, 4)[:, ::2],
    ],
    ids=["shape", "dtype", "strides", "dimensions", "negative", "gaps"],
)  # fmt: skip
def test_what_changed_is_planned_anew(other: torch.Tensor) -> None:
    capture, state, _ = watched()
    state["t7"] = other
    taken, fresh = capture.take(state), Capture(TensorDoor(torch)).take(state)
    assert taken.plan.layout == fresh.plan.layout
    assert taken.plan.odd == fresh.plan.odd


def test_tied_tensors_are_asked_once_and_noticed_when_they_part() -> None:
    one, two = torch.ones(3), torch.ones(2)
    tied = guard([one, two, one])
    assert tied.holds([one, two, one])
    assert not tied.holds([one, two, torch.ones(3)])
    assert not tied.holds([one, two])
    assert not guard([one, torch.ones(3)]).holds([one, one]), "which were two"


def test_no_tensor_is_kept_alive() -> None:
    tensors = [torch.ones(3)]
    watching, gone = guard(tensors), weakref.ref(tensors[0])
    tensors.clear()
    gc.collect()
    assert gone() is None
    assert watching.holds([torch.zeros(3)])


def test_a_tensor_that_needs_no_gradient_is_saved_with_and_without_a_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    watching = guard([parameter])
    with torch.no_grad():
        assert watching.holds([parameter])
    assert watching.holds([parameter])


class Lenient:
    """A torch whose guards see no difference."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def check(self, *_: Any) -> bool:
        return True


class Broken(Lenient):
    def check(self, *_: Any) -> bool:
        raise SystemError("it was made for another torch")


@pytest.mark.parametrize("kind", [Lenient, Broken, None], ids=["lenient", "broken", "missing"])
def test_a_torch_that_does_not_tell_is_not_believed(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    if kind is None:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    else:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", kind)
    assert trusted_build(torch) is None
    capture, state, plan = watched()
    assert plan._guard is None
    state["t7"] = torch.zeros(2, 3)
    assert capture.take(state).plan.layout != plan.layout


def test_few_tensors_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "TensorGuard", lambda *_: pytest.fail("that takes longer"))
    watched(GUARDED_MIN - 1)
    assert tensor_guard.TensorGuard is TensorGuard
