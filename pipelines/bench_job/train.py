"""The job of the benches: the demo's model, trained alike by Transom and by torchrun, saved as each would have it.

With `--saver transom` it is the demo's script: `init`, `Checkpointer`, `watch`, `log`, `save`. With `--saver torch` it
is what people write for torchrun: rank 0 saves by torch.save, every rank loads the file. Everything else is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ingest.clock import SystemClock
from pipelines.bench_job.planned_faults import FaultPlan, break_self
from pipelines.bench_job.step_log import StepWriter

CLOCK = SystemClock()
BEGAN_AT = CLOCK.now()  # before torch, where it is not imported yet


def options_of() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--folder", type=Path, required=True, help="of the step log, the faults and the result")
    arguments.add_argument("--saver", choices=("transom", "torch"), required=True)
    arguments.add_argument("--steps", type=int, default=1_000_000, help="the last step")
    arguments.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    arguments.add_argument("--width", type=int, default=64, help="of the model")
    arguments.add_argument("--layers", type=int, default=1, help="of the model")
    arguments.add_argument("--context", type=int, default=32, help="bytes that the model sees at once")
    arguments.add_argument("--batch", type=int, default=2, help="stretches of text in a rank's batch")
    arguments.add_argument("--pause", type=float, default=0.0, help="seconds that each step sleeps")
    arguments.add_argument("--seed", type=int, default=7)
    return arguments.parse_args()


class TransomSaver:
    """What the demo's script does."""

    def __init__(self, state: dict[str, Any]) -> None:
        import transom

        self._run, self._state = transom.init(), state
        self._checkpointer = transom.Checkpointer()

    def load(self) -> int:
        """The step that the state is of; 0 where there is none."""
        if self._run.resume_step is None:
            return 0
        self._checkpointer.load(into=self._state, step=self._run.resume_step)
        return self._run.resume_step

    def batches(self, model: Any, optimizer: Any, loader: Any) -> Iterable[Any]:
        import transom

        return transom.watch(model, optimizer, loader)

    def log(self, step: int, loss: Any) -> None:
        self._run.log(step=step, loss=loss)

    def save(self, step: int) -> None:
        self._checkpointer.save(self._state, step)


class TorchSaver:
    """What people write for torchrun: one file, written aside and renamed by rank 0."""

    def __init__(self, state: dict[str, Any], path: Path, rank: int) -> None:
        self._state, self._path, self._rank = state, path, rank

    def load(self) -> int:
        import torch

        if not self._path.exists():
            return 0
        saved = torch.load(self._path, map_location="cpu", weights_only=True)
        for name, part in self._state.items():
            part.load_state_dict(saved[name])
        return int(saved["step"])

    def batches(self, model: Any, optimizer: Any, loader: Any) -> Iterable[Any]:
        return loader  # type: ignore[no-any-return]

    def log(self, step: int, loss: Any) -> None:
        return

    def save(self, step: int) -> None:
        import torch

        if self._rank == 0:
            aside = self._path.with_suffix(".new")
            torch.save({"step": step, **{name: part.state_dict() for name, part in self._state.items()}}, aside)
            aside.replace(self._path)


def digest_of(model: Any) -> str:
    """SHA-256 over the bytes of all parameters, in their order."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


def main() -> None:
    options = options_of()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    log, plan = StepWriter(options.folder, attempt, rank), FaultPlan(options.folder, rank)
    log.write("began", 0, BEGAN_AT)

    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from pipelines.demo_job.train import GPT, LEARNING_RATE, StepSampler, Windows

    torch.set_num_threads(1)
    processors = sorted(os.sched_getaffinity(0))  # a neighbour's burst then moves nobody to another's processor
    os.sched_setaffinity(0, {processors[rank * len(processors) // world_size]})
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    model = DistributedDataParallel(GPT(options.width, options.layers, options.context), bucket_cap_mb=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    state: dict[str, Any] = {"model": model.module, "optimizer": optimizer}
    saver: TransomSaver | TorchSaver
    if options.saver == "transom":
        saver = TransomSaver(state)
    else:
        saver = TorchSaver(state, options.folder / "checkpoint.pt", rank)
    first_step = saver.load() + 1

    harbour = Path(__file__).parents[1] / "demo_job" / "harbour.txt"
    text = Windows(harbour.read_bytes(), options.context)
    sampler = StepSampler(len(text), options.batch, first_step, rank, world_size, options.seed)
    loader = DataLoader(text, batch_size=options.batch, sampler=sampler, generator=torch.Generator())
    batches = saver.batches(model, optimizer, loader)
    loss = torch.zeros(())
    for step, (tokens, targets) in zip(range(first_step, options.steps + 1), batches, strict=False):
        fault = plan.due(step)
        if fault is not None:
            log.write("fault", step, CLOCK.now())
            break_self(fault)
        scores = model(tokens)
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        more = options.pause + plan.seconds_more(step)
        if more:
            CLOCK.sleep(more)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        saver.log(step, loss)
        log.write("step", step, CLOCK.now())
        if step % options.save_every == 0:
            saver.save(step)
    if rank == 0:
        result = {"loss": float(loss), "parameters": digest_of(model.module), "steps": options.steps}
        (options.folder / "result.json").write_text(json.dumps(result), encoding="ascii")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
