"""An engine that is slow finds its step removed by a faster one: the step is old, nothing has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.commit import is_passed_by, remove_step
from ckpt_engine.manifest import MANIFEST
from ckpt_engine.storage import Storage
from tests.ckpt_lab import RawRank, engine_in_thread, eventually, put_step


class Overtaken(Storage):
    """While step 1 is being written, others complete newer steps; they clean up when its file `name` is next."""

    def __init__(self, directory: Path, name: str, newer: tuple[int, ...]) -> None:
        super().__init__()
        self.directory, self.name, self.newer = directory, name, newer
        self.cleaned = False

    def rename(self, source: Path, target: Path) -> None:
        of_old_step = target.parent.name.endswith("01")
        newer, self.newer = (self.newer, ()) if of_old_step else ((), self.newer)
        for step in newer:
            put_step(self.directory, step)
        if of_old_step and target.name.startswith(self.name) and not self.cleaned:
            self.cleaned = True
            remove_step(Storage(), self.directory, 1)
        super().rename(source, target)


@pytest.mark.parametrize("name", [MANIFEST, "shard-"])
def test_a_step_that_is_removed_under_a_slow_engines_hands_has_not_failed(tmp_path: Path, name: str) -> None:
    storage = Overtaken(tmp_path / "ck", name, (5, 6, 7))
    with engine_in_thread(tmp_path, storage=storage, retention_steps=3) as lab, RawRank(lab.socket) as rank:
        rank.save(1, b"old")
        assert rank.durable(1) is not None, "nobody who waits for it waits for ever"
        rank.save(8, b"new")
        eventually(lambda: lab.told("complete", 8), "the next step")
    assert storage.cleaned
    assert lab.told("failed") == []


def test_a_file_that_vanishes_while_the_step_is_wanted_is_a_failure(tmp_path: Path) -> None:
    storage = Overtaken(tmp_path / "ck", MANIFEST, (5, 6))
    with engine_in_thread(tmp_path, storage=storage, retention_steps=3) as lab, RawRank(lab.socket) as rank:
        rank.save(1, b"old")
        eventually(lambda: lab.told("failed", 1), "the failure")


def test_passed_by_means_that_as_many_newer_steps_are_complete_as_are_kept(tmp_path: Path) -> None:
    for step in (2, 3):
        put_step(tmp_path, step)
    assert [is_passed_by(tmp_path, 1, kept) for kept in (1, 2, 3)] == [True, True, False]
    assert not is_passed_by(tmp_path, 2, 2)
