"""Training states made up by dice, for round trips through the checkpoint engine: every kind of value and of tensor,
tied, overlapping, strided; and the comparison of what came back, down to which bytes share memory.

torch is handed in, like the dice: the same seed makes the same state.
"""

from __future__ import annotations

import itertools
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

DEPTH_MAX = 4
ITEMS_MAX = 5
SIDE_MAX = 4
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
    "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "complex64", "complex128",
)  # fmt: skip
LETTERS = 'az09 .$#_"\\\n\0é漢😀\ud83d\ude00\udfff'
FLOATS = (0.0, -0.0, 1.5, -1e-308, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan)
INTEGERS = (0, 1, -1, 2**31, -(2**63), 2**64, 3**100, -(7**900))


class StateMaker:
    """States of one sequence of dice."""

    def __init__(self, torch: Any, dice: Random) -> None:
        self._torch = torch
        self._dice = dice
        self._dtypes = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]
        self._tensors: list[Any] = []

    def state(self) -> dict[str, Any]:
        """A dict with string keys, as `Checkpointer.save` takes it."""
        self._tensors = []
        return {f"{at}{self._text()}": self._value(0) for at in range(self._dice.randint(1, ITEMS_MAX))}

    def change(self, state: Any) -> None:
        """Let values of a state be others, in place: what a training step does between two saves."""
        for tensor in tensors_in(self._torch, state):
            if tensor.numel() and not _repeats(tensor) and self._dice.random() < 0.5:
                mask = 1 if tensor.dtype is self._torch.bool else -1 if tensor.element_size() > 1 else 255
                _bytes_of(self._torch, tensor).bitwise_xor_(mask)
        for holder, key in list(_scalars_in(state)):
            if self._dice.random() < 0.3:
                holder[key] = self._scalar()

    def _value(self, depth: int) -> Any:
        kind = self._dice.randrange(12)
        if kind < 4:
            return self._tensor()
        if kind < 6 or depth >= DEPTH_MAX:
            return self._scalar()
        items = [self._value(depth + 1) for _ in range(self._dice.randint(0, ITEMS_MAX))]
        match kind:
            case 6:
                return items
            case 7:
                return tuple(items)
            case 8:
                return OrderedDict(zip(self._keys(len(items)), items, strict=True))
            case 9:
                return Counter({at: self._dice.randint(1, 9) for at in range(len(items))})
            case 10:
                return dict(zip(self._keys(len(items)), items, strict=True))
        return dict(enumerate(items))

    def _keys(self, count: int) -> list[Any]:
        plain = self._dice.random() < 0.5
        return [
            f"key{at}" if plain else self._dice.choice([at, float(at), f"${at}", f"{at}{self._text()}"])
            for at in range(count)
        ]

    def _text(self) -> str:
        return "".join(self._dice.choice(LETTERS) for _ in range(self._dice.randint(0, 4)))

    def _scalar(self) -> Any:
        dice = self._dice
        match dice.randrange(9):
            case 0:
                return dice.choice(FLOATS)
            case 1:
                return dice.choice(INTEGERS)
            case 2:
                return self._text()
            case 3:
                return dice.randbytes(dice.randint(0, 5))
            case 4:
                return bytearray(dice.randbytes(3))
            case 5:
                return complex(dice.choice(FLOATS), dice.choice(FLOATS))
            case 6:
                return struct.unpack("<d", dice.randbytes(8))[0]
            case 7:
                return self._of_numpy()
        return dice.choice([None, True, False])

    def _of_numpy(self) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        array = numpy.frombuffer(bytearray(self._dice.randbytes(24)), dtype=self._dice.choice(["f4", "i8", "u2", "u1"]))
        return self._dice.choice([array, array.reshape(-1, 1).T, array[::2], array[0], array[:0]])

    def _tensor(self) -> Any:
        earlier = self._tensors and self._dice.random() < 0.4
        tensor = self._look(self._dice.choice(self._tensors)) if earlier else self._fresh()
        self._tensors.append(tensor)
        return tensor

    def _fresh(self) -> Any:
        torch, dice = self._torch, self._dice
        dtype = dice.choice(self._dtypes)
        shape = [dice.randint(0 if dice.random() < 0.1 else 1, SIDE_MAX) for _ in range(dice.randint(0, 3))]
        count = math.prod(shape)
        raw = bytearray(dice.randbytes(max(count, 1) * dtype.itemsize))
        flat = torch.frombuffer(raw, dtype=torch.uint8).clone()
        flat = flat.remainder(2).bool() if dtype is torch.bool else flat.view(dtype)
        tensor = flat[:count].reshape(shape)
        return torch.nn.Parameter(tensor) if dtype is torch.float32 and dice.random() < 0.3 else tensor

    def _look(self, tensor: Any) -> Any:
        """Another tensor over the memory of this one, or the same again."""
        torch, dice = self._torch, self._dice
        looks: list[Callable[[], Any]] = [lambda: tensor, lambda: tensor.detach()]
        if tensor.dim():
            dim = dice.randrange(tensor.dim())
            start = dice.randint(0, tensor.shape[dim])
            looks += [
                lambda: tensor.detach().narrow(dim, start, tensor.shape[dim] - start),
                lambda: tensor.detach().transpose(0, dim),
                lambda: tensor.detach()[::2],
                lambda: tensor.detach().unsqueeze(dim).expand(*tensor.shape[:dim], 3, *tensor.shape[dim:]),
            ]
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if plain and tensor.dim() and tensor.stride(-1) == 1:
            looks.append(lambda: tensor.detach().view(torch.uint8))
        if tensor.is_complex():
            looks += [lambda: tensor.detach().conj(), lambda: tensor.detach().conj().imag]
        return dice.choice(looks)()


