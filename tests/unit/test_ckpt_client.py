"""`Checkpointer` with real tensors: what is loaded is what was saved, bit for bit, or an error says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.client import Checkpointer
from ckpt_engine.copying import CopyList
from ckpt_engine.errors import CheckpointDamaged, CheckpointNotFound, StateMismatch
from ckpt_engine.layout import ELEMENT_TYPES
from ckpt_engine.manifest import complete_steps, shard_name, step_folder
from ckpt_engine.segment import payload_region
from tests.ckpt_lab import ROOT, EngineProcess, Lab, engine_in_thread, eventually
from tests.ckpt_torch import bits, same

Make = Callable[..., Checkpointer]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Checkpointers of rank 0, closed at the end."""
    made: list[Checkpointer] = []

    def make(socket: Path | None, directory: Path | None = None, attempt: int = 1, **more: Any) -> Checkpointer:
        place = {"job": "job", "attempt": attempt, "rank": 0, "world_size": 1, "node": "n0", **more}
        made.append(Checkpointer(socket and str(socket), directory and str(directory), **place))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1, "betas": (0.8, 0.95)}, {"params": [*model[1:].parameters()]}],
        weight_decay=0.01,
    )
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(99)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW([{"params": model[0].parameters()}, {"params": [*model[1:].parameters()]}])


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_training_state_comes_back_bit_for_bit(lab: Lab, make: Make, tier: str) -> None:
    model, optimizer = trained()
    rng = torch.get_rng_state()
    state = {"model": model, "optimizer": optimizer, "rng": rng, "step": 7, "sampler": {"epoch": (1, None)}}
    assert make(lab.socket).save(state, 7).durable.wait(20)
    other, other_optimizer = fresh()
    into: dict[str, Any] = {"model": other, "optimizer": other_optimizer, "rng": None, "step": 0, "sampler": {}}
    source = make(lab.socket, attempt=2) if tier == "memory" else make(None, lab.directory, attempt=2)
    report = source.load(into, step=7)
    assert report is not None
    assert (report.step, report.tier, report.verified, report.attempt) == (7, tier, True, 1)
    assert same(model.state_dict(), other.state_dict())
    assert same(optimizer.state_dict(), other_optimizer.state_dict())
    assert (into["step"], into["sampler"]) == (7, {"epoch": (1, None)})
    assert same(rng, into["rng"])
    if tier == "memory":
        eventually(lambda: lab.told("loaded", 7, "memory"))


def test_the_loaded_job_trains_on_exactly_like_the_first(lab: Lab, make: Make) -> None:
    model, optimizer = trained()
    make(lab.socket).save({"model": model, "optimizer": optimizer}, 3)
    other, other_optimizer = fresh()
    make(lab.socket, attempt=2).load({"model": other, "optimizer": other_optimizer})
    batch = torch.randn(4, 6)
    for net, tuner in ((model, optimizer), (other, other_optimizer)):
        net(batch).square().sum().backward()
        tuner.step()
    assert same(model.state_dict(), other.state_dict())
    assert same(optimizer.state_dict(), other_optimizer.state_dict())


def test_what_happens_after_the_save_is_not_in_it(lab: Lab, make: Make) -> None:
    model, optimizer = trained()
    checkpointer = make(lab.socket)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {"model": model, "optimizer": optimizer, "counts": [1, 2]}
    checkpointer.save(state, 1)
    for parameter in model.parameters():
        parameter.data.fill_(7)
    for entry in optimizer.state.values():
        entry["step"].add_(100)
    state["counts"].append(3)
    other, other_optimizer = fresh()
    into: dict[str, Any] = {"model": other, "optimizer": other_optimizer, "counts": None}
    checkpointer.load(into, 1)
    assert same(dict(other.state_dict()), before)
    assert {float(entry["step"]) for entry in other_optimizer.state.values()} == {3.0}
    assert into["counts"] == [1, 2]


