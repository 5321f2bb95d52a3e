"""The one copy of a save: every byte at its place, by our own threads, and torch's left as they are."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import copying
from ckpt_engine.client import Checkpointer
from ckpt_engine.copying import (
    BATCH_TENSORS_MAX,
    LARGE_TENSOR_BYTES_MIN,
    PIECE_BYTES,
    RUN_BYTES_MAX,
    CopyList,
    CopyThreads,
    Target,
    Words,
    threads_for,
)
from ckpt_engine.layout import SMALL_TENSOR_BYTES_MAX, plan_layout
from ckpt_engine.staging import StagedSlot, local_slot
from ckpt_engine.tensors import SLICE_ELEMENTS_MAX, TensorDoor
from ckpt_engine.words import TorchWords
from tests.ckpt_lab import engine_in_thread

SIZES = [3, 0, PIECE_BYTES + 5, 1, SMALL_TENSOR_BYTES_MAX, SMALL_TENSOR_BYTES_MAX + 1, 2 * PIECE_BYTES, 17]
MANY = [1 + at % 50 for at in range(2 * BATCH_TENSORS_MAX + 3)]
MIDDLING = [
    SMALL_TENSOR_BYTES_MAX + 8, RUN_BYTES_MAX, RUN_BYTES_MAX + 8, 50_000, LARGE_TENSOR_BYTES_MIN - 8, 50_001,
    *[99_992] * 50,
]  # fmt: skip
WORDS = TorchWords(torch)


def sources(sizes: list[int]) -> list[ctypes.Array[ctypes.c_char]]:
    return [ctypes.create_string_buffer(os.urandom(size), max(size, 1)) for size in sizes]


def target_of(slot: StagedSlot, offset: int, *, file: bool) -> Target:
    address = ctypes.addressof(ctypes.c_char.from_buffer(slot.view)) + offset
    return Target(address, slot.descriptor if file else -1, offset)


def check(sizes: list[int], raw: list[bool], threads: CopyThreads, *, file: bool, words: Words | None = None) -> None:
    layout = plan_layout([(f"t{at}", "uint8", (size,)) for at, size in enumerate(sizes)])
    memory = sources(sizes)
    slot = local_slot(4096 + -(-layout.payload_bytes // 4096) * 4096)
    copies = CopyList(layout, raw, words)
    copies.aim([ctypes.addressof(piece) for piece in memory])
    copies.copy(target_of(slot, 4096, file=file), threads)
    for place, piece, wanted in zip(layout.places, memory, raw, strict=True):
        start = 4096 + place.offset
        expected = piece.raw[: place.size_bytes] if wanted else bytes(place.size_bytes)
        assert bytes(slot.view[start : start + place.size_bytes]) == expected, place.name
    assert copies.size_bytes == sum(size for size, wanted in zip(sizes, raw, strict=True) if wanted)
    slot.close()


@pytest.mark.parametrize("file", [True, False], ids=["pwritev", "memmove"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sizes", [SIZES, MANY, []], ids=["mixed", "many", "none"])
def test_every_byte_comes_to_its_place(sizes: list[int], count: int, file: bool) -> None:
    threads = CopyThreads(count)
    check(sizes, [True] * len(sizes), threads, file=file)
    check(sizes, [at % 3 != 1 for at in range(len(sizes))], threads, file=file)
    threads.close()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sizes", [SIZES, MIDDLING], ids=["mixed", "middling"])
def test_middling_tensors_are_copied_by_few_calls(sizes: list[int], count: int) -> None:
    threads, calls = CopyThreads(count), []

    class Counted(TorchWords):
        def copy(self, targets: Any, sources: Any) -> None:
            calls.append(max(tensor.numel() for tensor in sources))
            super().copy(targets, sources)

    check(sizes, [True] * len(sizes), threads, file=True, words=Counted(torch))
    assert len(calls) <= 3
    assert all(count <= SLICE_ELEMENTS_MAX for count in calls), "torch would use its own threads"
    check(sizes, [at % 3 != 1 for at in range(len(sizes))], threads, file=False, words=WORDS)
    threads.close()


def test_an_older_torch_copies_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_copy_")
    check(MIDDLING, [True] * len(MIDDLING), CopyThreads(1), file=True, words=TorchWords(torch))


def test_memory_that_was_first_seen_in_inference_mode_is_written_outside_of_it() -> None:
    source, target = ctypes.create_string_buffer(os.urandom(80)), ctypes.create_string_buffer(80)
    with torch.inference_mode():
        words = WORDS.at([(ctypes.addressof(memory), 80) for memory in (source, target)])
    WORDS.copy(words[1:], words[:1])
    assert target.raw[:80] == source.raw[:80]


def test_a_write_that_is_cut_short_is_done_again_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def short(*arguments: Any) -> int:
        calls.append(arguments)
        return 5

    monkeypatch.setattr(copying, "_pwritev", short)
    check(MANY, [True] * len(MANY), CopyThreads(1), file=True)
    assert len(calls) == 3


@pytest.mark.parametrize("words", [None, WORDS], ids=["memmove", "words"])
def test_other_addresses_are_read_after_they_were_aimed_at(words: Words | None) -> None:
    layout = plan_layout([("small", "uint8", (9,)), ("large", "uint8", (100_000,))])
    slot = local_slot(128 << 10)
    copies, threads = CopyList(layout, [True, True], words), CopyThreads(1)
    for _ in range(2):
        memory = sources([9, 100_000])
        copies.aim([ctypes.addressof(piece) for piece in memory])
        copies.copy(target_of(slot, 0, file=True), threads)
        for place, piece in zip(layout.places, memory, strict=True):
            assert bytes(slot.view[place.offset : place.offset + place.size_bytes]) == piece.raw
    slot.close()


def test_every_thread_works_and_all_are_awaited() -> None:
    threads = CopyThreads(3)
    together = threading.Barrier(3, timeout=20)
    seen = set()

    def work() -> None:
        together.wait()
        seen.add(threading.get_ident())

    threads.run(work)
    assert len(seen) == 3
    threads.run(work)
    assert len(seen) == 3, "the threads are kept"
    threads.close()


@pytest.mark.parametrize("where", ["caller", "helper"])
def test_what_a_thread_raises_is_raised_when_none_works_any_more(where: str) -> None:
    threads = CopyThreads(2)
    caller = threading.get_ident()
    other_is_done = threading.Event()

    def work() -> None:
        if (threading.get_ident() == caller) == (where == "caller"):
            raise RuntimeError("a bad address")
        other_is_done.set()

    with pytest.raises(RuntimeError, match="a bad address"):
        threads.run(work)
    assert other_is_done.is_set()
    threads.run(lambda: None)
    threads.close()


def test_a_forked_child_copies_alone() -> None:
    threads = CopyThreads(4)
    threads.run(lambda: None)
    child = os.fork()
    if child == 0:
        threads.run(lambda: None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    threads.close()


@pytest.mark.parametrize("count", [0, 65])
def test_a_senseless_number_of_threads_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="copy_threads must be 1 to 64"):
        CopyThreads(count)


def test_the_default_is_a_few_threads_on_as_many_cores() -> None:
    assert [threads_for(cores) for cores in (1, 2, 3, 4, 8, 128)] == [1, 2, 3, 4, 4, 4]


def test_a_save_leaves_torch_s_threads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the number, which is the process's, nor a parallel region, which would spin."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail("the number of torch's threads was set"))
    with engine_in_thread(tmp_path) as lab:
        checkpointer = Checkpointer(
            str(lab.socket), None, job="job", attempt=1, rank=0, world_size=1, node="n0", copy_threads=2
        )
        state = {"a": torch.randn(1000, 1000), "b": torch.randn(300, 700).T, "c": torch.randn(5)}
        assert checkpointer.save(state, 1).sealed.reached
        into: dict[str, Any] = dict.fromkeys(state)
        checkpointer.load(into, step=1)
        assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
        checkpointer.close()


@pytest.mark.parametrize("shape", [(400, 300), (3, 200_000), (200_000, 3), (2, 40, 5, 500)])
def test_strided_copies_are_handed_to_torch_in_small_slices(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    sizes: list[int] = []
    copy_ = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        sizes.append(source.numel())
        return copy_(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    source = torch.randn(shape).transpose(0, -1)
    target = torch.zeros(source.shape)
    TensorDoor(torch).copy([target], [source])
    assert torch.equal(target, source)
    assert max(sizes) <= SLICE_ELEMENTS_MAX
    assert sum(sizes) == source.numel()
