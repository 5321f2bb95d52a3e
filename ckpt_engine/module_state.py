"""The state of a module as its `state_dict()` would give it, without a call for each of thousands of parts.

Only where that is torch's own all the way down: a class that overrides it, a hook or an extra state anywhere, and
the module is asked itself. The tensors are the parameters themselves, not aliases of them; whoever saves copies them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


def is_torchs_own(torch: Any) -> bool:
    """Whether nobody has put another method in the place of `Module.state_dict`."""
    code = getattr(torch.nn.Module.state_dict, "__code__", None)
    return str(getattr(code, "co_filename", "")).endswith("module.py")


def is_torchs_own_class(torch: Any, kind: Any) -> bool:
    """Whether modules of this class say their state as torch's own do."""
    base = torch.nn.Module
    return (kind.state_dict, kind._save_to_state_dict, kind.get_extra_state) == (
        base.state_dict, base._save_to_state_dict, base.get_extra_state
    )  # fmt: skip


def quick_state(torch: Any, module: Any) -> Any:
    """What `module.state_dict()` returns where nobody else's code has a part in it, else None."""
    state: OrderedDict[str, Any] = OrderedDict()
    metadata: OrderedDict[str, Any] = OrderedDict()
    if not is_torchs_own(torch) or not _collect(torch, module, "", state, metadata):
        return None
    state._metadata = metadata  # type: ignore[attr-defined]
    return state


def _collect(torch: Any, module: Any, prefix: str, state: dict[str, Any], metadata: dict[str, Any]) -> bool:
    """Add what belongs to `module`; False where it has something of its own to say."""
    own = module.__dict__
    if (
        not is_torchs_own_class(torch, type(module))
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
        if child is not None and not _collect(torch, child, f"{prefix}{name}.", state, metadata):
            return False
    return True
