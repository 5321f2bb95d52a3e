"""The quick way to a module's state says what `state_dict()` says, and leaves alone whatever has its own words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine import object_state
from ckpt_engine.object_state import ModuleMemory, optimizer_state


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.head
        self.nothing = None
        self.register_parameter("absent", None)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("missing", None)
        self.register_buffer("kept", torch.ones(2))
        self.norm = nn.BatchNorm1d(3)
        self.children_of_mine = nn.ModuleDict(
            {"a": nn.ModuleList([nn.Linear(1, 1)]), "b": nn.ParameterList([torch.ones(1)])}
        )


class Versioned(nn.Module):
    _version = 7

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "versioned": lambda: nn.Sequential(Versioned(), nn.Sequential()),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "lstm": lambda: nn.LSTM(3, 4),
    "empty": nn.Identity,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
}


def state_of_module(torch: Any, module: Any) -> Any:
    return ModuleMemory(torch).state(module)


def same(one: Any, other: Any) -> bool:
    return (
        list(one) == list(other)
        and all(torch.equal(one[key], other[key]) and one[key].data_ptr() == other[key].data_ptr() for key in other)
        and type(one) is type(other)
        and one._metadata == other._metadata
        and list(one._metadata) == list(other._metadata)
    )


@pytest.mark.parametrize("name", MODULES)
def test_it_is_what_the_module_would_say(name: str) -> None:
    module = MODULES[name]()
    assert same(state_of_module(torch, module), module.state_dict())


def times_asked(module: nn.Module) -> int:
    """How often a `state_dict` of modules is called for it."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is nn.Module.state_dict.__code__

    sys.setprofile(count)
    try:
        state_of_module(torch, module)
    finally:
        sys.setprofile(None)
    return calls


def test_the_quick_way_is_taken() -> None:
    assert times_asked(Tied()) == 0
    assert times_asked(nn.Sequential(Extra())) == 2


class Overriding(Versioned):
    def state_dict(self, *args: Any, **more: Any) -> Any:
        return (
            {**super().state_dict(*args, **more), "mine": torch.zeros(1)}
            if not args and not more
            else super().state_dict(*args, **more)
        )


MINE = torch.zeros(1)


class Saving(Versioned):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "mine"] = MINE


class Extra(Versioned):
    def get_extra_state(self) -> torch.Tensor:
        return torch.full((1,), 3.0)

    def set_extra_state(self, state: Any) -> None: ...


def hooked(register: str) -> nn.Module:
    module = Versioned()

    def hook(self: Any, *rest: Any) -> None:
        if isinstance(rest[0], dict):
            rest[0]["hooked"] = torch.ones(1)
        else:
            self.weight.data.fill_(5)

    getattr(module, register)(hook)
    return module


def patched(name: str) -> nn.Module:
    module = Versioned()
    own = {"state_dict": lambda **_: {"mine": torch.zeros(1)}, "_save_to_state_dict": lambda *_: None}
    setattr(module, name, own[name])
    return module


@pytest.mark.parametrize(
    "make",
    [
        Overriding, Saving, Extra, lambda: hooked("register_state_dict_post_hook"),
        lambda: hooked("register_state_dict_pre_hook"), lambda: hooked("_register_state_dict_hook"),
        lambda: patched("_save_to_state_dict"),
    ],
    ids=["state_dict", "save", "extra", "post", "pre", "private", "instance"],
)  # fmt: skip
@pytest.mark.parametrize("inner", [False, True])
def test_a_module_with_its_own_words_is_asked(make: Callable[[], nn.Module], inner: bool) -> None:
    module = nn.Sequential(nn.Linear(1, 1), make()) if inner else make()
    said, expected = state_of_module(torch, module), module.state_dict()
    assert list(said) == list(expected)
    assert all(torch.equal(said[key], expected[key]) for key in expected)


def test_a_state_dict_that_somebody_has_put_in_torch_s_place_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "state_dict", lambda self: {"theirs": torch.ones(1)})
    assert list(state_of_module(torch, Tied())) == ["theirs"]


def test_an_instance_with_its_own_method_is_asked() -> None:
    assert list(state_of_module(torch, patched("state_dict"))) == ["mine"]


