"""What a save needs to know of a state: its tensors, and everything else as text; remembered from save to save.

A state seldom changes its shape. The first save writes its tree as `tree.py` says; the next ones walk along that
tree, collect the tensors, and write anew only the parts whose plain values are no longer the same.
"""

from __future__ import annotations

import marshal
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any

from .blocks import Shard
from .object_state import ModuleMemory, optimizer_state
from .plan import TensorPlan
from .sharding import is_sharded_tensor
from .tensors import Collector, TensorDoor
from .tree import AskedState, Node, ask_state, dump_text, encode_asked, encode_key, encode_tree

if TYPE_CHECKING:
    from torch import Tensor

MARK_VERSION = 2  # of marshal: without references, so that equal values are equal bytes; they never leave this process
_LEAF_TAGS = ("$tensor", "$array", "$scalar")


class _Changed(Exception):
    """The state is no longer what is remembered of it."""


@dataclass(slots=True)
class _Tensor:
    """A leaf that is copied. `asked`: it is a DTensor, a Shard or NumPy's, and its plain tensor has to be asked for."""

    kind: type
    text: str
    asked: bool = False
    placements: Any = None
    mesh: Any = None
    shape: Any = None


@dataclass(slots=True)
class _Plain:
    """A part without tensors. `mark` is what only an equal value has; None where nothing tells that."""

    mark: bytes | None
    text: str


@dataclass(frozen=True, slots=True)
class _Rows:
    """Children that are dicts of tensors under texts, as the states of an optimizer's parameters are."""

    lengths: list[int]
    keys: list[str]
    kinds: list[type]


@dataclass(slots=True)
class _Branch:
    """A container with tensors somewhere in it. Its text is that of its children, each in its own brackets."""

    kind: type
    keys: list[Any] | None  # None: a list or a tuple
    key_types: list[type] | None  # None: all are strings
    children: list[Any]
    heads: list[str]
    tails: list[str]
    opening: str
    closing: str
    metadata: list[Any]  # of an OrderedDict: one more child, with brackets that differ
    text: str = ""
    kinds: list[type] | None = None  # of the children, where all are tensors that need not be asked
    rows: _Rows | None = None
    seen: Any = None  # the metadata that was compared last, where nobody changes it

    def render(self) -> None:
        rows = zip(self.heads, self.children, self.tails, strict=True)
        body = ",".join([f"{head}{child.text}{tail}" for head, child, tail in rows])
        extra = f"],{self.metadata[0].text}" if self.metadata else ""
        self.text = f"{self.opening}{body}{extra}{self.closing}"


@dataclass(slots=True)
class _Walk:
    """One pass along what is remembered. `own`: the identities of metadata that nobody changes."""

    door: TensorDoor
    own: frozenset[int]
    tensors: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Taken:
    """A state as it is now. `tensors` are live: whoever copies them has to do it before training goes on."""

    plan: TensorPlan
    tensors: list[Tensor]
    values: bytes


class Capture:
    """Takes states of one kind, one after another."""

    def __init__(self, door: TensorDoor) -> None:
        self._door = door
        self._objects: frozenset[str] = frozenset()
        self._root: _Branch | _Plain | _Tensor | None = None
        self._values = b""
        self._plan: TensorPlan | None = None
        self._modules: list[ModuleMemory] = []  # of those at the top, in their order

    def take(self, state: dict[str, Any]) -> Taken:
        """Raises TypeError naming the path of what cannot be saved."""
        asked = self._ask(state)
        taken = self._again(asked)
        return self._anew(asked) if taken is None else taken

    def forget(self) -> None:
        """Take the next state as if it were the first."""
        self._root = self._plan = None

    def doubt(self) -> None:
        """What was taken last may have been written to meanwhile: all that is no tensor is read anew the next time."""
        if not isinstance(self._root, _Branch) or not _read_anew(self._root):
            self.forget()

    def _ask(self, state: dict[str, Any]) -> AskedState:
        torch, used = self._door.torch, 0

        def ask(value: Any) -> Any:
            nonlocal used
            if isinstance(value, torch.optim.Optimizer):
                return optimizer_state(torch, value)
            if not isinstance(value, torch.nn.Module):
                return value.state_dict()
            if used == len(self._modules):
                self._modules.append(ModuleMemory(torch))
            used += 1
            return self._modules[used - 1].state(value)

        asked = ask_state(state, ask)
        del self._modules[used:]
        return asked

    def _again(self, asked: AskedState) -> Taken | None:
        """As last time, where only values have changed; None where more has."""
        root, plan = self._root, self._plan
        if not isinstance(root, _Branch) or plan is None or asked.objects != self._objects:
            return None
        walk = _Walk(self._door, frozenset(id(memory.metadata) for memory in self._modules))
        try:
            changed = _follow(root, asked.values, walk)
        except (_Changed, TypeError, ValueError, AttributeError, RecursionError):
            self.forget()  # some texts may have been replaced; what is wrong is said when the state is taken anew
            return None
        if not plan.fits(walk.tensors):
            self.forget()
            return None
        if changed:
            self._values = root.text.encode()
        return Taken(plan, walk.tensors, self._values)

    def _anew(self, asked: AskedState) -> Taken:
        self.forget()
        collector = Collector(self._door)
        node = encode_asked(asked, collector)
        plan = TensorPlan(self._door, collector.leaves, collector.paths)
        collector.number(plan.index_of)
        root = _grow(asked.values, node, asked.objects) or _plain(asked.values, node)
        self._root, self._plan, self._objects = root, plan, asked.objects
        self._values = root.text.encode()
        return Taken(plan, [leaf.tensor for leaf in collector.leaves], self._values)


