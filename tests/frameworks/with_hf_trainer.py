"""Hugging Face's Trainer, the real one, through a real engine: killed, resumed, each loss is what it would be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

import transom
from tests.ckpt_lab import EngineProcess
from tests.frameworks_lab import Ended, Tell, die, forked, loss_line

STEPS = 10
SAMPLES, BATCH = 24, 4  # six steps an epoch


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path, keeper_seconds=30.0) as engine:
        yield engine
        engine.end(15)


class Watcher(transformers.TrainerCallback):
    """Tells every loss, and kills the process at the end of one step."""

    def __init__(self, tell: Tell, die_after: int) -> None:
        self._tell = tell
        self._die_after = die_after

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            self._tell(loss_line(state.global_step, logs["loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self._die_after:
            die()


def train(
    tell: Tell, folder: Path, checkpointer: Any, *, die_after: int = -1, resume: Any = None, callback: bool = False,
    **arguments: Any,
) -> None:  # fmt: skip
    """A GPT of a few thousand parameters, with dropout, over shuffled data."""
    transformers.set_seed(3)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    dice = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 32, (8,), generator=dice) for _ in range(SAMPLES)]
    given: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": BATCH, "logging_steps": 1,
        "save_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, **arguments,
    }  # fmt: skip
    callbacks: list[Any] = [transom.EngineCallback(checkpointer)] if callback else []
    trainer = transom.EngineTrainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(**given),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[*callbacks, Watcher(tell, die_after)],
        checkpointer=checkpointer,
    )
    trainer.train(resume_from_checkpoint=resume)
    checkpointer.close()


def run(engine: EngineProcess, attempt: int, **how: Any) -> Ended:
    def child(tell: Tell) -> None:
        checkpointer = transom.Checkpointer(
            str(engine.socket), None, job="job", attempt=attempt, rank=0, world_size=1, node="n0"
        )
        train(tell, engine.socket.parent / f"hf-{attempt}", checkpointer, **how)

    return forked(child)[0]


@pytest.mark.parametrize(
    "how", [{}, {"gradient_accumulation_steps": 2}, {"lr_scheduler_type": "cosine", "optim": "sgd"}]
)
def test_a_trainer_that_was_killed_goes_on_with_the_same_losses(engine: EngineProcess, how: dict[str, Any]) -> None:
    unbroken = run(engine, 1, save_strategy="no", **how)
    assert unbroken.code == 0
    broken = run(engine, 2, die_after=9, **how)
    assert broken.code == -9
    resumed = run(engine, 3, resume=True, **how)
    assert resumed.code == 0
    assert list(resumed.losses) == [9, 10], "the newest save was of step 8, in the second epoch"
    assert len(unbroken.losses) == STEPS
    assert {**broken.losses, **resumed.losses} == unbroken.losses


def test_a_callback_saves_every_step_and_the_trainer_goes_on_from_the_last(engine: EngineProcess) -> None:
    unbroken = run(engine, 1, save_strategy="no")
    broken = run(engine, 2, die_after=5, save_strategy="no", callback=True)
    assert broken.code == -9
    resumed = run(engine, 3, resume=True, save_strategy="no")
    assert list(resumed.losses) == [6, 7, 8, 9, 10]
    told = {**broken.losses, **resumed.losses}
    assert told == {step: loss for step, loss in unbroken.losses.items() if step != 5}, (
        "it died before it told that one"
    )


def test_where_nothing_is_saved_it_begins_anew(engine: EngineProcess) -> None:
    first = run(engine, 1, resume=True)
    assert (first.code, list(first.losses)) == (0, list(range(1, STEPS + 1)))


def test_what_would_read_the_trainers_own_folders_is_refused(tmp_path: Path) -> None:
    checkpointer = transom.Checkpointer(None, str(tmp_path / "ck"), job="job", attempt=1, rank=0, world_size=1)
    with pytest.raises(ValueError, match="load_best_model_at_end reads a folder"):
        train(print, tmp_path, checkpointer, load_best_model_at_end=True, eval_strategy="no", save_strategy="no")
    checkpointer.close()
