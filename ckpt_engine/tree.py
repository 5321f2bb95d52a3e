"""Everything of a state that is not a tensor's bytes, as JSON with tags: structure, scalars, where each
tensor goes.

JSON lists, strings, numbers, booleans and null stand for themselves; what JSON cannot say is an object with
one tag: {"$tensor": index}, {"$tuple": [...]}, {"$float": "nan"}, {"$dict": [[key, value], ...]}, and so on.
Plain objects are dicts whose keys are all strings without a leading "$". Nothing else is let through.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointDamaged

DEPTH_MAX = 64
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Node = Any  # a JSON value as described above
TensorIndex = Callable[[object, str], int | None]  # the tensor's index; None: not a tensor


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where tensor `index` of the layout stands in a decoded tree."""

    index: int


@dataclass(frozen=True, slots=True)
class ObjectState:
    """What `state_dict()` of a top-level object returned."""

    value: Any


def encode_tree(value: object, path: str, tensor_index: TensorIndex, depth: int = 0) -> Node:
    """The tree of `value`. Raises TypeError naming the path of what cannot be saved."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if depth >= DEPTH_MAX:
        raise TypeError(f"{path} is nested deeper than {DEPTH_MAX} levels; does it contain itself?")
    index = tensor_index(value, path)
    if index is not None:
        return {"$tensor": index}
    if type(value) is list:
        return [encode_tree(item, f"{path}.{at}", tensor_index, depth + 1) for at, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode_tree(item, f"{path}.{at}", tensor_index, depth + 1) for at, item in enumerate(value)]}
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, dict)
        return _encode_dict(value, path, tensor_index, depth)
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; "
        "save tensors, dicts, lists, tuples, numbers, strings, booleans and None"
    )


def encode_state(state: dict[str, Any], tensor_index: TensorIndex) -> Node:
    """The tree of a top-level state; objects with `state_dict` and `load_state_dict` are asked for theirs."""
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise TypeError("the state to save must be a dict with string keys, such as {'model': model, 'step': 3}")
    pairs = []
    for key, value in state.items():
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            pairs.append([key, {"$object": encode_tree(value.state_dict(), key, tensor_index, 1)}])
        else:
            pairs.append([key, encode_tree(value, key, tensor_index, 1)])
    return {"$dict": pairs}


def dump_tree(node: Node) -> bytes:
    return json.dumps(node, separators=(",", ":"), allow_nan=False).encode()


def load_tree(raw: bytes, tensors: int) -> Any:
    """Python values again, with a TensorRef for each tensor. Raises CheckpointDamaged and nothing else."""
    try:
        return _decode(json.loads(raw), tensors)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(f"the checkpoint's values are not readable: {error}") from error


def _encode_dict(value: dict[Any, Any], path: str, tensor_index: TensorIndex, depth: int) -> Node:
    for key in value:
        if type(key) not in (str, int, bool, float) or (type(key) is float and not math.isfinite(key)):
            raise TypeError(f"{path} has the key {key!r:.80}; keys must be strings or finite numbers")
    kind = type(value)
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode_tree(item, f"{path}.{key}", tensor_index, depth + 1) for key, item in value.items()}
    pairs = [[key, encode_tree(item, f"{path}.{key}", tensor_index, depth + 1)] for key, item in value.items()]
    if kind is Counter:
        return {"$counter": pairs}
    if kind is not OrderedDict:
        return {"$dict": pairs}
    # torch.nn.Module.state_dict() hangs the modules' versions on its dict as an attribute
    metadata = getattr(value, "_metadata", None)
    return {"$ordered": [pairs, encode_tree(metadata, f"{path}._metadata", tensor_index, depth + 1)]}


def _decode(node: Node, tensors: int) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) != 1 or not (tag := next(iter(node))).startswith("$"):
        return {key: _decode(item, tensors) for key, item in node.items()}
    body = node[tag]
    match tag:
        case "$tensor":
            if type(body) is not int or not 0 <= body < tensors:
                raise ValueError(f"there is no tensor number {body!r:.40}")
            return TensorRef(body)
        case "$float":
            return _NON_FINITE[body]
        case "$tuple":
            return tuple(_decode(item, tensors) for item in body)
        case "$dict":
            return {key: _decode(item, tensors) for key, item in body}
        case "$counter":
            return Counter({key: _decode(item, tensors) for key, item in body})
        case "$ordered":
            pairs, metadata = body
            ordered = OrderedDict((key, _decode(item, tensors)) for key, item in pairs)
            if metadata is not None:
                ordered._metadata = _decode(metadata, tensors)  # type: ignore[attr-defined]
            return ordered
        case "$object":
            return ObjectState(_decode(body, tensors))
    raise ValueError(f"tag {tag!r:.40} is not known to this reader")
