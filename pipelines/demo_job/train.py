"""A small GPT learns a small text: the job of the demo, and an example of a training script.

Five lines are Transom's: `init`, `Checkpointer`, `watch`, `log` and `save` (and `load` after a restart).
Nothing is timed by hand. The text is 100 KB of our own, see compose_text.py.

    transom run --nproc-per-node 2 train.py --steps 200
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

import transom

VOCABULARY = 256  # bytes
HEAD_WIDTH = 32
LEARNING_RATE = 1e-3


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.queries_keys_values(self.before_attention(x))
        heads = projected.view(batch, length, 3, width // HEAD_WIDTH, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, length, width)
        x = x + self.mixed(attended)
        return x.add(self.feed_forward(self.before_feed_forward(x)))


class GPT(nn.Module):
    """Gives the scores of the next byte at every position; 1.85 million parameters where nothing else is asked for."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.bytes(tokens) + self.positions(positions))
        return functional.linear(self.last(x), self.bytes.weight)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every stretch of the text, and the same one byte later."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.context = context

    def __len__(self) -> int:
        return len(self.text) - self.context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.text[start : start + self.context + 1]
        return window[:-1], window[1:]


class StepSampler(Sampler[int]):
    """Endless, and a function of the step: a job that resumes goes on as if it had not stopped."""

    def __init__(self, size: int, batch: int, first_step: int, rank: int, world_size: int, seed: int) -> None:
        self.size, self.batch, self.first_step, self.seed = size, batch, first_step, seed
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        for step in itertools.count(self.first_step):
            dice = torch.Generator().manual_seed(self.seed + step * self.world_size + self.rank)
            yield from torch.randint(self.size, (self.batch,), generator=dice).tolist()


class RandomState:
    """torch's random numbers as a part of the state that is saved."""

    def state_dict(self) -> dict[str, Tensor]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["torch"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=1_000_000, help="the last step")
    arguments.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint to the next")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--width", type=int, default=192, help=f"of the model, a multiple of {HEAD_WIDTH}")
    arguments.add_argument("--layers", type=int, default=4, help="of the model")
    arguments.add_argument("--context", type=int, default=128, help="bytes that the model sees at once")
    arguments.add_argument("--batch", type=int, default=4, help="stretches of text in a rank's batch")
    arguments.add_argument("--workers", type=int, default=0, help="processes that load each rank's data")
    arguments.add_argument("--seed", type=int, default=7)
    options = arguments.parse_args()

    run = transom.init()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(options.seed + rank)
    model = DistributedDataParallel(GPT(options.width, options.layers, options.context).to(device), bucket_cap_mb=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    checkpointer = transom.Checkpointer()
    state: dict[str, Any] = {"model": model.module, "optimizer": optimizer, "random": RandomState()}
    first_step = 1
    if run.resume_step is not None:
        checkpointer.load(into=state, step=run.resume_step)
        first_step = run.resume_step + 1

    text = Windows(Path(__file__).with_name("harbour.txt").read_bytes(), options.context)
    sampler = StepSampler(len(text), options.batch, first_step, rank, world_size, options.seed)
    loader = DataLoader(
        text, batch_size=options.batch, sampler=sampler, generator=torch.Generator(), num_workers=options.workers
    )
    batches = transom.watch(model, optimizer, loader)
    for step, (tokens, targets) in zip(range(first_step, options.steps + 1), batches, strict=False):
        scores = model(tokens.to(device))
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        run.log(step=step, loss=loss)
        if step % options.save_every == 0:
            checkpointer.save(state, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
