"""Whether thousands of tensors are of the kinds that they were, told by one call of torch's compiler support.

What torch.compile asks before it runs compiled code again is what a save asks before it copies by an old plan: type,
dtype, shape, strides, device, and the bits that say that the values are other than the bytes. Its class for that is no
public one, so it is believed only where it has just told all of those apart; without it they are compared one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .picking import picker

if TYPE_CHECKING:
    from torch import Tensor

Check = Callable[[Sequence[Any]], bool]
Build = Callable[[Any, Sequence[Any]], Check]


class TensorGuard:
    """What some tensors were, but for where their bytes are; it keeps none of them alive."""

    def __init__(self, torch: Any, tensors: Sequence[Tensor], build: Build) -> None:
        """`build` is what `trusted_build` returned for this torch."""
        first: dict[int, int] = {}
        self._again: list[tuple[int, int]] = []  # one object twice, as tied weights are: asked once only
        for at, tensor in enumerate(tensors):
            if first.setdefault(id(tensor), at) != at:
                self._again.append((at, first[id(tensor)]))
        self._count = len(tensors)
        self._pick = picker(list(first.values())) if self._again else None
        self._torch = torch
        self._check = build(torch, tensors if self._pick is None else self._pick(tensors))

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """True where nothing of that has changed; False where it has, and where that is not sure."""
        if len(tensors) != self._count or any(tensors[at] is not tensors[one] for at, one in self._again):
            return False
        try:
            with self._torch.no_grad():  # or a tensor that needs no gradient any more would be another one
                return self._check(tensors if self._pick is None else self._pick(tensors))
        except (RuntimeError, TypeError):
            return False


def trusted_build(torch: Any) -> Build | None:
    """How to have torch tell tensors apart; None where this torch cannot, or does not tell all that matters."""
    try:
        sound = all(_tells_apart(torch, one, others) for one, others in _samples(torch))
    except Exception:  # noqa: BLE001 - of a private class of torch: whatever it does, the comparison one by one is there
        return None
    return _build if sound else None


def _build(torch: Any, tensors: Sequence[Any]) -> Check:
    with torch.no_grad():
        guards = torch._C._dynamo.guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
    return lambda those: guards.check(*those) is True


def _tells_apart(torch: Any, one: Any, others: Sequence[Any]) -> bool:
    guard = TensorGuard(torch, [one], _build)
    same = type(one)(one.detach().clone()) if type(one) is not torch.Tensor else one.detach()
    return guard.holds([one]) and guard.holds([same]) and not any(guard.holds([other]) for other in others)


def _samples(torch: Any) -> list[tuple[Any, list[Any]]]:
    """A tensor, and others that differ from it in one thing each."""
    plain, complex_one = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.complex64)
    strided = torch.zeros(2, 4)[:, ::2]
    return [
        (
            plain,
            [
                torch.zeros(2, 2, dtype=torch.int32), torch.zeros(4), torch.zeros(2, 2, 1), torch.zeros(2, 3), plain.T,
                strided, torch._neg_view(plain), torch.nn.Parameter(plain), torch.zeros(2, 2, device="meta"),
                plain.to_sparse(),
            ],
        ),
        (strided, [plain, torch.zeros(2, 6)[:, ::2]]),
        (complex_one, [complex_one.conj(), torch.zeros(2, 2, 2)]),
        (torch.nn.Parameter(plain), [plain, torch.nn.Parameter(plain.to(torch.float64))]),
        (torch.zeros(()), [torch.zeros(1), torch.zeros((), dtype=torch.float64)]),
        (torch.zeros(0, 3), [torch.zeros(3, 0), torch.zeros(0)]),
    ]  # fmt: skip
