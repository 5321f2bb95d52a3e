"""`watch` on real torch modules: what is timed, what is left alone, and what injected faults do to a forward."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ingest.torch_timers
from ingest.clock import SystemClock
from ingest.identity import RankIdentity
from ingest.rank_socket import Inject
from ingest.run import Run
from ingest.torch_timers import TimedLoader, watch_training
from tests.fake_launcher import FakeLauncher

TIMED_ALONE = {
    "train.data.duration",
    "train.forward.duration",
    "train.backward.duration",
    "train.optimizer.duration",
    "train.compute.duration",
    "train.compute.cpu",
}
BATCHES = [torch.ones(2, 4) * number for number in range(1, 6)]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[FakeLauncher]:
    launcher = FakeLauncher(tmp_path / "t.sock")
    yield launcher
    launcher.close()


@pytest.fixture
def run(launcher: FakeLauncher) -> Iterator[Run]:
    run = Run(
        RankIdentity(job="job", attempt=1, rank=0, node="n", socket=str(launcher.path), allow_inject=True),
        SystemClock(),
    )
    run.start()
    yield run
    run.stop()
    if ingest.torch_timers._watching.watch is not None:
        ingest.torch_timers._watching.watch.remove()
        ingest.torch_timers._watching.watch = None


@pytest.fixture
def one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class CountingModel(nn.Module):
    """A linear layer that counts its forwards and uses random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return nn.functional.dropout(self.linear(x), 0.5, self.training)


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, first: int = 1) -> list[float]:
    losses = []
    for step, batch in enumerate(batches, start=first):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(step=step, loss=loss)
        losses.append(loss.item())
    return losses


def rows_of(launcher: FakeLauncher, run: Run) -> dict[int, dict[str, float]]:
    run.finish()
    launcher.wait_for(lambda: launcher.metrics() and launcher.metrics()[-1].phase == "finished")
    return launcher.rows()


def watched(run: Run, model: nn.Module, inner: nn.Module | None = None) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD((inner or model).parameters(), lr=0.1)
    return optimizer, watch_training(run, model, optimizer, list(BATCHES))


def test_a_plain_training_loop_is_timed_by_itself(launcher: FakeLauncher, run: Run) -> None:
    model = CountingModel()
    optimizer, loader = watched(run, model)
    losses = train(run, model, optimizer, loader)
    rows = rows_of(launcher, run)
    assert list(rows) == [1, 2, 3, 4, 5]
    for step, row in rows.items():
        assert set(row) >= TIMED_ALONE | {"train.loss"}
        assert row["train.loss"] == pytest.approx(losses[step - 1])
        assert all(row[name] >= 0.0 for name in TIMED_ALONE)
        assert ("train.step.duration" in row) == (step > 1)
        assert "train.collective.wait" not in row


def test_watching_changes_no_result(run: Run) -> None:
    plain, seen = CountingModel(), CountingModel()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.manual_seed(1)
    expected = train(Run(None, SystemClock()), plain, optimizer, BATCHES)
    optimizer, loader = watched(run, seen)
    torch.manual_seed(1)
    assert train(run, seen, optimizer, loader) == expected
    assert seen.forwards == len(BATCHES)


def test_the_gradients_of_a_distributed_model_are_averaged_and_their_norm_and_wait_reported(
    launcher: FakeLauncher, run: Run, one_process_group: None
) -> None:
    plain = CountingModel()
    model = DistributedDataParallel(CountingModel())
    optimizer, loader = watched(run, model)
    torch.manual_seed(1)
    plain(BATCHES[0]).square().mean().backward()
    norm = math.hypot(*(float(parameter.grad.norm()) for parameter in plain.parameters() if parameter.grad is not None))
    torch.manual_seed(1)
    train(run, model, optimizer, loader)
    rows = rows_of(launcher, run)
    assert list(rows) == [1, 2, 3, 4, 5]
    assert rows[1]["train.gradient.local_norm"] == pytest.approx(norm, rel=1e-5)
    for row in rows.values():
        assert set(row) >= TIMED_ALONE | {"train.collective.wait", "train.gradient.local_norm"}


def test_a_norm_over_several_buckets_is_that_of_all_gradients(
    launcher: FakeLauncher, run: Run, one_process_group: None
) -> None:
    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))

    plain = layers()
    model = DistributedDataParallel(layers(), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch_training(run, model, optimizer, None)
    batch = torch.ones(2, 300)
    plain(batch).square().mean().backward()
    for step in (1, 2, 3):  # buckets are rebuilt after the first
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        run.log(step=step, loss=0.0)
    total = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])  # type: ignore[misc]
    rows = rows_of(launcher, run)
    assert [row["train.gradient.local_norm"] for row in rows.values()] == pytest.approx([float(total)] * 3, rel=1e-4)


