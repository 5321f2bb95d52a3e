"""The state of a module as its `state_dict()` would give it, without a call for each of thousands of parts.

Only where that is torch's own all the way down: a class that overrides it, a hook or an extra state anywhere, and
the module is asked itself. The tensors are the parameters themselves, not aliases of them; whoever saves copies them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

Methods = tuple[Any, Any, Any]  # that make a state, as torch has them


def state_of_module(torch: Any, module: Any) -> Any:
    """What `module.state_dict()` returns."""
    state = quick_state(torch, module)
    return module.state_dict() if state is None else state


def quick_state(torch: Any, module: Any) -> Any:
    """The same where nobody else's code has a part in it, else None."""
    state: OrderedDict[str, Any] = OrderedDict()
    metadata: OrderedDict[str, Any] = OrderedDict()
    base = torch.nn.Module
    torchs = (base.state_dict, base._save_to_state_dict, base.get_extra_state)
    code = getattr(base.state_dict, "__code__", None)
    changed = not str(getattr(code, "co_filename", "")).endswith("module.py")  # somebody has put another in its place
    if changed or not _collect(torchs, module, "", state, metadata):
        return None
    state._metadata = metadata  # type: ignore[attr-defined]
    return state


def _collect(torchs: Methods, module: Any, prefix: str, state: dict[str, Any], metadata: dict[str, Any]) -> bool:
    """Add what belongs to `module`; False where it has something of its own to say."""
    kind, own = type(module), module.__dict__
    if (
        (kind.state_dict, kind._save_to_state_dict, kind.get_extra_state) != torchs
        or own.get("_state_dict_hooks", True)
        or own.get("_state_dict_pre_hooks", True)
        or "state_dict" in own
        or "_save_to_state_dict" in own
    ):
        return False
    metadata[prefix[:-1]] = {"version": module._version}
    for name, tensor in own["_parameters"].items():
        if tensor is not None:
            state[prefix + name] = tensor
    buffers = own["_buffers"]
    if buffers:
        passing = own["_non_persistent_buffers_set"]
        for name, tensor in buffers.items():
            if tensor is not None and name not in passing:
                state[prefix + name] = tensor
    for name, child in own["_modules"].items():
        if child is not None and not _collect(torchs, child, f"{prefix}{name}.", state, metadata):
            return False
    return True
