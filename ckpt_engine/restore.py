"""Putting a loaded checkpoint into a live state: everything is checked first, then written in place.

Tensors are written where they are, so that parameters, views and ties stay what they were. Objects get what
their `load_state_dict` expects: their own tensors, filled already, where they have such. What is not a tensor
is replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .blocks import Shard
from .errors import StateMismatch
from .fetching import LoadedShard
from .leaves import Leaves
from .tensors import TensorDoor
from .tree import ObjectState, TensorRef

if TYPE_CHECKING:
    from torch import Tensor

NAMED_MAX = 5  # keys in one sentence


class Restorer:
    """One load. Memory of `shard` may be changed by others later: nothing that is handed over lies in it."""

    def __init__(self, door: TensorDoor, shard: LoadedShard, threads: int) -> None:
        self._door = door
        self._leaves = Leaves(door, shard, threads)
        self._writes: list[Callable[[], object]] = []

    def plan(self, saved: Any, into: dict[str, Any]) -> None:
        """Find out how `into` becomes what was saved under its keys. Raises StateMismatch. Writes nothing."""
        if type(saved) is not dict or type(into) is not dict:
            raise StateMismatch("the state to load into must be a dict, such as {'model': model, 'step': 0}")
        self._leaves.look_for_meshes(into.values())
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

    def write(self) -> None:
        """Do what was planned. Raises StateMismatch only where an object's own `load_state_dict` refuses."""
        with self._door.torch.no_grad():
            self._leaves.fill()
            for write in self._writes:
                write()

    def _plan_object(self, node: Any, target: Any, path: str) -> None:
        state = node.value if isinstance(node, ObjectState) else node
        if isinstance(target, self._door.torch.nn.Module):
            value: Any = self._plan_module(state, target, path)
        elif isinstance(target, self._door.torch.optim.Optimizer) and isinstance(state, dict):
            value = self._plan_optimizer(state, target, path)
        else:
            value = self._build(state, own=True)

        def load() -> None:
            try:
                target.load_state_dict(value)
            except (RuntimeError, ValueError, KeyError) as error:
                raise StateMismatch(f"{path} does not take its saved state: {error}") from error

        self._writes.append(load)

    def _plan_module(self, state: Any, target: Any, path: str) -> Any:
        if not isinstance(state, dict):
            raise StateMismatch(f"{path} was not saved as a module's state")
        live = target.state_dict()
        # load_state_dict would cast dtypes silently, and find a wrong shape only after writing other tensors
        checked = {}
        for key, tensor in live.items():
            node = state.get(key)
            if isinstance(node, TensorRef) and self._leaves.can_check(tensor):
                checked[key] = self._leaves.check(node, tensor, f"{path}.{key}")
        same_keys = state.keys() == live.keys()
        if not same_keys and _takes_its_keys_only(self._door.torch, target):
            raise StateMismatch(f"{path} does not take its saved state: {_difference(state, live)}")
        keep: OrderedDict[Any, Any] = OrderedDict()
        for key, item in state.items():
            # What a module keeps as it is given must be its own; into its parameters it copies. Those are filled
            # already when it does, and copying a tensor onto itself costs nothing.
            extra = str(key).endswith("_extra_state")
            if same_keys and key in checked and not extra:
                self._leaves.put(item, checked[key])
                keep[key] = live[key]
            else:
                keep[key] = self._build(item, own=extra)
        return _with_metadata(keep, state)

    def _plan_optimizer(self, state: dict[Any, Any], target: Any, path: str) -> Any:
        """An optimizer keeps the tensors that it is given: its own again where it has some, else new ones."""
        live = target.state_dict()
        saved_sizes, live_sizes = _group_sizes(state), _group_sizes(live)
        if None not in (saved_sizes, live_sizes) and saved_sizes != live_sizes:
            raise StateMismatch(
                f"{path} has groups of {live_sizes} parameters here, but of {saved_sizes} in the checkpoint"
            )
        return self._reuse(state, live if saved_sizes == live_sizes else None, own=True)

    def _plan(self, node: Any, target: Any, path: str) -> Any:
        """What `target` will be; tensors and containers of `target` are kept and written to later."""
        if isinstance(node, TensorRef):
            if node.form != "tensor" or not isinstance(target, (self._door.torch.Tensor, Shard)):
                return self._leaves.take(node, own=True)
            self._leaves.put(node, self._leaves.check(node, target, path))
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

    def _reuse(self, node: Any, live: Any, *, own: bool) -> Any:
        """As `_build`, but with the tensors of `live` wherever they are of the same kind."""
        if isinstance(node, TensorRef):
            local = self._leaves.fitting(node, live)
            if local is not None:
                self._leaves.put(node, local)
                return live
        if isinstance(node, dict) and isinstance(live, dict):
            built = type(node)()
            for key, item in node.items():
                built[key] = self._reuse(item, live.get(key), own=own)
            return _with_metadata(built, node)
        return self._build(node, own=own)

    def _build(self, node: Any, *, own: bool) -> Any:
        return built(self._leaves, node, own=own)