def test_a_communication_hook_of_the_users_own_stays_and_compute_is_reported_only_where_it_is_pure(
    launcher: FakeLauncher, run: Run, one_process_group: None, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    calls = []
    monkeypatch.setattr(ingest.torch_timers, "_is_alone", lambda: False)
    model = DistributedDataParallel(CountingModel())

    def own(state: None, bucket: dist.GradBucket):  # type: ignore[no-untyped-def]
        calls.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    own.__annotations__.clear()
    model.register_comm_hook(None, own)
    optimizer, loader = watched(run, model)
    train(run, model, optimizer, loader)
    assert calls
    assert "communication hook of its own" in caplog.text
    for row in rows_of(launcher, run).values():
        assert "train.forward.duration" in row
        assert not [name for name in row if name.startswith("train.compute.")]


def test_a_hook_built_into_torch_stays_as_well(
    run: Run, one_process_group: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest.torch_timers, "_is_alone", lambda: False)
    model = DistributedDataParallel(CountingModel())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    optimizer, loader = watched(run, model)
    train(run, model, optimizer, loader)
    assert "communication hook of its own" in caplog.text
    assert model._comm_hooks == []


def test_a_distributed_job_without_a_hook_says_what_is_missing(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest.torch_timers, "_is_alone", lambda: False)
    watched(run, CountingModel())
    assert "not a DistributedDataParallel" in caplog.text


def test_a_second_watch_replaces_the_first_and_may_be_on_the_same_model(
    launcher: FakeLauncher, run: Run, one_process_group: None
) -> None:
    model = DistributedDataParallel(CountingModel())
    watched(run, model)
    optimizer, loader = watched(run, model)
    train(run, model, optimizer, loader)
    rows = rows_of(launcher, run)
    assert list(rows) == [1, 2, 3, 4, 5]
    assert all("train.collective.wait" in row for row in rows.values())


def test_an_evaluation_is_a_phase_and_no_step(launcher: FakeLauncher, run: Run) -> None:
    model = CountingModel()
    optimizer, loader = watched(run, model)
    train(run, model, optimizer, loader)
    model.eval()
    with torch.no_grad():
        model(BATCHES[0])
    assert run.current_phase == "eval"
    model.train()
    with torch.no_grad():
        model(BATCHES[0])  # e.g. a sample printed in the middle of training
    assert run.current_phase == "eval"
    train(run, model, optimizer, BATCHES[:1], first=6)
    assert run.current_phase == "train"
    assert list(rows_of(launcher, run)) == [1, 2, 3, 4, 5, 6]


def test_the_wrapped_loader_is_the_loader_in_everything_else(run: Run) -> None:
    class Loader(list[int]):
        batch_size = 7

    loader = watch_training(run, CountingModel(), None, Loader([1, 2, 3]))
    assert isinstance(loader, TimedLoader)
    assert (len(loader), loader.batch_size, list(loader), list(loader)) == (3, 7, [1, 2, 3], [1, 2, 3])
    with pytest.raises(AttributeError):
        _ = loader.sampler


def test_outside_a_launcher_nothing_is_hooked() -> None:
    model = CountingModel()
    batches = [1, 2]
    assert watch_training(Run(None, SystemClock()), model, None, batches) is batches
    assert not model._forward_hooks


def test_a_mistake_of_ours_stops_the_timing_and_not_the_training(
    launcher: FakeLauncher, run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CountingModel()
    optimizer, loader = watched(run, model)
    monkeypatch.setattr(ingest.torch_timers._watching.watch._timers, "forward_end", lambda: 1 // 0)  # type: ignore[union-attr]
    assert len(train(run, model, optimizer, loader)) == len(BATCHES)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert [row["train.loss"] for row in rows_of(launcher, run).values()]


def arm(run: Run, **fields: Any) -> None:
    run.injector._armed.append(Inject(**fields))


def test_an_injected_slowness_repeats_the_forward_and_leaves_the_random_numbers_alone(run: Run) -> None:
    plain, slow = CountingModel(), CountingModel()
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = train(Run(None, SystemClock()), plain, optimizer, BATCHES)
    optimizer, loader = watched(run, slow)
    arm(run, fault="slow", factor=3.0, seconds=600.0)
    torch.manual_seed(1)
    assert train(run, slow, optimizer, loader) == expected
    assert slow.forwards == 3 * len(BATCHES)


def test_an_injected_slow_backward_computes_in_the_backward_and_changes_nothing_else(run: Run) -> None:
    plain, slow = CountingModel(), CountingModel()
    torch.manual_seed(1)
    expected = train(Run(None, SystemClock()), plain, torch.optim.SGD(plain.parameters(), lr=0.1), BATCHES)
    optimizer, loader = watched(run, slow)
    arm(run, fault="slow_backward", factor=2.0, seconds=600.0)
    counts: list[int] = []
    slow.register_forward_hook(lambda module, args, output: counts.append(slow.forwards))
    torch.manual_seed(1)
    assert train(run, slow, optimizer, loader) == expected
    assert counts == [1, 4, 7, 10, 13]  # a step's forward, and two more before the next one
    assert slow.forwards == 3 * len(BATCHES)


@pytest.mark.parametrize("make", [lambda x: {"scores": x, "n": 1}, lambda x: (None, x)], ids=["mapping", "tuple"])
def test_work_is_done_in_the_backward_of_whatever_holds_a_tensor(make: Any) -> None:
    done: list[int] = []
    x = torch.ones(2, requires_grad=True) * 2.0
    ingest.torch_timers._work_in_backward(make(x), 3, lambda: done.append(1))
    assert not done
    x.sum().backward()
    assert len(done) == 3


def test_an_injected_sleep_is_in_the_forward_and_a_slow_loader_in_the_data(launcher: FakeLauncher, run: Run) -> None:
    model = CountingModel()
    optimizer, loader = watched(run, model)
    arm(run, fault="sleep", at_step=1, delay_seconds=0.02, seconds=600.0)
    arm(run, fault="slow_data", at_step=1, delay_seconds=0.03, seconds=600.0)
    train(run, model, optimizer, loader)
    rows = rows_of(launcher, run)
    assert all(row["train.forward.duration"] >= 0.02 for row in rows.values())
    assert all(rows[step]["train.data.duration"] >= 0.03 for step in (3, 4, 5))  # the loader was asked before step 2


@pytest.mark.parametrize("fault", ["nan_gradient", "scale_gradient"])
def test_poisoned_gradients_are_in_the_local_norm_of_their_step(
    launcher: FakeLauncher, run: Run, one_process_group: None, fault: str
) -> None:
    model = DistributedDataParallel(CountingModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = watch_training(run, model, optimizer, list(BATCHES))
    arm(run, fault=fault, at_step=3, factor=1e6)
    train(run, model, optimizer, loader)
    norms = {step: row["train.gradient.local_norm"] for step, row in rows_of(launcher, run).items()}
    spoilt = [step for step, norm in norms.items() if math.isnan(norm) or norm > 1e5]
    assert spoilt == ([3] if fault == "scale_gradient" else [3, 4, 5])  # what has become NaN stays so


def test_gradients_that_come_in_no_bucket_are_poisoned_before_the_optimizer(run: Run) -> None:
    model = CountingModel()
    optimizer, loader = watched(run, model)
    arm(run, fault="nan_gradient", at_step=2)
    losses = train(run, model, optimizer, loader)
    assert [math.isnan(loss) for loss in losses] == [False, False, True, True, True]


def test_an_injected_nan_is_in_the_loss_of_its_step(launcher: FakeLauncher, run: Run) -> None:
    model = CountingModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = watch_training(run, model, optimizer, list(BATCHES))
    run.step(10)
    arm(run, fault="nan", at_step=12)
    losses = train(run, model, optimizer, loader, first=10)
    assert [math.isnan(loss) for loss in losses[:3]] == [False, False, True]
    rows = rows_of(launcher, run)
    assert min(step for step, row in rows.items() if math.isnan(row["train.loss"])) == 12
    launcher.wait_for(lambda: launcher.of("fault_injected.v1"))  # goes out after the rows of its step
    (fault,) = launcher.of("fault_injected.v1")
    assert (fault["fault"], fault["parameters"]["step"]) == ("nan", 12.0)


def test_an_injected_exception_comes_out_of_the_forward(run: Run) -> None:
    model = CountingModel()
    optimizer, loader = watched(run, model)
    arm(run, fault="raise", at_step=2)
    with pytest.raises(RuntimeError, match="injected by transom inject"):
        train(run, model, optimizer, loader)
    assert run.current_step == 2


def test_a_compiled_model_is_timed_from_outside(launcher: FakeLauncher, run: Run) -> None:
    model = torch.compile(nn.Linear(4, 3), backend="eager")
    optimizer, loader = watched(run, model)
    train(run, model, optimizer, loader)
    rows = rows_of(launcher, run)
    assert list(rows) == [1, 2, 3, 4, 5]
    assert all(set(row) >= TIMED_ALONE for row in rows.values())
