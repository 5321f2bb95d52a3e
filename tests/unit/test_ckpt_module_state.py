"""The quick way to a module's state says what `state_dict()` says, and leaves alone whatever has its own words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.module_state import state_of_module


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


class Saving(Versioned):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "mine"] = torch.zeros(1)


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
