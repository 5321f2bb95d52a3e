"""A fitted ensemble as a file: clean windows and names, never a pickle; its models are fitted anew from them."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

FORMAT = "transom-ensemble"
VERSION = 1
CHECKS_RTOL = 1e-5

Singles = npt.NDArray[np.float32]
Peers = Literal["few", "many"]  # which of the two ways of comparing ranks the windows come from


class ModelRefused(ValueError):
    """A stored ensemble cannot be used here; the text says why and what to do."""


class StoredPart(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned of small jobs or of large ones. `checks`: what the first rows must score after a refit."""

    windows: int
    checks: tuple[float, ...]
    level_decades: float  # the level that one clean window in a thousand reaches
    runs: tuple[str, ...] = ()
    steps: int = 0  # clean steps that the windows come from


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the windows, which are arrays beside it (`windows[peers]`: window × step × feature)."""

    features: tuple[str, ...]
    persistence: tuple[int, int]
    members: tuple[str, ...]
    votes: tuple[str, ...]
    seed: int
    versions: dict[str, str]
    parts: dict[Peers, StoredPart]
    least: dict[str, float] = {}  # of a class: decades below which people called its verdicts wrong
    eased: dict[str, float] = {}  # of a class: decades by which its threshold is lowered, for faults that were missed
    format: str = FORMAT
    version: int = VERSION
    windows: dict[Peers, Any] = {}

    def to_bytes(self) -> bytes:
        """An npz file: `model` holds the JSON, `windows.<peers>` the rest."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "windows"}
        arrays = {f"windows.{peers}": np.asarray(rows, np.float32) for peers, rows in self.windows.items()}
        told = np.frombuffer(msgspec.json.encode(fields), np.uint8)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, model=told, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, stored: bytes) -> StoredModel:
        """Raises ModelRefused for what is none or of another version."""
        try:
            with np.load(io.BytesIO(stored), allow_pickle=False) as arrays:
                fields = msgspec.json.decode(arrays["model"].tobytes())
                rows = {name.removeprefix("windows."): arrays[name] for name in arrays.files if name != "model"}
            if fields.get("format") != FORMAT or fields.get("version") != VERSION:
                raise ModelRefused(
                    f"this model has format {fields.get('format')!r} and version {fields.get('version')!r}, this "
                    f"Transom reads {FORMAT!r} {VERSION}; fit it anew with `transom fit`"
                )
            model = msgspec.convert(fields, cls)
        except (ValueError, KeyError, OSError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            if isinstance(error, ModelRefused):
                raise
            raise ModelRefused(f"this is no model of `transom fit` ({error}); fit one") from error
        shape = (model.persistence[1], len(model.features))
        for peers, part in model.parts.items():
            found = rows.get(peers)
            if found is None or found.shape != (part.windows, *shape) or found.dtype != np.float32:
                raise ModelRefused(f"this model's windows of {peers} peers are not what it says; fit it anew")
        return msgspec.structs.replace(model, windows=rows)