def _follow(branch: _Branch, value: Any, walk: _Walk) -> bool:
    """Collect the tensors of `value` along `branch`; whether its text had to change."""
    kind: object = type(value)
    if kind is not branch.kind or len(value) != len(branch.children):
        raise _Changed
    items: Iterable[Any] = value
    if branch.keys is not None:
        if list(value) != branch.keys or (branch.key_types is not None and list(map(type, value)) != branch.key_types):
            raise _Changed
        items = value.values()
    if branch.kinds is not None:
        changed = _follow_tensors(branch.kinds, items, walk)
    elif branch.rows is not None:
        changed = _follow_rows(branch.rows, list(items), walk)
    else:
        changed = _follow_items(branch.children, items, walk)
    if branch.metadata:
        attributes = vars(value)
        if len(attributes) > ("_metadata" in attributes):
            raise _Changed
        found = attributes.get("_metadata")
        if branch.seen is None or branch.seen is not found:
            changed |= _follow_items(branch.metadata, (found,), walk)
            branch.seen = found if id(found) in walk.own else None
    if changed:
        branch.render()
    return changed


def _follow_tensors(kinds: list[type], items: Iterable[Any], walk: _Walk) -> bool:
    tensors = list(items)
    if list(map(type, tensors)) != kinds:
        raise _Changed
    walk.tensors += tensors
    return False


def _follow_rows(shape: _Rows, rows: list[Any], walk: _Walk) -> bool:
    """Thousands of small dicts as one."""
    if set(map(type, rows)) != {dict} or list(map(len, rows)) != shape.lengths:
        raise _Changed
    if list(chain.from_iterable(rows)) != shape.keys:
        raise _Changed
    return _follow_tensors(shape.kinds, chain.from_iterable(map(dict.values, rows)), walk)


def _follow_items(children: Sequence[Any], items: Iterable[Any], walk: _Walk) -> bool:
    changed = False
    for child, item in zip(children, items, strict=True):
        kind = child.__class__
        if kind is _Tensor:
            if type(item) is not child.kind:
                raise _Changed
            walk.tensors.append(_unwrapped(child, item, walk.door) if child.asked else item)
        elif kind is _Plain:
            if child.mark is None or _mark_of(item) != child.mark:
                child.mark, child.text = _read_plain(item)
                changed = True
        elif _follow(child, item, walk):
            changed = True
    return changed


def _read_anew(branch: _Branch) -> bool:
    """Forget what the plain parts looked like; False where that is not enough, because a tensor is more than one."""
    branch.seen = None
    for child in (*branch.children, *branch.metadata):
        if child.__class__ is _Plain:
            child.mark = None
        elif child.asked if child.__class__ is _Tensor else not _read_anew(child):
            return False
    return True


def _note_regularity(branch: _Branch) -> None:
    """Whether its tensors can be collected without looking at each child."""
    children = branch.children
    if all(child.__class__ is _Tensor and not child.asked for child in children):
        branch.kinds = [child.kind for child in children]
    elif all(_is_row(child) for child in children):
        keys = chain.from_iterable(child.keys for child in children)
        kinds = chain.from_iterable(child.kinds for child in children)
        branch.rows = _Rows([len(child.children) for child in children], list(keys), list(kinds))


def _is_row(child: Any) -> bool:
    if child.__class__ is not _Branch or child.kind is not dict:
        return False
    return child.kinds is not None and child.key_types is None


def _unwrapped(child: _Tensor, item: Any, door: TensorDoor) -> Tensor:
    if isinstance(item, Shard):
        tensor: Tensor = item.tensor
        if (item.offset, item.global_shape) != (child.placements, child.shape) or not door.is_plain(tensor):
            raise _Changed
        return tensor
    if child.mesh is None:
        return door.from_array(item, "an array")
    same = item.placements == child.placements and item.device_mesh == child.mesh and item.shape == child.shape
    local: Tensor = door.local(item)
    if not same or not door.is_plain(local):
        raise _Changed
    return local


