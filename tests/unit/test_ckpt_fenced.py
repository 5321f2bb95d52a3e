"""Fenced saves: what the engine copies beside training is what was saved, or it is void and the ticket says why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import live_copy
from ckpt_engine.client import Checkpointer
from tests.ckpt_lab import EngineProcess, Lab, engine_in_thread, eventually

Make = Callable[..., Checkpointer]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Checkpointer] = []

    def make(socket: Path, attempt: int = 1, mode: Any = "fenced", **more: Any) -> Checkpointer:
        place = {"job": "job", "attempt": attempt, "rank": 0, "world_size": 1, "node": "n0", **more}
        made.append(Checkpointer(str(socket), None, mode=mode, **place))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


class Net(torch.nn.Module):
    """Large parameters, small ones, a tied one, and buffers that change in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 64)
        self.inner = torch.nn.Linear(64, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.odd = torch.nn.Linear(64, 3)
        self.head = torch.nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.inner(self.embedding(tokens))))
        return self.head(hidden).square().mean() + self.odd(hidden).square().mean()


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "step": 0}


def compute(state: dict[str, Any]) -> None:
    tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(state["step"]))
    state["model"](tokens).backward()


def update(state: dict[str, Any]) -> None:
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["step"] += 1


def step(state: dict[str, Any]) -> None:
    compute(state)
    update(state)


def bits(state: dict[str, Any]) -> list[bytes]:
    """Every tensor's bytes, and the step."""
    moments = [value for entry in state["optimizer"].state.values() for value in entry.values()]
    tensors = [*state["model"].state_dict().values(), *moments]
    return [
        *(bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist()) for tensor in tensors),
        bytes([state["step"]]),
    ]


def test_what_is_loaded_is_what_stood_there_when_it_was_saved(lab: Lab, make: Make) -> None:
    state = training()
    checkpointer = make(lab.socket)
    for _ in range(5):
        step(state)
        saved = bits(state)
        ticket = checkpointer.save(state, state["step"])
        compute(state)  # the buffers of the norm change here, the parameters do not
        update(state)
        assert ticket.sealed.wait(10), ticket.sealed.reason
    other = training(1)
    report = make(lab.socket, attempt=2, mode="copy").load(other)
    assert report is not None
    assert (report.tier, report.verified) == ("memory", True)
    assert bits(other) == saved
    assert other["model"].head.weight is other["model"].embedding.weight


def test_a_run_that_is_killed_and_resumed_ends_like_the_one_that_was_not(lab: Lab, make: Make) -> None:
    """With fenced saves before and after; bit for bit, in the run that never saved as well."""
    unbroken = training()
    for _ in range(12):
        step(unbroken)
    first, checkpointer = training(), make(lab.socket)
    for _ in range(7):
        step(first)
        if first["step"] % 2 == 0:
            checkpointer.save(first, first["step"])
    step(first)  # the step after the save of 6 has sealed it
    second, resumed = training(5), make(lab.socket, attempt=2)
    report = resumed.load(second)
    assert report is not None
    assert second["step"] == report.step == 6
    while second["step"] < 12:
        step(second)
        if second["step"] % 2 == 0:
            resumed.save(second, second["step"])
    assert bits(second) == bits(unbroken)


def test_parameters_and_moments_live_in_the_engines_sight_and_buffers_do_not(lab: Lab, make: Make) -> None:
    state = training()
    step(state)
    parameters = [*state["model"].parameters()]
    before = [parameter.data_ptr() for parameter in parameters]
    adopted = make(lab.socket).adopt(state)
    moved = [parameter for parameter, old in zip(parameters, before, strict=True) if parameter.data_ptr() != old]
    assert sum(parameter.numel() * 4 for parameter in moved) * 3 == adopted
    assert {parameter.shape for parameter in moved} >= {(64, 64), (64,)}
    assert state["model"].head.weight is state["model"].embedding.weight
    assert state["optimizer"].state[parameters[0]]["exp_avg"].data_ptr() % 64 == 0


def test_adoption_changes_no_value_and_training_goes_on_as_before(lab: Lab, make: Make) -> None:
    state, plain = training(), training()
    checkpointer = make(lab.socket)
    checkpointer.adopt(state)
    for _ in range(4):
        step(state)
        step(plain)
        checkpointer.adopt(state)  # after the first step there are moments, too
    assert bits(state) == bits(plain)


def test_a_write_before_the_fence_voids_the_save_and_leaves_the_one_before(lab: Lab, make: Make) -> None:
    state = training()
    checkpointer = make(lab.socket)
    step(state)
    good = bits(state)
    assert checkpointer.save(state, 1).sealed.wait(10)
    ticket = checkpointer.save(state, 2)
    with torch.no_grad():
        state["model"].inner.weight.add_(1)
    checkpointer.fence()
    assert "model.inner.weight was written before the fence" in ticket.failed
    assert ticket.durable.reason == ticket.failed
    assert [shard.step for shard in lab.admin.status().shards] == [1]
    other = training(1)
    make(lab.socket, attempt=2, mode="copy").load(other)
    assert bits(other) == good


