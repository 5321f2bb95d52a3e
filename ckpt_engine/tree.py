"""Everything of a state that is not a tensor's bytes, as JSON with tags: structure, scalars, where each
tensor goes.

JSON lists, strings, numbers, booleans and null stand for themselves; what JSON cannot say is an object with
one tag: {"$tensor": index}, {"$tuple": [...]}, {"$float": "nan"}, {"$dict": [[key, value], ...]}, and so on.
Plain objects are dicts whose keys are all strings without a leading "$". Nothing else is let through.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .errors import CheckpointDamaged

DEPTH_MAX = 64
INTEGER_BITS_MAX = 1024  # that are written in decimal: Python refuses to read more than 4300 digits
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NAN_BITS = struct.pack(">d", math.nan)

Node = Any  # a JSON value as described above
Leaf = Callable[[object, str], Node]  # the node of a tensor or its like; None: it is nothing of the kind
Form = Literal["tensor", "array", "scalar"]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where tensor `index` of the layout stands in a decoded tree. `form`: as what; arrays are NumPy's."""

    index: int
    form: Form = "tensor"


@dataclass(frozen=True, slots=True)
class ObjectState:
    """What `state_dict()` of a top-level object returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class AskedState:
    """A top-level state whose objects have been asked; `objects` are the keys of those."""

    values: dict[str, Any]
    objects: frozenset[str]


def encode_tree(value: object, path: str, leaf: Leaf, depth: int = 0) -> Node:
    """The tree of `value`. Raises TypeError naming the path of what cannot be saved."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        return scalar(value)
    if depth >= DEPTH_MAX:
        raise TypeError(f"{path} is nested deeper than {DEPTH_MAX} levels; does it contain itself?")
    node = leaf(value, path)
    if node is not None:
        return node
    if kind is list:
        return _encode_items(value, path, leaf, depth)
    if kind is tuple:
        return {"$tuple": _encode_items(value, path, leaf, depth)}
    if kind in (dict, OrderedDict, Counter):
        assert isinstance(value, dict)
        return _encode_dict(value, path, leaf, depth)
    raise TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; "
        "save tensors, arrays, dicts, lists, tuples, numbers, strings, bytes, booleans and None"
    )


def _ask(value: Any) -> Any:
    return value.state_dict()


def ask_state(state: dict[str, Any], ask: Callable[[Any], Any] = _ask) -> AskedState:
    """Ask the objects at the top of a state, those with `state_dict` and `load_state_dict`, for their states."""
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise TypeError("the state to save must be a dict with string keys, such as {'model': model, 'step': 3}")
    asked: dict[str, Any] = {}
    objects = set()
    for key, value in state.items():
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            objects.add(key)
            value = ask(value)
        asked[key] = value
    return AskedState(asked, frozenset(objects))


def encode_asked(asked: AskedState, leaf: Leaf) -> Node:
    """The tree of a top-level state."""
    pairs = []
    for key, value in asked.values.items():
        node = encode_tree(value, key, leaf, 1)
        pairs.append([encode_key(key), {"$object": node} if key in asked.objects else node])
    return {"$dict": pairs}


def encode_state(state: dict[str, Any], leaf: Leaf) -> Node:
    return encode_asked(ask_state(state), leaf)


def dump_tree(node: Node) -> bytes:
    return dump_text(node).encode()


def dump_text(node: Node) -> str:
    """ASCII, whatever the strings in it."""
    return json.dumps(node, separators=(",", ":"), allow_nan=False)


def load_tree(raw: bytes, tensors: int) -> Any:
    """Python values again, with a TensorRef for each tensor. Raises CheckpointDamaged and nothing else."""
    try:
        return json.loads(raw, object_hook=_reviver(tensors))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(f"the checkpoint's values are not readable: {error}") from error


def encode_key(key: Any) -> Node:
    return key if type(key) is bool else _SCALARS[type(key)](key)


def is_plain_dict(value: dict[Any, Any]) -> bool:
    """Whether a JSON object can say it as it is."""
    return type(value) is dict and all(
        type(key) is str and not key.startswith("$") and (key.isascii() or _is_text(key)) for key in value
    )


def ordered_metadata(value: OrderedDict[Any, Any], path: str) -> Any:
    """The versions that torch.nn.Module.state_dict() hangs on its dict. Raises TypeError for other attributes."""
    attributes = vars(value)
    if attributes.keys() - {"_metadata"}:
        names = ", ".join(sorted(attributes.keys() - {"_metadata"}))
        raise TypeError(f"{path} is an OrderedDict with attributes of its own, which a checkpoint cannot hold: {names}")
    return attributes.get("_metadata")


