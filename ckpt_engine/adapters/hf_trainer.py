"""Hugging Face's Trainer through the engine: a Trainer that saves to it and resumes from it, and a callback that saves.

    trainer = EngineTrainer(model=model, args=args, train_dataset=data, checkpointer=transom.Checkpointer())
    trainer.train(resume_from_checkpoint=True)     # True: from the engine, where it has something; else from the start

The Trainer's own save and resume go through files that each rank reads on its own. Here a save is one copy into the
engine's memory, on every rank; data-parallel replicas are stored once. Resuming goes on with the same batches, dropout
and learning rates as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME, Trainer
from transformers.trainer_callback import (
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.training_args import TrainingArguments

from ..errors import StateMismatch

_log = logging.getLogger(__name__)

Policy = Any  # see `loading.Policy`


class EngineTrainer(Trainer):  # type: ignore[misc]  # transformers tells mypy nothing
    """A Trainer whose checkpoints are the engine's. `checkpointer`: that of this rank, `transom.Checkpointer()`.

    `save_strategy` and `save_steps` say when it saves; how many steps stay is the engine's to say
    (`checkpoint.keep_complete`), and `save_total_limit` does nothing. A model to give away is written by `save_model`,
    as ever. `policy`: which step `train(resume_from_checkpoint=True)` goes on from, as in `Checkpointer.load`.
    """

    def __init__(self, *args: Any, checkpointer: Any, policy: Policy = "newest", **more: Any) -> None:
        super().__init__(*args, **more)
        if self.args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end reads a folder of the Trainer's, which is not written here; turn it off"
            )
        if self.is_deepspeed_enabled:
            raise ValueError("DeepSpeed keeps its own checkpoints; give it a checkpoint engine instead of this Trainer")
        self._checkpointer = checkpointer
        self._policy = policy
        self._resumed_from = ""  # the folder that stands for the engine's step while `train` runs
        self._resumed_step = -1

    def train(self, resume_from_checkpoint: Any = None, **more: Any) -> Any:
        """As the Trainer's. True resumes from the engine, and begins anew where no step is there that all ranks have;
        a path is a folder of the Trainer's own, as ever."""
        if resume_from_checkpoint is not True:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **more)
        found: dict[str, Any] = {"trainer": None}
        report = self._checkpointer.load(found, self._policy)
        if report is None:
            return super().train(**more)
        _log.info("resuming from step %d, which is in %s", report.step, report.tier)
        with tempfile.TemporaryDirectory(prefix="transom-") as folder:  # what the Trainer wants to read itself
            (Path(folder) / TRAINER_STATE_NAME).write_text(found["trainer"], encoding="utf-8")
            self._resumed_from, self._resumed_step = folder, report.step
            try:
                return super().train(resume_from_checkpoint=folder, **more)
            finally:
                self._resumed_from = ""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Called on every rank when it is time to save."""
        if trial is not None:
            super()._save_checkpoint(model, trial)  # a search for hyper-parameters has many runs, each with its folders
            return
        self.store_flos()
        callbacks = [*self.callback_handler.callbacks, self.control]
        self.state.stateful_callbacks = _exported(callbacks)
        state = training_state(self.model, self.optimizer, self.lr_scheduler, self.state)
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        _save(self._checkpointer, state, self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if resume_from_checkpoint != self._resumed_from:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._load(model=self.model if model is None else model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or checkpoint != self._resumed_from:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._load(optimizer=_inner(self.optimizer, "optimizer"), scheduler=_inner(self.lr_scheduler, "scheduler"))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or checkpoint != self._resumed_from:
            super()._load_scaler(checkpoint)
            return
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            self._load(scaler=scaler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or checkpoint != self._resumed_from:
            super()._load_rng_state(checkpoint)
            return
        into: dict[str, Any] = {"random": None}
        try:
            self._checkpointer.load(into, self._resumed_step)
        except StateMismatch as error:  # saved by another number of ranks, each with a state of its own
            _log.warning("random states begin anew: %s", error)
            return
        set_random_state(into["random"])

    def _load(self, **into: Any) -> None:
        """A part of the step that `train` has chosen, in place."""
        self._checkpointer.load(into, self._resumed_step)


class EngineCallback(TrainerCallback):  # type: ignore[misc]  # as above
    """Saves to the engine every so many steps, beside whatever the Trainer saves: a restart loses minutes less.

    What it saves is what `EngineTrainer` resumes from.
    """

    def __init__(self, checkpointer: Any, every_steps: int = 1) -> None:
        if every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, not {every_steps}")
        self._checkpointer = checkpointer
        self._every_steps = every_steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        """After each optimizer step."""
        if state.global_step % self._every_steps == 0:
            now = training_state(known["model"], known["optimizer"], known["lr_scheduler"], state)
            _save(self._checkpointer, now, state.global_step)


def training_state(model: Any, optimizer: Any, scheduler: Any, state: TrainerState) -> dict[str, Any]:
    """All that training goes on from, as it is now. Wrappers of accelerate are looked through."""
    return {
        "model": model,
        "optimizer": _inner(optimizer, "optimizer"),
        "scheduler": _inner(scheduler, "scheduler"),
        "random": random_state(),
        "trainer": json.dumps(dataclasses.asdict(state), sort_keys=True),
    }


def random_state() -> dict[str, Any]:
    """Of Python, NumPy and torch, on the processor and on all GPUs."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_state(state: dict[str, Any]) -> None:
    """What `random_state` has found."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _save(checkpointer: Any, state: dict[str, Any], step: int) -> None:
    ticket = checkpointer.save(state, step)
    if ticket.failed:
        _log.warning("step %d was not saved: %s", step, ticket.failed)


def _inner(wrapper: Any, name: str) -> Any:
    """What accelerate has wrapped; the object itself where it has not."""
    return getattr(wrapper, name, wrapper) if type(wrapper).__module__.startswith("accelerate.") else wrapper


def _exported(callbacks: list[Any]) -> dict[str, Any]:
    """The states of callbacks that have one, by the names of their classes; a list where a class is there twice."""
    states: dict[str, list[Any]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: found[0] if len(found) == 1 else found for name, found in states.items()}