def test_an_optimizer_that_nobody_fences_is_found_out(lab: Lab, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Its steps are seen where it was not part of the state, too; and nothing is sealed without a fence."""
    state = training()
    checkpointer = make(lab.socket)
    only_model = {"model": state["model"]}
    first = checkpointer.save(only_model, 1)
    step(state)
    second = checkpointer.save(only_model, 2)
    assert "without a fence" in first.failed
    step(state)
    checkpointer.fence()
    assert "was written before the fence" in second.failed
    assert lab.admin.status().shards == ()
    assert "step 1 was not saved" in caplog.text
    checkpointer.fence_before(state["optimizer"])
    third = checkpointer.save(only_model, 3)
    step(state)
    assert third.sealed.wait(10)


def test_a_write_that_leaves_no_trace_is_not_sealed_without_a_fence(lab: Lab, make: Make) -> None:
    model = torch.nn.Linear(64, 64)
    checkpointer = make(lab.socket)
    ticket = checkpointer.save({"model": model}, 1)
    model.weight.data.add_(1)  # torch counts no version for this
    checkpointer.save({"model": model}, 2)
    assert "without a fence" in ticket.failed
    assert [shard.step for shard in lab.admin.status().shards] == []


def test_the_fence_waits_until_the_engine_has_copied(lab: Lab, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is slow is awaited, and what the step then writes is not in it."""
    state = training()
    checkpointer = make(lab.socket)
    step(state)
    checkpointer.adopt(state)
    saved = bits(state)
    copied: list[str] = []
    plain = live_copy._copy

    def slow(slot: memoryview, source: int, start: int, stop: int) -> None:
        plain(slot, source, start, (start + stop) // 2)
        eventually(lambda: copied, "the fence")
        plain(slot, source, start, stop)

    monkeypatch.setattr(live_copy, "_copy", slow)
    ticket = checkpointer.save(state, 1)
    compute(state)
    copied.append("fence")
    update(state)
    assert ticket.sealed.wait(10)
    other = training(1)
    make(lab.socket, attempt=2, mode="copy").load(other)
    assert bits(other)[:-1] == saved[:-1]


def test_a_trainer_that_exits_right_after_a_save_has_saved(lab: Lab, make: Make) -> None:
    state = training()
    checkpointer = make(lab.socket)
    step(state)
    saved = bits(state)
    checkpointer.save(state, 1)
    checkpointer.close()
    other = training(1)
    make(lab.socket, attempt=2, mode="copy").load(other)
    assert bits(other) == saved


def test_a_tensor_that_somebody_else_looks_at_stays_where_it_was_and_is_named(
    lab: Lab, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    state = training()
    step(state)
    weight = state["model"].inner.weight
    alias, place = weight.detach(), weight.data_ptr()
    checkpointer = make(lab.socket)
    with pytest.raises(TypeError, match=r"^model\.inner\.weight cannot live in the engine's sight"):
        checkpointer.adopt(state)
    assert weight.data_ptr() == place
    assert alias.data_ptr() == place
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(alias, weight)
    with caplog.at_level(logging.WARNING):
        saved = bits(state)
        ticket = checkpointer.save(state, 1)
        step(state)
    assert ticket.sealed.wait(10)
    other = training(1)
    make(lab.socket, attempt=2, mode="copy").load(other)
    assert bits(other) == saved


def test_a_view_in_the_state_keeps_its_base_where_it_is(lab: Lab, make: Make) -> None:
    model = torch.nn.Linear(64, 64)
    row = model.weight.detach()[3]
    checkpointer = make(lab.socket)
    ticket = checkpointer.save({"model": model, "row": row}, 1)
    assert ticket.sealed.wait(10)
    with torch.no_grad():
        model.weight[3] = 7.0
    assert row.tolist() == [7.0] * 64


def test_a_layout_that_changes_and_an_optimizer_that_loads_are_adopted_again(lab: Lab, make: Make) -> None:
    state = training()
    checkpointer = make(lab.socket)
    assert checkpointer.save(state, 1).sealed.wait(10)  # no moments yet
    for number in range(2, 5):
        step(state)
        state["optimizer"].load_state_dict(state["optimizer"].state_dict())  # new tensors for the moments
        saved = bits(state)
        ticket = checkpointer.save(state, number)
        step(state)
        assert ticket.sealed.wait(10), ticket.sealed.reason
    other = training(1)
    make(lab.socket, attempt=2, mode="copy").load(other)
    assert bits(other) == saved


def test_an_engine_that_dies_costs_a_ticket_and_the_next_one_gets_the_memory_back(tmp_path: Path, make: Make) -> None:
    state = training()
    with EngineProcess(tmp_path) as first:
        checkpointer = make(first.socket)
        step(state)
        assert checkpointer.save(state, 1).sealed.wait(10)
        step(state)
        lost = checkpointer.save(state, 2)
        first.end(9)
    step(state)
    assert lost.failed == "" or "checkpoint engine" in lost.failed
    with EngineProcess(tmp_path):
        saved = eventually(lambda: _saved(checkpointer, state))
        other = training(1)
        report = make(first.socket, attempt=2, mode="copy").load(other)
        assert report is not None
        assert report.tier == "memory"
        assert bits(other) == saved


def _saved(checkpointer: Checkpointer, state: dict[str, Any]) -> Any:
    saved, ticket = bits(state), checkpointer.save(state, state["step"])
    step(state)
    return saved if ticket.sealed.wait(10) else None


def test_a_load_in_the_middle_of_a_save_comes_after_it(lab: Lab, make: Make) -> None:
    state = training()
    checkpointer = make(lab.socket)
    step(state)
    assert checkpointer.save(state, 1).sealed.wait(10)
    step(state)
    ticket = checkpointer.save(state, 2)
    checkpointer.load(state, step=1)
    assert ticket.sealed.wait(10)
    assert state["step"] == 1


def test_a_mode_that_there_is_not_is_refused(lab: Lab) -> None:
    with pytest.raises(ValueError, match="mode is copy or fenced, not 'slow'"):
        Checkpointer(str(lab.socket), None, job="job", attempt=1, rank=0, world_size=1, node="n0", mode="slow")  # type: ignore[arg-type]
