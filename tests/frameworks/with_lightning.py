"""Lightning, the real one, through a real engine: killed and resumed, every loss is what it would have been."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import transom
from tests.ckpt_lab import EngineProcess
from tests.frameworks_lab import Ended, Tell, die, forked, loss_line

EPOCHS, BATCHES = 4, 5


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path, keeper_seconds=30.0) as engine:
        yield engine
        engine.end(15)


class Model(lightning.LightningModule):
    """Two layers with dropout, whose dice begin anew with each batch, because Lightning keeps no random state."""

    def __init__(self, tell: Tell, die_at: int, *, sharded: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self._tell, self._die_at, self._sharded = tell, die_at, sharded
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )

    def configure_model(self) -> None:
        if not self._sharded:
            return
        from torch.distributed.fsdp import fully_shard

        for layer in (self.layers[0], self.layers[3], self.layers):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.global_step == self._die_at:
            die()
        torch.manual_seed(1000 * self.global_step + self.global_rank)
        loss = self.layers(batch).square().mean()
        self._tell(loss_line(self.global_step, float(loss)))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    def train_dataloader(self) -> Any:
        rows = torch.randn(BATCHES * 4, 6, generator=torch.Generator().manual_seed(2))
        return torch.utils.data.DataLoader(rows, batch_size=4)


def fit(model: Model, folder: Path, path: str | None, **trainer: Any) -> None:
    warnings.simplefilter("ignore")
    saver = ModelCheckpoint(dirpath=folder, every_n_epochs=1, save_top_k=2, monitor="epoch", mode="max")
    model.on_train_epoch_end = lambda: model.log("epoch", float(model.current_epoch))  # type: ignore[method-assign]
    lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", callbacks=[saver], logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **trainer,
    ).fit(model, ckpt_path=path)  # fmt: skip


def run(engine: EngineProcess, attempt: int, die_at: int = -1, *, resume: bool = False) -> Ended:
    def child(tell: Tell) -> None:
        checkpointer = transom.Checkpointer(
            str(engine.socket), None, job="job", attempt=attempt, rank=0, world_size=1, node="n0"
        )
        io = transom.EngineCheckpointIO(checkpointer)
        path = io.newest_path() if resume else None
        fit(Model(tell, die_at), engine.socket.parent / "lightning", path, plugins=[io], devices=1)
        checkpointer.close()

    return forked(child)[0]


def test_a_fit_that_was_killed_goes_on_with_the_same_losses(engine: EngineProcess) -> None:
    unbroken = run(engine, 1)
    assert (unbroken.code, list(unbroken.losses)) == (0, list(range(EPOCHS * BATCHES)))
    broken = run(engine, 2, die_at=13)
    assert (broken.code, max(broken.losses)) == (-9, 12)
    resumed = run(engine, 3, resume=True)
    assert resumed.code == 0
    assert list(resumed.losses) == list(range(10, 20)), "from the end of the second epoch"
    assert {**broken.losses, **resumed.losses} == unbroken.losses
    names = [path.name for path in sorted((engine.socket.parent / "lightning").glob("*.ckpt"))]
    assert len(names) == 4, "two of each run that came to its end; the others' paths were free again"


def test_where_nothing_is_saved_there_is_no_path_to_resume_from(engine: EngineProcess) -> None:
    assert run(engine, 1, resume=True).losses.keys() == set(range(EPOCHS * BATCHES))


def shards(
    engine: EngineProcess, attempt: int, die_at: int = -1, *, resume: bool = False, ranks: int = 2
) -> list[Ended]:
    def rank_of(rank: int) -> Any:
        def child(tell: Tell) -> None:
            checkpointer = transom.Checkpointer(
                str(engine.socket), None, job="job", attempt=attempt, rank=rank, world_size=ranks, node="n0"
            )
            strategy = transom.EngineModelParallelStrategy(checkpointer=checkpointer, process_group_backend="gloo")
            path = strategy.newest_path() if resume else None
            model = Model(tell, die_at, sharded=True)
            fit(model, engine.socket.parent / "sharded", path, strategy=strategy, devices=ranks)
            checkpointer.close()

        return child

    return forked(*(rank_of(rank) for rank in range(ranks)))


def test_fsdp2_ranks_that_were_killed_go_on_with_the_same_losses(engine: EngineProcess) -> None:
    unbroken = shards(engine, 1)
    assert [one.code for one in unbroken] == [0, 0]
    broken = shards(engine, 2, die_at=13)
    assert [one.code for one in broken] == [-9, -9]
    resumed = shards(engine, 3, resume=True)
    assert [one.code for one in resumed] == [0, 0]
    for before, after, whole in zip(broken, resumed, unbroken, strict=True):
        assert list(after.losses) == list(range(10, 20))
        assert {**before.losses, **after.losses} == whole.losses