def changed_ways(module: Any) -> list[Callable[[], object]]:
    """Changes of a tree of modules, one after another; each but the first leaves the one before in place."""
    more = torch.ones(1)
    return [
        lambda: None,
        lambda: setattr(module.head, "weight", nn.Parameter(torch.zeros(5, 3))),  # no longer tied
        lambda: module.register_buffer("late", torch.ones(1)),
        lambda: module.register_buffer("late", torch.ones(1), persistent=False),
        lambda: module.children_of_mine["a"].append(nn.Linear(2, 2)),
        lambda: setattr(module, "norm", nn.GroupNorm(1, 3)),
        lambda: setattr(module.norm, "bias", None),
        lambda: setattr(module, "absent", nn.Parameter(torch.ones(1))),
        lambda: setattr(module.norm, "_version", 9),
        lambda: setattr(module, "again", None),
        lambda: module.children_of_mine.pop("b"),
        lambda: module.norm.register_state_dict_post_hook(lambda own, state, *_: state.update(more=more)),
        lambda: module.norm._state_dict_hooks.clear(),
        lambda: setattr(module, "norm", Saving()),
        lambda: setattr(module, "norm", None),
    ]


def test_a_tree_that_changes_is_asked_as_if_for_the_first_time() -> None:
    module = Tied()
    memory = ModuleMemory(torch)
    for change in changed_ways(module):
        change()
        for _ in range(2):
            assert same(memory.state(module), module.state_dict())


def test_a_tree_that_stays_is_not_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, memory = Tied(), ModuleMemory(torch)
    memory.state(module)
    monkeypatch.setattr(object_state, "quick_state", lambda *_: pytest.fail("it was walked once more"))
    module.embedding.weight = nn.Parameter(torch.zeros(5, 3))
    assert same(memory.state(module), module.state_dict())


def test_a_module_that_contains_itself_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_state, "MODULES_MAX", 50)
    module = nn.Sequential(nn.Linear(1, 1))
    module.append(module)
    with pytest.raises(RecursionError):
        ModuleMemory(torch).state(module)


def optimizer(*groups: list[nn.Parameter], kind: Any = torch.optim.AdamW) -> Any:
    made = kind([{"params": group, "lr": 0.1 * (at + 1)} for at, group in enumerate(groups)])
    for group in groups[:2]:
        for parameter in group:
            parameter.grad = torch.ones_like(parameter)
    made.step()
    return made


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizer(parameters(3)), lambda: optimizer(parameters(1), parameters(2), parameters(2)),
        lambda: optimizer(parameters(2), kind=torch.optim.SGD), lambda: torch.optim.Adagrad(parameters(2)),
    ],
    ids=["one group", "three groups", "no state", "state at once"],
)  # fmt: skip
def test_an_optimizer_s_state_is_what_it_would_say(make: Callable[[], Any]) -> None:
    said, expected = optimizer_state(torch, made := make()), made.state_dict()
    assert repr(said) == repr(expected)
    for number, entry in expected["state"].items():
        assert all(said["state"][number][name] is value for name, value in entry.items())


def test_an_optimizer_with_its_own_words_is_asked() -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {"mine": 1}

    assert optimizer_state(torch, Own(parameters(1), lr=0.1)) == {"mine": 1}
    hooked = optimizer(parameters(1))
    hooked.register_state_dict_post_hook(lambda own, state: {"hooked": 1})
    assert optimizer_state(torch, hooked) == {"hooked": 1}
    patched = optimizer(parameters(1))
    patched.state_dict = lambda: {"patched": 1}
    assert optimizer_state(torch, patched) == {"patched": 1}


def test_what_is_no_parameter_of_an_optimizer_is_left_to_torch() -> None:
    made = optimizer(parameters(2))
    made.state["extra"] = {"a": torch.ones(1)}
    assert repr(optimizer_state(torch, made)) == repr(made.state_dict())
    twice = optimizer(parameters(1))
    twice.param_groups[0]["params"] *= 2
    assert repr(optimizer_state(torch, twice)) == repr(twice.state_dict())