def round_trips(
    torch: Any, checkpointer: Any, count: int, seed: int, told: Callable[[int], object] = lambda number: None
) -> list[str]:
    """Save `count` made-up states, each as it is and once more after a change, and load all of them again with the same
    `Checkpointer`, whose steps begin at 1; a sentence for each that did not come back as it was."""
    wrong = []
    for number in range(count):
        told(number)
        maker = StateMaker(torch, Random(f"{seed} {number}"))
        state = maker.state()
        for step in (2 * number + 1, 2 * number + 2):
            found = round_trip(torch, checkpointer, state, step)
            if found:
                wrong.append(f"state {number} of seed {seed}: {found}")
                break
            maker.change(state)
    return wrong


def round_trip(torch: Any, checkpointer: Any, state: dict[str, Any], step: int) -> str:
    """Save and load; what is not as it was, empty where all is."""
    ticket = checkpointer.save(state, step)
    if ticket.failed:
        return f"it was not saved: {ticket.failed}"
    into: dict[str, Any] = dict.fromkeys(state)
    if checkpointer.load(into, step=step) is None:
        return "it was not found"
    return difference(torch, state, into)


def tensors_in(torch: Any, value: Any) -> Iterator[Any]:
    """The tensors of a state, in its order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(torch, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(torch, item)


def difference(torch: Any, saved: Any, loaded: Any) -> str:
    """Where two states differ: in structure, types, bits, or in which bytes share memory; empty where they do not."""
    found = _unlike(torch, saved, loaded, "state")
    if found:
        return found
    left = shared_bytes(tensors_in(torch, saved))
    right = shared_bytes(tensors_in(torch, loaded))
    return "" if left == right else f"other bytes share memory: {left} became {right}"


def shared_bytes(tensors: Iterator[Any]) -> list[list[int]]:
    """For each tensor a number for each byte of its elements in order; bytes of one address have one number."""
    numbers: dict[int, int] = {}
    rows = []
    for tensor in tensors:
        size, start = tensor.element_size(), tensor.data_ptr()
        steps = [range(0, count * stride, stride) if stride else [0] * count for count, stride in _sides(tensor)]
        row = []
        for position in itertools.product(*steps):
            at = start + sum(position) * size
            row += [numbers.setdefault(at + byte, len(numbers)) for byte in range(size)]
        rows.append(row)
    return rows


def _sides(tensor: Any) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True))


def _unlike(torch: Any, left: Any, right: Any, path: str) -> str:
    if isinstance(left, torch.Tensor):
        if not isinstance(right, torch.Tensor) or (left.dtype, left.shape) != (right.dtype, right.shape):
            return f"{path} became a {type(right).__name__} of another dtype or shape"
        same = left.numel() == 0 or torch.equal(_values_of(torch, left), _values_of(torch, right))
        return "" if same else f"{path} has other bits"
    if type(left) is not type(right):
        return f"{path} was a {type(left).__name__} and became a {type(right).__name__}"
    if isinstance(left, dict):
        if [(type(key), key) for key in left] != [(type(key), key) for key in right]:
            return f"{path} has other keys"
        pairs: Iterator[tuple[Any, Any, Any]] = ((key, left[key], right[key]) for key in left)
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return f"{path} has another length"
        pairs = ((at, *pair) for at, pair in enumerate(zip(left, right, strict=True)))
    else:
        return "" if _scalar_bits(left) == _scalar_bits(right) else f"{path} was {left!r} and became {right!r}"
    return next(filter(None, (_unlike(torch, one, other, f"{path}.{key}") for key, one, other in pairs)), "")


def _repeats(tensor: Any) -> bool:
    """Whether elements share memory with each other, as where it was expanded."""
    return any(size > 1 and stride == 0 for size, stride in _sides(tensor))


def _scalar_bits(value: Any) -> Any:
    if isinstance(value, float) and type(value) is float:
        return struct.pack("<d", value)
    if isinstance(value, complex) and type(value) is complex:
        return struct.pack("<dd", value.real, value.imag)
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # NumPy's
        return value.tobytes(), str(value.dtype), value.shape
    return value


def _values_of(torch: Any, tensor: Any) -> Any:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return _bytes_of(torch, plain).contiguous().reshape(-1)


def _bytes_of(torch: Any, tensor: Any) -> Any:
    """Integers over the memory of a tensor, whatever its dtype, strides and bits."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    kind = sizes[min(size, 8)]
    factor = size // kind.itemsize
    strides = [*(stride * factor for stride in tensor.stride()), 1]
    start = tensor.storage_offset() * factor
    return torch.empty(0, dtype=kind).set_(tensor.untyped_storage(), start, (*tensor.shape, factor), strides)


def _scalars_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every plain value that can be replaced."""
    if isinstance(value, Counter):
        return
    if isinstance(value, dict):
        pairs: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    else:
        return
    for key, item in pairs:
        if isinstance(item, (dict, list)):
            yield from _scalars_in(item)
        elif item is None or isinstance(item, (bool, int, float, str, bytes)):
            yield value, key
