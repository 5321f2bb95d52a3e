"""A disk whose power is cut at a chosen operation, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt_engine.manifest import complete_steps, read_manifest
from ckpt_engine.storage import OutputFile, Storage
from ckpt_engine.stored import check_stored


class PowerCut(Exception):
    """The machine is off."""


class CutFile(OutputFile):
    def __init__(self, path: Path, storage: CutStorage) -> None:
        super().__init__(path)
        self._storage = storage
        storage.unsynced[path] = None

    def write(self, piece: bytes | memoryview) -> None:
        self._storage.tick()
        super().write(piece)

    def sync(self) -> None:
        self._storage.tick()
        super().sync()
        del self._storage.unsynced[self.path]


class CutStorage(Storage):
    """A disk that keeps only what was synced: bytes by fsync of the file, names by fsync of its folder.

    `names_survive` says what happens to names that were not: a real file system may do either.
    """

    def __init__(self, operations: int, *, names_survive: bool) -> None:
        self.left = operations
        self.names_survive = names_survive
        self.unsynced: dict[Path, None] = {}
        self.undo: list[tuple[Path, Callable[[], object]]] = []  # (folder, how to take the change back)

    def tick(self) -> None:
        if self.left == 0:
            self.collapse()
            raise PowerCut
        self.left -= 1

    def create(self, path: Path) -> OutputFile:
        self.tick()
        return CutFile(path, self)

    def rename(self, source: Path, target: Path) -> None:
        self.tick()
        before = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        if source in self.unsynced:
            del self.unsynced[source]
            self.unsynced[target] = None
        self.undo.append((target.parent, lambda: target.write_bytes(before) if before is not None else target.unlink()))

    def remove(self, path: Path) -> None:
        self.tick()
        if path.exists():
            before = path.read_bytes()
            super().remove(path)
            self.undo.append((path.parent, lambda: path.parent.is_dir() and path.write_bytes(before)))

    def sync_folder(self, path: Path) -> None:
        self.tick()
        super().sync_folder(path)
        self.undo = [(folder, back) for folder, back in self.undo if folder != path]

    def collapse(self) -> None:
        if not self.names_survive:
            for _, back in reversed(self.undo):
                back()
        for path in self.unsynced:
            if path.exists():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def everything_named_is_whole(directory: Path) -> list[int]:
    """Read every complete step through to its last byte; their numbers."""
    records = complete_steps(directory)
    for record in records:
        manifest = read_manifest(directory, record.step)
        assert manifest is not None
        for rank in range(manifest.world_size):
            check_stored(directory, manifest, rank)
    return [record.step for record in records]


def sweep(
    folder: Path, prepare: Callable[[Path], None], work: Callable[[Path, Storage], None], good: Callable[[Path], None]
) -> int:
    """Cut `work` after 0, 1, 2 … operations until it runs through; the number of operations it has."""
    for names_survive in (True, False):
        for operations in range(1000):
            directory = folder / f"{names_survive}-{operations}"
            prepare(directory)
            try:
                work(directory, CutStorage(operations, names_survive=names_survive))
            except PowerCut:
                good(directory)
                continue
            good(directory)
            break
    return operations