def _encode_items(value: Any, path: str, leaf: Leaf, depth: int) -> list[Node]:
    return [encode_tree(item, f"{path}.{at}", leaf, depth + 1) for at, item in enumerate(value)]


def _encode_dict(value: dict[Any, Any], path: str, leaf: Leaf, depth: int) -> Node:
    for key in value:
        if type(key) not in (str, int, bool, float) or (type(key) is float and not math.isfinite(key)):
            raise TypeError(f"{path} has the key {key!r:.80}; keys must be strings or finite numbers")
    kind = type(value)
    if is_plain_dict(value):
        return {key: encode_tree(item, f"{path}.{key}", leaf, depth + 1) for key, item in value.items()}
    pairs = [[encode_key(key), encode_tree(item, f"{path}.{key}", leaf, depth + 1)] for key, item in value.items()]
    if kind is dict:
        return {"$dict": pairs}
    if kind is Counter:
        return {"$counter": pairs}
    assert isinstance(value, OrderedDict)
    metadata = ordered_metadata(value, path)
    return {"$ordered": [pairs, encode_tree(metadata, f"{path}._metadata", leaf, depth + 1)]}


def _encode_int(value: Any) -> Node:
    return value if value.bit_length() <= INTEGER_BITS_MAX else {"$int": f"{value:x}"}


def _encode_float(value: Any) -> Node:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    return {"$float": bits.hex() if math.isnan(value) and bits != _NAN_BITS else str(value)}


def _encode_str(value: Any) -> Node:
    if value.isascii() or _is_text(value):
        return value
    return {"$text": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}


def _is_text(value: str) -> bool:
    """Whether it has no surrogates: JSON would make one letter of two halves that stand side by side."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_bytes(value: Any) -> Node:
    return {"$bytes": base64.b64encode(value).decode()}


def _encode_bytearray(value: Any) -> Node:
    return {"$bytearray": base64.b64encode(value).decode()}


def _encode_complex(value: Any) -> Node:
    return {"$complex": [_encode_float(value.real), _encode_float(value.imag)]}


_SCALARS: dict[type, Callable[[Any], Node]] = {
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: _encode_bytes,
    bytearray: _encode_bytearray,
    complex: _encode_complex,
}


def _reviver(tensors: int) -> Callable[[dict[str, Any]], Any]:
    """What each JSON object stands for; what is in it has been asked about before."""

    def revive(node: dict[str, Any]) -> Any:
        if len(node) != 1:
            return node
        tag = next(iter(node))
        body, form = node[tag], _FORMS.get(tag)
        if form is not None:
            if type(body) is not int or not 0 <= body < tensors:
                raise ValueError(f"there is no tensor number {body!r:.40}")
            return TensorRef(body, form)
        if tag[:1] != "$":
            return node
        build = _CONTAINERS.get(tag)
        if build is not None:
            return build(body)
        decode = _TEXTS.get(tag)
        if decode is None:
            raise ValueError(f"tag {tag!r:.40} is not known to this reader")
        if type(body) is not str:
            raise ValueError(f"what stands behind {tag} is not a text")
        return decode(body)

    return revive


def _revive_dict(body: Any) -> dict[Any, Any]:
    built = dict(body)
    if TensorRef in set(map(type, built)):
        raise ValueError("a tensor cannot be a key")
    return built


def _revive_ordered(body: Any) -> Any:
    pairs, metadata = body
    ordered = OrderedDict(_revive_dict(pairs))
    if metadata is not None:
        ordered._metadata = metadata  # type: ignore[attr-defined]
    return ordered


def _revive_complex(body: Any) -> complex:
    real, imaginary = body
    return complex(real, imaginary)


def _decode_float(body: str) -> float:
    if body in _NON_FINITE:
        return _NON_FINITE[body]
    bits = bytes.fromhex(body)
    if len(bits) != 8:
        raise ValueError(f"{body!r:.40} is not a number")
    return float(struct.unpack(">d", bits)[0])


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$dict": _revive_dict,
    "$counter": lambda body: Counter(_revive_dict(body)),
    "$ordered": _revive_ordered,
    "$object": ObjectState,
    "$complex": _revive_complex,
}
_FORMS: dict[str, Form] = {"$tensor": "tensor", "$array": "array", "$scalar": "scalar"}
_TEXTS: dict[str, Callable[[str], Any]] = {
    "$float": _decode_float,
    "$int": lambda body: int(body, 16),
    "$text": lambda body: base64.b64decode(body, validate=True).decode("utf-8", "surrogatepass"),
    "$bytes": lambda body: base64.b64decode(body, validate=True),
    "$bytearray": lambda body: bytearray(base64.b64decode(body, validate=True)),
}