def as_views(door: TensorDoor, shard: LoadedShard, saved: Any) -> dict[str, Any]:
    """The saved state with tensors that are views of the shard's memory. Raises StateMismatch where it is not the
    state of a job, or has what needs a place to be restored to."""
    if type(saved) is not dict:
        raise StateMismatch("what was saved is not a dict")
    leaves = Leaves(door, shard, 1)
    plain = leaves.plain_views()
    return {key: _viewed(leaves, plain, node) for key, node in saved.items()}


def _viewed(leaves: Leaves, plain: Sequence[Tensor | None], node: Any) -> Any:
    """As `built` with `own=False`, in fewer steps for what there are thousands of."""
    kind = node.__class__
    if kind is TensorRef and node.form == "tensor" and plain[node.index] is not None:
        return plain[node.index]
    if kind is dict:
        return {key: _viewed(leaves, plain, item) for key, item in node.items()}
    if kind is ObjectState:
        return _viewed(leaves, plain, node.value)
    if kind is OrderedDict:
        pairs = [(key, _viewed(leaves, plain, item)) for key, item in node.items()]
        return _with_metadata(OrderedDict(pairs), node)
    return built(leaves, node, own=False)


def built(leaves: Leaves, node: Any, *, own: bool) -> Any:
    """The value of a decoded tree."""
    if isinstance(node, TensorRef):
        return leaves.take(node, own=own)
    if isinstance(node, ObjectState):
        return built(leaves, node.value, own=own)
    if isinstance(node, dict):
        value = type(node)()
        for key, item in node.items():
            value[key] = built(leaves, item, own=own)
        return _with_metadata(value, node)
    if isinstance(node, list):
        return [built(leaves, item, own=own) for item in node]
    if isinstance(node, tuple):
        return tuple(built(leaves, item, own=own) for item in node)
    return node


def _takes_its_keys_only(torch: Any, module: Any) -> bool:
    """Whether loading is torch's own all the way: then another set of keys can only be refused."""
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
        return False
    return not any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or not type(part)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        for part in module.modules()
    )


def _difference(saved: dict[Any, Any], live: dict[Any, Any]) -> str:
    """The keys that only one side has."""
    missing = [str(key) for key in live if key not in saved]
    unexpected = [str(key) for key in saved if key not in live]
    told = [
        f"{what} {', '.join(keys[:NAMED_MAX])}{' and more' if len(keys) > NAMED_MAX else ''}"
        for what, keys in (("the checkpoint has no", missing), ("there is no place here for", unexpected))
        if keys
    ]
    return "; ".join(told)


def _group_sizes(state: dict[Any, Any]) -> list[int] | None:
    """How many parameters each group of an optimizer's state has; None where it is not one of the usual form."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    sizes = [len(group["params"]) for group in groups if isinstance(group.get("params"), list)]
    return sizes if len(sizes) == len(groups) else None


def _with_metadata(value: Any, node: Any) -> Any:
    if hasattr(node, "_metadata"):
        value._metadata = node._metadata
    return value