def _mark_of(value: Any) -> bytes | None:
    """Bytes that only an equal value has, down to the sign of a zero; None for what is not plain all through."""
    kind = b"p"
    if type(value) is OrderedDict and not vars(value):
        kind, value = b"o", dict(value)
    elif type(value) is Counter:
        kind, value = b"c", dict(value)
    try:
        return kind + marshal.dumps(value, MARK_VERSION)
    except ValueError:
        return None


def _read_plain(value: Any) -> tuple[bytes | None, str]:
    """Mark and text of a part that had no tensors. Raises _Changed or TypeError where that is no longer so."""

    def refuse(item: object, path: str) -> Node:
        if isinstance(item, (list, tuple, dict)):
            return None
        raise _Changed

    text = dump_text(encode_tree(value, "", refuse))
    return _marked(value, text), text


def _marked(value: Any, text: str) -> bytes | None:
    return None if '"$bytes' in text else _mark_of(value)  # to marshal everything with a buffer is bytes


def _grow(value: Any, node: Node, objects: frozenset[str] = frozenset()) -> _Tensor | _Branch | None:
    """What to remember of `value`, whose tree is `node`; None where no tensor is in it."""
    tag = _tag_of(node)
    if tag in _LEAF_TAGS:
        leaf = _Tensor(type(value), f'{{"{tag}":{node[tag]}}}', asked=tag != "$tensor")
        if is_sharded_tensor(value):
            leaf.asked = True
            leaf.placements, leaf.mesh, leaf.shape = value.placements, value.device_mesh, value.shape
        elif isinstance(value, Shard):
            leaf.asked, leaf.placements, leaf.shape = True, value.offset, value.global_shape
        return leaf
    branch = None
    if isinstance(value, dict):
        branch = _grow_dict(value, node, objects)
    elif isinstance(value, (list, tuple)):
        branch = _grow_items(value, node)
    if branch is not None:
        branch.render()
        _note_regularity(branch)
    return branch


def _plain(value: Any, node: Node) -> _Plain:
    text = dump_text(node)
    return _Plain(_marked(value, text), text)


def _grow_items(value: Any, node: Node) -> _Branch | None:
    opening, closing, items = ("[", "]", node)
    if isinstance(value, tuple):
        opening, closing, items = '{"$tuple":[', "]}", node["$tuple"]
    grown = [_grow(item, child) for item, child in zip(value, items, strict=True)]
    if not any(grown):
        return None
    children = [child or _plain(*rest) for child, *rest in zip(grown, value, items, strict=True)]
    blank = [""] * len(children)
    return _Branch(type(value), None, None, children, blank, blank, opening, closing, [])


def _grow_dict(value: dict[Any, Any], node: Node, objects: frozenset[str]) -> _Branch | None:
    keys, tag = list(value), _tag_of(node)
    extra = None
    if tag == "$ordered":
        pairs, extra = node[tag]
    else:
        pairs = node[tag] if tag in ("$dict", "$counter") else None
    nodes = list(node.values()) if pairs is None else [item for _, item in pairs]
    if objects:
        nodes = [item["$object"] if key in objects else item for key, item in zip(keys, nodes, strict=True)]
    said = keys if pairs is None else [encode_key(key) for key in keys]
    if said != (list(node) if pairs is None else [key for key, _ in pairs]):
        raise ValueError("the state changed while it was taken")
    grown = [_grow(item, child) for item, child in zip(value.values(), nodes, strict=True)]
    attributes = vars(value).get("_metadata") if tag == "$ordered" else None
    metadata = _grow(attributes, extra)
    if not any(grown) and metadata is None:
        return None
    children = [child or _plain(*rest) for child, *rest in zip(grown, value.values(), nodes, strict=True)]
    key_types = None if all(type(key) is str for key in keys) else list(map(type, keys))
    if pairs is None:
        heads, tails = [f"{encode_basestring_ascii(key)}:" for key in keys], [""] * len(keys)
        return _Branch(type(value), keys, key_types, children, heads, tails, "{", "}", [])
    heads, tails = [f"[{dump_text(key)}," for key, _ in pairs], ["]"] * len(keys)
    for at, key in enumerate(keys if objects else ()):
        if key in objects:
            heads[at], tails[at] = f'{heads[at]}{{"$object":', f"}}{tails[at]}"
    if tag != "$ordered":
        return _Branch(type(value), keys, key_types, children, heads, tails, f'{{"{tag}":[', "]}", [])
    more = [metadata or _plain(attributes, extra)]
    return _Branch(type(value), keys, key_types, children, heads, tails, '{"$ordered":[[', "]}", more)


def _tag_of(node: Node) -> str:
    """The tag of a tagged node, "" for any other."""
    if node.__class__ is dict and len(node) == 1:
        key = next(iter(node))
        if key.startswith("$"):
            return str(key)
    return ""
