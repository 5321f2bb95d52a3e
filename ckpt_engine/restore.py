"""Putting a loaded checkpoint into a live state: everything is checked first, then written in place.

Tensors are written where they are, so that parameters, views and ties stay what they were. Objects get what
their `load_state_dict` expects. What is not a tensor is replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import StateMismatch
from .layout import Layout
from .tensors import TensorDoor
from .tree import ObjectState, TensorRef

if TYPE_CHECKING:
    from torch import Tensor


class Restorer:
    """One load. `views` are tensors over memory that others may change later: nothing may keep them."""

    def __init__(self, door: TensorDoor, layout: Layout, views: list[Tensor]) -> None:
        self._door = door
        self._layout = layout
        self._views = views
        self._owned: dict[int, Tensor] = {}
        self._writes: list[Callable[[], object]] = []

    def restore(self, saved: Any, into: dict[str, Any]) -> None:
        """Make `into` what was saved under its keys. Raises StateMismatch, and then nothing has been written
        yet, unless it was an object's own `load_state_dict` that refused."""
        if type(saved) is not dict or type(into) is not dict:
            raise StateMismatch("the state to load into must be a dict, such as {'model': model, 'step': 0}")
        for key, target in into.items():
            if key not in saved:
                raise StateMismatch(f"the checkpoint has no {key!r}; it has {', '.join(map(repr, saved)) or 'nothing'}")
            node = saved[key]
            if callable(getattr(target, "load_state_dict", None)):
                self._plan_object(node, target, key)
                continue
            value = self._plan(node.value if isinstance(node, ObjectState) else node, target, key)
            if value is not target:
                self._writes.append(lambda key=key, value=value: into.__setitem__(key, value))  # type: ignore[misc]
        with self._door.torch.no_grad():
            for write in self._writes:
                write()

    def _plan_object(self, node: Any, target: Any, path: str) -> None:
        state = node.value if isinstance(node, ObjectState) else node
        if isinstance(target, self._door.torch.nn.Module):
            self._check_module(state, target, path)
            # A module copies into its parameters, so it may see the views; what it keeps must be its own.
            keep = OrderedDict(
                (key, self._build(item, own=str(key).endswith("_extra_state"))) for key, item in state.items()
            )
            if hasattr(state, "_metadata"):
                keep._metadata = state._metadata  # type: ignore[attr-defined]
            value: Any = keep
        else:
            value = self._build(state, own=True)  # optimizers keep the tensors that they are given

        def load() -> None:
            try:
                target.load_state_dict(value)
            except (RuntimeError, ValueError, KeyError) as error:
                raise StateMismatch(f"{path} does not take its saved state: {error}") from error

        self._writes.append(load)

    def _check_module(self, state: Any, target: Any, path: str) -> None:
        """load_state_dict would cast dtypes silently, and find a wrong shape only after writing other
        tensors."""
        if not isinstance(state, dict):
            raise StateMismatch(f"{path} was not saved as a module's state")
        for key, live in target.state_dict().items():
            node = state.get(key)
            if isinstance(node, TensorRef) and self._door.is_plain(live):
                self._check(node, live, f"{path}.{key}")

    def _check(self, node: TensorRef, live: Tensor, path: str) -> None:
        place = self._layout.places[node.index]
        dtype = self._door.dtype_name(live, path)
        if (place.dtype, place.shape) != (dtype, tuple(live.shape)):
            raise StateMismatch(
                f"{path} is {dtype}{list(live.shape)} here, but {place.dtype}{list(place.shape)} in the checkpoint"
            )

    def _plan(self, node: Any, target: Any, path: str) -> Any:
        """What `target` will be; tensors and containers of `target` are kept and written to later."""
        if isinstance(node, TensorRef):
            if not isinstance(target, self._door.torch.Tensor):
                return self._own(node.index)
            self._check(node, target, path)
            view = self._views[node.index]
            if view.numel():
                self._writes.append(lambda: target.copy_(view))
            return target
        if isinstance(node, dict) and type(target) is type(node):
            return self._plan_dict(node, target, path)
        if isinstance(node, list) and isinstance(target, list):
            items = list(target) + [None] * (len(node) - len(target))
            values = [
                self._plan(item, old, f"{path}.{at}") for at, (item, old) in enumerate(zip(node, items, strict=False))
            ]
            self._writes.append(lambda: target.__setitem__(slice(None), values))
            return target
        if isinstance(node, tuple) and isinstance(target, tuple) and len(node) == len(target):
            pairs = enumerate(zip(node, target, strict=True))
            return tuple(self._plan(item, old, f"{path}.{at}") for at, (item, old) in pairs)
        return self._build(node, own=True)

    def _plan_dict(self, node: dict[Any, Any], target: dict[Any, Any], path: str) -> Any:
        for key in target:
            if key not in node:
                raise StateMismatch(f"the checkpoint has no {path}.{key}")
        values = {key: self._plan(item, target.get(key), f"{path}.{key}") for key, item in node.items()}
        self._writes.append(lambda: target.update(values))
        return target

    def _build(self, node: Any, *, own: bool) -> Any:
        if isinstance(node, TensorRef):
            return self._own(node.index) if own else self._views[node.index]
        if isinstance(node, ObjectState):
            return self._build(node.value, own=own)
        if isinstance(node, dict):
            built = type(node)()
            for key, item in node.items():
                built[key] = self._build(item, own=own)
            if hasattr(node, "_metadata"):
                built._metadata = node._metadata  # type: ignore[attr-defined]
            return built
        if isinstance(node, list):
            return [self._build(item, own=own) for item in node]
        if isinstance(node, tuple):
            return tuple(self._build(item, own=own) for item in node)
        return node

    def _own(self, index: int) -> Tensor:
        """A copy that nobody else has; one for each stored tensor, so what was tied is tied again."""
        if index not in self._owned:
            self._owned[index] = self._views[index].clone()
        return self._owned[index]
