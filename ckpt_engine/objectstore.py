"""The door to fsspec: an object store as the few operations that checkpoints need.

`s3://`, `gs://`, `abfs://`, `file://`, `memory://` and whatever else fsspec knows; s3fs, gcsfs or adlfs are the
user's to install, and credentials come from where those look for them. Nothing here is atomic but one object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from .errors import CheckpointError

PART_BYTES = 64 << 20  # of a multipart upload; S3 takes 10,000 parts
READ_BYTES = 8 << 20
_ON_DISK = ("file", "local")


class ObjectStoreError(CheckpointError):
    """The object store did not do it, now: ask again later. The text says what it said."""


class ObjectStore(Protocol):
    """Objects by name, `/` between the parts of it. Everything raises ObjectStoreError; absent is no error."""

    url: str

    def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Make or replace an object; large ones go in parts. It is not there before all of it is."""
        ...

    def read(self, name: str, size_bytes_max: int) -> bytes | None:
        """A small object whole; None where there is none. A larger one is an error."""
        ...

    def stream(self, name: str) -> Iterator[bytes]:
        """An object piece by piece."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """All objects below `folder`, by their names behind it, with their sizes in bytes."""
        ...

    def folders(self) -> list[str]:
        """What stands at the top."""
        ...

    def remove(self, name: str) -> None:
        """Gone afterwards, whoever removed it."""
        ...


class FsspecStore:
    """`ObjectStore` by fsspec. May be used from several threads."""

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import fsspec  # here, because an engine without an object store should not pay for it
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "checkpoints in an object store need fsspec, which is not installed; run: pip install "
                "'transom[objects]', and the client of your store (s3fs, gcsfs, adlfs)",
                name=error.name,
            ) from None
        self.url = url
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise ObjectStoreError(f"the object store {url} cannot be opened: {error}") from error
        self._root = root.rstrip("/")
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        self._makes_folders = any(protocol in _ON_DISK for protocol in protocols)

    def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        path = self._path(name)
        with self._told(f"{name} could not be written"):
            if self._makes_folders:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._fs.open(path, "wb", block_size=PART_BYTES) as file:
                for piece in pieces:
                    file.write(piece)

    def read(self, name: str, size_bytes_max: int) -> bytes | None:
        with self._told(f"{name} could not be read"):
            try:
                raw = self._fs.cat_file(self._path(name), start=0, end=size_bytes_max + 1)
            except FileNotFoundError:
                return None
        if len(raw) > size_bytes_max:
            raise ObjectStoreError(f"{name} in {self.url} has more than {size_bytes_max} bytes")
        return bytes(raw)

    def stream(self, name: str) -> Iterator[bytes]:
        path = self._path(name)
        with self._told(f"{name} could not be read"):
            self._fs.invalidate_cache()
            size_bytes = int(self._fs.info(path)["size"])
        for start in range(0, size_bytes, READ_BYTES):  # a request each: one that fails cannot pass for the end
            end = min(start + READ_BYTES, size_bytes)
            with self._told(f"{name} could not be read"):
                piece = bytes(self._fs.cat_file(path, start=start, end=end))
            if len(piece) != end - start:
                raise ObjectStoreError(f"{self.url}: {name} ended at byte {start + len(piece)} of {size_bytes}")
            yield piece

    def sizes(self, folder: str) -> dict[str, int]:
        top = f"{self._path(folder)}/"
        with self._told(f"{folder} could not be listed"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(top, detail=True)
            except FileNotFoundError:
                return {}
        return {
            self._name(path)[len(folder) + 1 :]: int(entry.get("size") or 0)
            for path, entry in found.items()
            if self._name(path).startswith(f"{folder}/")
        }

    def folders(self) -> list[str]:
        with self._told("could not be listed"):
            self._fs.invalidate_cache()
            try:
                paths = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in paths})

    def remove(self, name: str) -> None:
        path = self._path(name)
        with self._told(f"{name} could not be removed"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)
        if self._makes_folders:
            with contextlib.suppress(OSError):  # others are still in it
                self._fs.rmdir(path.rpartition("/")[0])

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if not name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name!r:.100} is no name of an object")
        return f"{self._root}/{name}"

    def _name(self, path: str) -> str:
        """The name behind our root; stores differ in whether they put a slash before it."""
        return str(path).lstrip("/").removeprefix(self._root.lstrip("/")).lstrip("/")

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise ObjectStoreError(f"{self.url}: {what}: {type(error).__name__}: {error!s:.300}") from error
