"""How large a shard the first save of a state will be, asked before anything is saved.

Optimizers make their tensors at the first step, so most of them are not there yet. A guess that is too small costs
the first save the time to make another slot, one that is too large at most twice the memory of the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .module_state import quick_state
from .segment import PAGE_BYTES
from .tensors import TensorDoor

if TYPE_CHECKING:
    from torch import Tensor

DESCRIPTION_BYTES = 512  # of one tensor in layout and values, with room for numbers that grow
DEPTH_MAX = 16


def expected_bytes(door: TensorDoor, state: dict[str, Any]) -> int:
    """Bytes of a segment for `state` after the first steps, in whole pages. No object is asked for its state."""
    sizes: dict[int, int] = {}
    count = missing = 0
    for value in state.values():
        for tensor in _tensors_in(door, value, 0):
            local = door.local(tensor)
            count += 1
            if door.is_plain(local) and local.layout is door.torch.strided and local.numel():
                sizes[local.data_ptr()] = max(_bytes_of(local), sizes.get(local.data_ptr(), 0))
        if isinstance(value, door.torch.optim.Optimizer):
            tensors, size = _yet_to_come(door, value)
            count, missing = count + tensors, missing + size
    total = sum(sizes.values()) + missing + (count + 16) * DESCRIPTION_BYTES + 4 * PAGE_BYTES
    return -(-total // PAGE_BYTES) * PAGE_BYTES


def is_quiet(door: TensorDoor, state: dict[str, Any]) -> bool:
    """Whether asking the objects of a state for theirs runs no code but torch's own, and changes nothing."""
    torch = door.torch
    for value in state.values():
        if isinstance(value, torch.nn.Module):
            if quick_state(torch, value) is None:
                return False
        elif isinstance(value, torch.optim.Optimizer):
            own = type(value).state_dict is torch.optim.Optimizer.state_dict
            if not own or value._optimizer_state_dict_pre_hooks or value._optimizer_state_dict_post_hooks:
                return False
        elif hasattr(value, "state_dict"):
            return False
    return True


def tensors_per_parameter(group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size an optimizer keeps for it, judged by the settings of its group."""
    if "betas" in group:
        return 2 + bool(group.get("amsgrad"))
    if "rho" in group:
        return 2
    momentum = bool(group.get("momentum"))
    if "alpha" in group and "centered" in group:
        return 1 + momentum + bool(group["centered"])
    return int(momentum)


def _yet_to_come(door: TensorDoor, optimizer: Any) -> tuple[int, int]:
    """(number, bytes) of the tensors that the first step will make."""
    count = size = 0
    for group in optimizer.param_groups:
        each = tensors_per_parameter(group)
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                count += each + 1
                size += each * _bytes_of(door.local(parameter)) + 8  # and the number of its steps
    return count, size


def _tensors_in(door: TensorDoor, value: Any, depth: int) -> Iterator[Tensor]:
    torch = door.torch
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for entry in value.state.values():
            yield from _tensors_in(door, entry, depth + 1)
    elif isinstance(value, dict) and depth < DEPTH_MAX:
        for item in value.values():
            yield from _tensors_in(door, item, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < DEPTH_MAX:
        for item in value:
            yield from _tensors_in(door, item, depth + 1)


def _bytes_of(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
