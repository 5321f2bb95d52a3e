"""The states of modules and optimizers as their `state_dict()` would give them, asked again and again.

What a tree of modules looked like is remembered as names, types and counts; a save then compares those and collects the
tensors in a few passes of C speed for all of thousands of modules. Nothing of a state is kept alive by that.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, itemgetter, methodcaller
from typing import Any

from .module_state import is_torchs_own, is_torchs_own_class, quick_state
from .picking import picker

MODULES_MAX = 1_000_000
_DICT: Callable[[Any], dict[str, Any]] = attrgetter("__dict__")
_VERSION: Callable[[Any], Any] = attrgetter("_version")
_VALUES: Callable[[Any], Iterable[Any]] = methodcaller("values")
_PARTS: Callable[[Any], Any] = itemgetter(
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"
)
_OWN_WORDS = ("state_dict", "_save_to_state_dict")


class _Level:
    """All modules of one depth: what of them has to stay the same for their state to have the same names."""

    __slots__ = ("children", "leaves", "looks", "modules")

    def __init__(self, modules: Sequence[Any]) -> None:
        """Raises KeyError where one of them is not made like torch's, or has its own words for its state."""
        dicts = list(map(_DICT, modules))
        parameters, buffers, children, passing, *hooks = zip(*map(_PARTS, dicts), strict=True)
        if any(map(any, hooks)) or any(any(map(contains, dicts, repeat(word))) for word in _OWN_WORDS):
            raise KeyError("hooks or methods of its own")
        self.modules = modules
        self.children = list(chain.from_iterable(map(_VALUES, children)))
        self.leaves = list(chain.from_iterable(map(_VALUES, chain(parameters, buffers))))
        self.looks = (
            list(map(type, modules)), list(map(_VERSION, modules)), *map(_names, (parameters, buffers, children)),
            list(map(frozenset, passing)) if any(passing) else None,
            _missing(self.leaves), _missing(self.children),
        )  # fmt: skip


class ModuleMemory:
    """One module's state, as often as it is asked."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._looks: list[Any] | None = None
        self._names: list[str] = []
        self._pick = picker(())
        self.metadata: OrderedDict[str, Any] = OrderedDict()  # of the states that this one made; nobody changes it

    def state(self, module: Any) -> Any:
        """What `module.state_dict()` returns."""
        levels = self._survey(module) if is_torchs_own(self._torch) else None
        if levels is None:
            self._looks = None
            return module.state_dict()
        looks = [level.looks for level in levels]
        if looks != self._looks and not self._learn(module, levels, looks):
            return module.state_dict()
        leaves = list(chain.from_iterable([level.leaves for level in levels]))
        state: OrderedDict[str, Any] = OrderedDict(zip(self._names, self._pick(leaves), strict=True))
        state._metadata = self.metadata  # type: ignore[attr-defined]
        return state

    def _survey(self, module: Any) -> list[_Level] | None:
        """None where some module is to be asked itself."""
        levels: list[_Level] = []
        modules, count = [module], 0
        while modules:
            count += len(modules)
            try:
                levels.append(_Level(modules))
                if not all(is_torchs_own_class(self._torch, kind) for kind in set(map(type, modules))):
                    return None
            except (KeyError, TypeError, AttributeError):
                return None
            if count > MODULES_MAX:  # one that contains itself
                return None
            modules = [child for child in levels[-1].children if child is not None]
        return levels

    def _learn(self, module: Any, levels: list[_Level], looks: list[Any]) -> bool:
        """Note the order in which this tree names its tensors; False where it has something of its own to say."""
        self._looks = None
        state = quick_state(self._torch, module)
        if state is None:
            return False
        order = _Order(levels)
        if list(order.picked) != list(state):
            return False
        self._names, self._pick = list(order.picked), picker(list(order.picked.values()))
        self._looks, self.metadata = looks, state._metadata
        return True


class _Order:
    """Where, among the leaves of all levels, each name of a module's state stands: depth first, as torch goes."""

    def __init__(self, levels: Sequence[_Level]) -> None:
        self.picked: dict[str, int] = {}
        self._parts = [[_PARTS(_DICT(module)) for module in level.modules] for level in levels]
        self._places: list[list[tuple[int, int]]] = []  # of each module: its first parameter's, its first buffer's
        start = 0
        for level in self._parts:
            counts = [len(parameters) for parameters, *_ in level], [len(buffers) for _, buffers, *_ in level]
            firsts = list(_firsts(counts[0], start)), list(_firsts(counts[1], start + sum(counts[0])))
            self._places.append(list(zip(*firsts, strict=True)))
            start += sum(counts[0]) + sum(counts[1])
        self._children = [
            list(_firsts([sum(child is not None for child in parts[2].values()) for parts in level], 0))
            for level in self._parts
        ]
        self._visit(0, 0, "")

    def _visit(self, depth: int, at: int, prefix: str) -> None:
        parameters, buffers, children, passing, *_ = self._parts[depth][at]
        first_parameter, first_buffer = self._places[depth][at]
        for place, (name, tensor) in enumerate(parameters.items(), first_parameter):
            if tensor is not None:
                self.picked[prefix + name] = place
        for place, (name, tensor) in enumerate(buffers.items(), first_buffer):
            if tensor is not None and name not in passing:
                self.picked[prefix + name] = place
        child_at = self._children[depth][at]
        for name, child in children.items():
            if child is not None:
                self._visit(depth + 1, child_at, f"{prefix}{name}.")
                child_at += 1


def optimizer_state(torch: Any, optimizer: Any) -> Any:
    """What `optimizer.state_dict()` returns: asked itself where anything but torch's own code has a part in it."""
    base = torch.optim.Optimizer
    own = type(optimizer).state_dict is base.state_dict and "state_dict" not in vars(optimizer)
    hooks = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks if own else True
    if hooks or not _written_by_torch(base.state_dict):
        return optimizer.state_dict()
    groups, entries = optimizer.param_groups, optimizer.state
    parameters = list(chain.from_iterable(map(itemgetter("params"), groups)))
    number_of = dict(zip(map(id, parameters), range(len(parameters)), strict=True))
    keys = list(entries)
    plain = set(map(type, keys)) <= {torch.Tensor, torch.nn.Parameter}
    if len(number_of) != len(parameters) or not plain:  # one twice, or a key that is no parameter
        return optimizer.state_dict()
    try:
        numbers = list(map(number_of.__getitem__, map(id, keys)))
    except KeyError:
        return optimizer.state_dict()
    packed, start = [], 0
    for group in groups:
        end = start + len(group["params"])
        rest = {name: value for name, value in group.items() if name != "params"}
        packed.append({**rest, "params": list(range(start, end))})
        start = end
    return {"state": dict(zip(numbers, entries.values(), strict=True)), "param_groups": packed}


def _written_by_torch(method: Any) -> bool:
    """Whether nobody has put another in its place."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return str(getattr(code, "co_filename", "")).endswith("optimizer.py")


def _names(tables: Sequence[Any]) -> tuple[list[int], list[str]] | None:
    """How many entries each has, and their names; None where there are none."""
    return (list(map(len, tables)), list(chain.from_iterable(tables))) if any(tables) else None


def _missing(values: Sequence[Any]) -> list[int]:
    """Where None stands."""
    return [at for at, value in enumerate(values) if value is None]


def _firsts(counts: Sequence[int], start: int) -> Iterable[int]:
    for count in counts:
        yield start
        start += count
