"""The training states that are saved and loaded: a transformer, very many tensors, few large ones; all with AdamW.

Sizes are those of the whole state: a parameter and two moments of it, 12 bytes for each number in the model.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BYTES_PER_NUMBER = 12
VOCABULARY = 4096
BLOCKS = 8
HEADS = 8
MANY_LAYERS = 1280  # four tensors each, with the optimizer's
FEW_LAYERS = 4
STEP_TOKENS = 64


class Transformer(nn.Module):
    """A small language model: 97 parameters, so 388 tensors with AdamW."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, BLOCKS, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.embedding(tokens))
        return torch.nn.functional.linear(hidden, self.embedding.weight)


class Stack(nn.Module):
    """Layers without bias, one on top of the other."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            numbers = numbers + 0.01 * torch.tanh(layer(numbers))
        return numbers


@dataclass(slots=True)
class Training:
    """A model in training. `batch_size` is what makes a step as long as the measurement wants it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch_size: int = 1
    steps: int = 0

    @property
    def state(self) -> dict[str, Any]:
        """What a training script gives to `Checkpointer.save`."""
        return {"model": self.model, "optimizer": self.optimizer, "step": self.steps}

    @property
    def state_dicts(self) -> dict[str, Any]:
        """What it gives to everything else."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.steps}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state."""
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*self.model.state_dict().values(), *moments]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def compute(self) -> None:
        """Forward and backward: what a fenced save runs beside."""
        if isinstance(self.model, Transformer):
            tokens = torch.randint(0, VOCABULARY, (self.batch_size, STEP_TOKENS))
            logits = self.model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        else:
            width = self.model.width
            assert isinstance(width, int)
            loss = self.model(torch.randn(self.batch_size, width)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # where gradients stand does not change from step to step
        self.steps += 1

    def step(self) -> None:
        self.compute()
        self.update()

    def disturb(self) -> None:
        """Change every parameter and every moment a little, as a step does, but quickly."""
        with torch.no_grad():
            torch._foreach_add_([tensor for tensor in self.tensors if tensor.dim()], 1e-6)
        self.steps += 1

    def same_as(self, other: Training) -> bool:
        """Whether every tensor has the same bits."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(
            torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)) for one, two in pairs
        )


def make_training(case: str, mb: int, seed: int = 0) -> Training:
    """A training state of about `mb` MB (10**6 bytes) and after one step, so that AdamW has its moments."""
    torch.manual_seed(seed)
    numbers = mb * 10**6 / BYTES_PER_NUMBER
    model: nn.Module
    if case == "transformer":
        # 12 w² a block and the embedding: solved for the width w, rounded up to whole heads of 8
        vocabulary, squares = VOCABULARY, 12 * BLOCKS
        width = (math.sqrt(vocabulary**2 + 4 * squares * numbers) - vocabulary) / (2 * squares)
        model = Transformer(_up(width, 8 * HEADS))
    elif case == "many":
        model = Stack(_up(math.sqrt(numbers / MANY_LAYERS), 16), MANY_LAYERS)
    elif case == "few":
        model = Stack(_up(math.sqrt(numbers / FEW_LAYERS), 16), FEW_LAYERS)
    else:
        raise ValueError(f"there is no case {case!r}")
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True))
    training.step()
    return training


class PlainCopy:
    """memcpy of so many bytes between two runs of memory whose pages are all there."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._source, self._target = (mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in "st")
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(it)) for it in (self._target, self._source)]
        for address in self._addresses:
            ctypes.memset(address, 1, size_bytes)

    def __call__(self, number: int = 0) -> None:
        target, source = self._addresses
        ctypes.memmove(target, source, self._size_bytes)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _up(value: float, multiple: int) -> int:
    return max(multiple, math.ceil(value / multiple) * multiple)