def test_what_was_loaded_is_not_what_the_slot_will_hold_next(lab: Lab, make: Make) -> None:
    """Nothing that a load hands over may lie in shared memory: the slot is written again."""
    _, optimizer = trained()
    checkpointer = make(lab.socket)
    checkpointer.save({"optimizer": optimizer, "x": torch.ones(4)}, 1)
    _, other = fresh()
    into: dict[str, Any] = {"optimizer": other, "x": None}
    checkpointer.load(into, 1)
    kept = json.dumps(str(other.state_dict()))
    for step in (2, 3, 4):
        for entry in optimizer.state.values():
            entry["exp_avg"].fill_(step)
        checkpointer.save({"optimizer": optimizer, "x": torch.zeros(4)}, step)
    assert json.dumps(str(other.state_dict())) == kept
    assert into["x"].tolist() == [1.0] * 4


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", [name for name in ELEMENT_TYPES if hasattr(torch, name)])
def test_every_dtype_comes_back_with_its_bits(lab: Lab, make: Make, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(1, 1 + 24 * ELEMENT_TYPES[name].size_bytes, dtype=torch.int64).remainder(251).to(torch.uint8)
    flat = raw.remainder(2).bool()[:24] if dtype is torch.bool else raw.view(dtype)
    cube = flat.reshape(2, 3, 4)
    tensors = [cube, cube.transpose(0, 2), cube[:, 1], flat[0], flat[:0].reshape(0, 5), cube[:, :, ::2]]
    checkpointer = make(lab.socket)
    checkpointer.save({"tensors": tensors}, 1)
    into: dict[str, Any] = {"tensors": None}
    checkpointer.load(into)
    assert same(into["tensors"], tensors)


def test_conjugate_and_negative_views_are_what_they_look_like(lab: Lab, make: Make) -> None:
    numbers = torch.complex(torch.arange(4.0), torch.ones(4))
    tensors = [numbers, numbers.conj(), numbers.conj().imag, numbers.imag]
    checkpointer = make(lab.socket)
    checkpointer.save({"tensors": tensors}, 1)
    into: dict[str, Any] = {"tensors": None}
    checkpointer.load(into)
    assert same(into["tensors"], tensors)


def test_tied_weights_are_stored_once_and_stay_tied(lab: Lab, make: Make) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(50, 8), "head": torch.nn.Linear(8, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    weight = torch.randn(3)
    checkpointer = make(lab.socket)
    checkpointer.save({"model": model, "pair": [weight, weight]}, 1)
    assert lab.admin.status().shards[0].size_bytes == (50 * 8 + 3) * 4
    model["embed"].weight.data.zero_()
    into: dict[str, Any] = {"model": model, "pair": None}
    checkpointer.load(into)
    assert model["head"].weight is model["embed"].weight
    assert into["pair"][0] is into["pair"][1]
    assert same(into["pair"][0], weight)


def test_a_slice_takes_its_own_size_not_its_storage(lab: Lab, make: Make) -> None:
    big = torch.arange(1_000_000)
    make(lab.socket).save({"slice": big[:10]}, 1)
    assert lab.admin.status().shards[0].size_bytes == 80


def test_a_layout_may_change_from_save_to_save(lab: Lab, make: Make) -> None:
    """A key at the second save, a grown tensor at the third, a lost one at the fourth: the other slot stays good."""
    checkpointer = make(lab.socket)
    states: list[dict[str, Any]] = [
        {"a": torch.full((10,), 1.0)},
        {"a": torch.full((10,), 2.0), "b": torch.full((3,), 2, dtype=torch.int8)},
        {"a": torch.full((2_000_000,), 3.0), "b": torch.full((3,), 3, dtype=torch.int8)},
        {"b": torch.full((3,), 4, dtype=torch.int8)},
        {"b": torch.full((3,), 5, dtype=torch.int8), "note": "x" * 100_000},
    ]
    for step, state in enumerate(states):
        assert checkpointer.save(state, step).sealed.reached
        for held in {step, max(step - 1, 0)}:
            into: dict[str, Any] = dict.fromkeys(states[held])
            report = checkpointer.load(into, held)
            assert report is not None
            assert same(into, states[held])


def test_the_shape_of_what_is_loaded_into_is_checked_before_anything_is_written(lab: Lab, make: Make) -> None:
    checkpointer = make(lab.socket)
    checkpointer.save({"a": torch.ones(4), "b": torch.ones(1), "model": torch.nn.Linear(2, 2)}, 1)
    first = torch.zeros(4)
    for wrong, path in (
        ({"a": first, "b": torch.zeros(4)}, r"b is float32\[4\] here, but float32\[1\]"),
        ({"a": first, "b": torch.zeros(1, dtype=torch.int64)}, r"b is int64\[1\] here"),
        ({"a": first, "model": torch.nn.Linear(2, 3)}, r"model\.weight is float32\[3, 2\] here"),
        ({"a": first, "model": torch.nn.Linear(2, 2).half()}, r"model\.weight is float16\[2, 2\] here"),
        ({"a": first, "rng": None}, r"no 'rng'; it has 'a', 'b', 'model'"),
    ):
        with pytest.raises(StateMismatch, match=path):
            checkpointer.load(wrong, 1)
        assert first.tolist() == [0.0] * 4, path


def test_a_key_that_the_checkpoint_lacks_is_an_error_and_one_it_has_more_is_added(lab: Lab, make: Make) -> None:
    checkpointer = make(lab.socket)
    checkpointer.save({"stats": {"mean": torch.ones(2), "count": 3}}, 1)
    with pytest.raises(StateMismatch, match=r"no stats\.deviation"):
        checkpointer.load({"stats": {"deviation": 0}}, 1)
    into: dict[str, Any] = {"stats": {}}
    checkpointer.load(into, 1)
    assert same(into, {"stats": {"mean": torch.ones(2), "count": 3}})


def test_tensors_are_loaded_where_they_are(lab: Lab, make: Make) -> None:
    checkpointer = make(lab.socket)
    checkpointer.save({"outer": [{"x": torch.ones(3)}, (torch.full((2,), 5.0), 1)]}, 1)
    one, two = torch.zeros(3), torch.zeros(2, requires_grad=True)
    into: dict[str, Any] = {"outer": [{"x": one}, (two, 0)]}
    inner = into["outer"][0]
    checkpointer.load(into, 1)
    assert into["outer"][0] is inner
    assert one.tolist() == [1.0] * 3
    assert two.tolist() == [5.0] * 2
    assert into["outer"][1] == (two, 1)


def test_a_load_that_does_not_fit_gives_back_the_slot_it_was_lent(lab: Lab, make: Make) -> None:
    checkpointer = make(lab.socket, busy_wait_seconds=0.05)
    for step in (1, 2):
        assert checkpointer.save({"a": torch.ones(4)}, step).sealed.reached
    with pytest.raises(StateMismatch):
        checkpointer.load({"a": torch.zeros(5)}, 1)
    assert checkpointer.save({"a": torch.ones(4)}, 3).sealed.reached


def test_a_save_that_finds_no_free_slot_is_skipped_and_says_so(
    lab: Lab, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make(lab.socket, busy_wait_seconds=0.02)
    for step in (1, 2):
        checkpointer.save({"a": torch.ones(4)}, step)
    older = next(entry for entry in lab.engine._table.sealed() if entry[2].step == 1)
    assert lab.engine._table.lease(older[1], older[2]) is not None
    ticket = checkpointer.save({"a": torch.ones(4)}, 3)
    assert ticket.failed.startswith("skipped, the other slot was still being read")
    assert ticket.durable.reason == ticket.failed
    assert "step 3 was not saved: skipped" in caplog.text
    lab.engine._table.release(older[1])
    assert checkpointer.save({"a": torch.ones(4)}, 4).sealed.reached


def test_a_state_that_an_object_does_not_take_is_a_mismatch(lab: Lab, make: Make) -> None:
    checkpointer = make(lab.socket)
    checkpointer.save({"model": torch.nn.Linear(2, 2)}, 1)
    with pytest.raises(StateMismatch, match="model does not take its saved state"):
        checkpointer.load({"model": torch.nn.Linear(2, 2, bias=False)}, 1)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda: torch.eye(2).to_sparse(), r"^extra\.bad is a tensor of dtype torch\.float32, layout torch\.sparse"),
        (lambda: torch.empty(2, device="meta"), r"^extra\.bad is a tensor of .* on meta"),
        (lambda: torch.ones(2).as_subclass(Subclass), r"^extra\.bad is a .*Subclass"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
            r"^extra\.bad is a tensor of dtype torch\.qint8",
        ),
        (lambda: torch.float32, r"^extra\.bad is a torch\.dtype"),
        (lambda: {1, 2}, r"^extra\.bad is a builtins\.set"),
    ],
    ids=["sparse", "meta", "subclass", "quantized", "dtype", "set"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_cannot_be_saved_is_refused_by_name_and_the_last_save_stays(
    lab: Lab, make: Make, value: Callable[[], Any], text: str
) -> None:
    checkpointer = make(lab.socket)
    checkpointer.save({"x": torch.ones(2)}, 1)
    with pytest.raises(TypeError, match=text):
        checkpointer.save({"x": torch.zeros(2), "extra": {"bad": value()}}, 2)
    into: dict[str, Any] = {"x": None}
    checkpointer.load(into)
    assert into["x"].tolist() == [1.0, 1.0]


def test_a_copy_that_fails_gives_its_slot_back(lab: Lab, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = make(lab.socket)
    checkpointer.save({"x": torch.ones(2)}, 1)

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error")

    with monkeypatch.context() as patch:
        patch.setattr(CopyList, "copy", broken)
        with pytest.raises(RuntimeError, match="CUDA error"):
            checkpointer.save({"x": torch.zeros(2)}, 2)
    assert [shard.step for shard in lab.admin.status().shards] == [1]
    assert checkpointer.save({"x": torch.zeros(2)}, 3).sealed.reached


def test_memory_that_decayed_falls_to_disk_and_is_told(lab: Lab, make: Make) -> None:
    checkpointer = make(lab.socket)
    assert checkpointer.save({"x": torch.arange(100)}, 1).durable.wait(20)
    _, slot, header = lab.engine._table.sealed()[0]
    assert slot.segment is not None
    payload_region(slot.segment.view, header)[13] ^= 1
    into: dict[str, Any] = {"x": None}
    report = checkpointer.load(into, 1)
    assert report is not None
    assert report.tier == "disk"
    assert same(into["x"], torch.arange(100))
    assert "changed after step 1 was sealed" in eventually(lambda: lab.told("damaged", 1, "memory"))[0].reason
    assert lab.admin.status().shards == ()


def damage(directory: Path, step: int) -> None:
    path = step_folder(directory, step) / shard_name(0, 1)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


def test_a_damaged_file_is_not_loaded(tmp_path: Path, make: Make) -> None:
    checkpointer = make(None, tmp_path)
    checkpointer.save({"x": torch.arange(100)}, 1)
    damage(tmp_path, 1)
    into: dict[str, Any] = {"x": torch.zeros(100, dtype=torch.int64)}
    with pytest.raises(CheckpointDamaged, match="do not match their checksum"):
        checkpointer.load(into, 1)
    assert not into["x"].any()


@pytest.mark.parametrize("engine", [True, False])
def test_asked_for_the_newest_a_lone_rank_falls_to_the_one_before(tmp_path: Path, make: Make, engine: bool) -> None:
    writer = make(None, tmp_path / "ck")
    for step in (1, 2):
        writer.save({"x": torch.tensor(step)}, step)
    damage(tmp_path / "ck", 2)
    into: dict[str, Any] = {"x": None}
    with engine_in_thread(tmp_path) as lab:
        report = make(lab.socket if engine else None, tmp_path / "ck", attempt=2).load(into)
        assert report is not None
        assert (report.step, report.tier, int(into["x"])) == (1, "disk", 1)
        if engine:
            eventually(lambda: lab.told("damaged", 2, "disk"))


def test_a_step_that_is_nowhere_is_named_with_what_there_is(lab: Lab, make: Make) -> None:
    checkpointer = make(lab.socket)
    assert checkpointer.load({"x": None}) is None
    assert checkpointer.save({"x": torch.ones(1)}, 5).durable.wait(20)
    with pytest.raises(CheckpointNotFound, match=r"step 6 is neither in memory nor complete .* there: 5"):
        checkpointer.load({"x": None}, 6)
    with pytest.raises(CheckpointNotFound, match="saved by 1 ranks, now there are 2"):
        make(None, lab.directory, attempt=2, world_size=2).load_views(5)
    lab.admin.reject_from(5, 1, "loss is NaN")
    with pytest.raises(CheckpointNotFound, match="step 5 was rejected: loss is NaN"):
        checkpointer.load({"x": None}, 5)


def test_without_an_engine_a_save_is_on_disk_when_it_returns(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make(None, tmp_path, retention_steps=2)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["there is no checkpoint engine"]
    for step in (1, 2, 3):
        ticket = checkpointer.save({"x": torch.tensor(step)}, step)
        assert ticket.durable.reached
        assert not ticket.failed
    assert [record.step for record in complete_steps(tmp_path)] == [2, 3]
    assert len(caplog.records) == 1, "said once"


def test_without_an_engine_a_full_disk_fails_the_ticket_and_not_the_training(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make(None, tmp_path)
    checkpointer.save({"x": torch.ones(1)}, 1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        ticket = checkpointer.save({"x": torch.zeros(1)}, 2)
    assert "No space left" in ticket.failed
    assert [record.step for record in complete_steps(tmp_path)] == [1]


def test_nowhere_to_save_to_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="socket or a directory"):
        Checkpointer(None, None, job="job", attempt=1, rank=0, world_size=1, node="n0")


def test_saving_a_step_again_is_not_saving_it_twice(lab: Lab, make: Make) -> None:
    checkpointer = make(lab.socket)
    ticket = checkpointer.save({"x": torch.ones(1)}, 1)
    assert checkpointer.save({"x": torch.ones(1)}, 1) is ticket
    assert "needs a new attempt number" in checkpointer.save({"x": torch.ones(1)}, 0).failed


def test_a_dead_engine_costs_a_ticket_and_its_successor_gets_the_memory_back(tmp_path: Path, make: Make) -> None:
    """The ranks hold the segments too: what was in memory before the engine was killed is there after it."""
    with EngineProcess(tmp_path) as first:
        checkpointer = make(first.socket)
        assert checkpointer.save({"x": torch.tensor(1)}, 1).sealed.reached
        assert checkpointer.save({"x": torch.tensor(2)}, 2).sealed.reached
    ticket = checkpointer.save({"x": torch.tensor(3)}, 3)
    assert "checkpoint engine" in ticket.failed
    assert not ticket.durable.wait(1.0)
    with EngineProcess(tmp_path):
        ticket = eventually(lambda: _saved(checkpointer, 4))
        assert ticket.durable.wait(20), ticket.durable.reason
        for step in (2, 4):
            into: dict[str, Any] = {"x": None}
            report = checkpointer.load(into, step)
            assert report is not None
            assert (report.tier, int(into["x"])) == ("memory", step)


def _saved(checkpointer: Checkpointer, step: int) -> Any:
    ticket = checkpointer.save({"x": torch.tensor(step)}, step)
    return None if ticket.failed else ticket


def test_a_forked_child_does_not_hide_the_death_of_its_rank(lab: Lab, make: Make) -> None:
    """A DataLoader worker inherits the connection; the engine must still see the rank's end."""
    checkpointer = make(lab.socket)
    checkpointer.save({"x": torch.ones(1)}, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    checkpointer.close()
    eventually(lambda: not lab.engine._sessions)
    os.close(writing)
    os.waitpid(child, 0)


def test_the_file_is_one_that_safetensors_readers_understand(tmp_path: Path, make: Make) -> None:
    """Read by the format's own rules: length, JSON, tensors without holes, text metadata."""
    model, optimizer = trained()
    state = {
        "model": model,
        "optimizer": optimizer,
        "z": torch.complex(torch.ones(2), torch.zeros(2)),
        "e": torch.ones(0),
    }
    make(None, tmp_path).save(state, 1)
    raw = (step_folder(tmp_path, 1) / shard_name(0, 1)).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    document = json.loads(raw[8 : 8 + length])
    metadata = document.pop("__metadata__")
    assert all(type(value) is str for value in metadata.values())
    end = 0
    for entry in sorted(document.values(), key=lambda entry: entry["data_offsets"]):
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
    assert end == len(raw) - 8 - length
    entry = document["model.0.weight"]
    start, stop = (8 + length + at for at in entry["data_offsets"])
    assert (entry["dtype"], entry["shape"]) == ("F32", [8, 6])
    assert raw[start:stop] == bits(model[0].weight)  # type: ignore[index]
    assert document["z"]["dtype"] == "F32"
    assert document["z"]["shape"] == [2, 2]


def test_a_rank_loads_the_client_under_a_private_name_and_torch_only_when_it_needs_it(tmp_path: Path) -> None:
    """A user's own folder `ckpt_engine` is not ours, and importing ours costs no torch."""
    (tmp_path / "ckpt_engine").mkdir()
    (tmp_path / "ckpt_engine" / "__init__.py").write_text("raise RuntimeError('the user\\'s own')")
    program = (
        "import importlib.util, sys\n"
        f"path = {str(ROOT / 'ckpt_engine' / '__init__.py')!r}\n"
        "spec = importlib.util.spec_from_file_location('_transom_ckpt_engine', path,"
        f" submodule_search_locations=[{str(ROOT / 'ckpt_engine')!r}])\n"
        "sys.modules['_transom_ckpt_engine'] = package = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(package)\n"
        "import _transom_ckpt_engine.client, _transom_ckpt_engine.engine, _transom_ckpt_engine.admin\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules or 'ckpt_engine' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
