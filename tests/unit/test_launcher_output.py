"""Bytes to lines to records: what a rank prints arrives as a person would read it, within bounds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.launcher.output import (
    DRIVER_LINES_MAX,
    LINE_BYTES_MAX,
    OPEN_SECONDS,
    PARTIAL_SECONDS,
    RECORD_CHARS_MAX,
    RECORD_LINES_MAX,
    Line,
    LinePrefixer,
    LineSplitter,
    RecordJoiner,
    error_in,
)
from recovery.launcher.rank_log import BATCH_CHARS_MAX, RAW_BYTES_MAX, RankLog

CHAINED = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
  File "train.py", line 9, in step
    raise KeyError("x")
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    main()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
Exception raised from malloc at ../c10/cuda/CUDACachingAllocator.cpp:1 (most recent call first):
frame #0: c10::Error::Error() + 0x96 (0x7f in libc10.so)
frame #1: <unknown function>"""
FATAL = """\
Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "queue.py", line 1 in get

Current thread 0x00007e (most recent call first):
  File "train.py", line 9 in step"""


def records(text: str, *, at: float = 1.0) -> list[str]:
    joiner = RecordJoiner("stderr")
    lines = [Line(at, line) for line in text.split("\n")]
    done = [record for line in lines for record in joiner.feed(line)] + joiner.flush()
    return [record.text for record in done]


@pytest.mark.parametrize("text", [CHAINED, FATAL], ids=["chained", "fatal"])
def test_a_traceback_is_one_record_among_others(text: str) -> None:
    assert records(f"before\n{text}\nafter\nlast") == ["before", text, "after", "last"]


NATIVE = """\
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: unspecified launch failure
CUDA kernel errors might be asynchronously reported at some other API call
For debugging consider passing CUDA_LAUNCH_BLOCKING=1.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7e in libc10.so)
frame #1: <unknown function>"""
NCCL = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    dist.broadcast(tensor, 0)
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1249, internal error, NCCL version 2.18.1
ncclInternalError: Internal check failed.
Last error:
Bootstrap : no socket interface found"""
SIGNAL = """\
[node7:4141] *** Process received signal ***
[node7:4141] Signal: Segmentation fault (11)
[node7:4141] [ 0] /lib64/libpthread.so.0(+0x12b20)[0x7f]
[node7:4141] *** End of error message ***"""
LOST_GPU = """\
[   74.10] NVRM: The NVIDIA GPU 0000:26:00.0
[   74.10] NVRM: (PCI ID: 10de:2324) installed in this system has
[   74.10] NVRM: fallen off the bus and is not responding to commands."""
HEADED_XID = """\
NVRM: GPU at PCI:0000:3b:00: GPU-0a1b
NVRM: GPU Board Serial Number: 1234567890
NVRM: Xid (PCI:0000:3b:00): 79, pid=4141, GPU has fallen off the bus.
NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."""


@pytest.mark.parametrize(
    "text", [NATIVE, NCCL, SIGNAL, LOST_GPU, HEADED_XID], ids=["native", "nccl", "signal", "lost gpu", "headed xid"]
)
def test_what_libraries_and_drivers_tell_in_several_lines_is_one_record(text: str) -> None:
    assert records(f"before\n{text}\nafter\nlast") == ["before", text, "after", "last"]


def test_two_xids_are_two_records_and_advice_alone_belongs_to_nothing() -> None:
    one, two = "NVRM: Xid (PCI:0000:3b:00): 31, pid=1", "NVRM: Xid (PCI:0000:3c:00): 45, pid=2"
    assert records(f"{one}\n{two}\n{two}") == [one, two, two]
    assert records("a line\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.") == [
        "a line", "For debugging consider passing CUDA_LAUNCH_BLOCKING=1.",
    ]  # fmt: skip


def test_the_report_of_a_lost_gpu_is_bounded() -> None:
    more = "NVRM: GPU 0000:3b:00.0: GPU serial number is 1."
    told = records("\n".join(["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", *[more] * 40]))
    assert len(told[0].split("\n")) == DRIVER_LINES_MAX


def test_the_prefix_of_torchs_excepthook_is_taken_off() -> None:
    prefixed = "\n".join(f"[rank3]: {line}".rstrip() for line in CHAINED.split("\n"))
    (record,) = records(prefixed)
    assert record == CHAINED


def test_lines_that_begin_with_white_space_go_on_a_record() -> None:
    assert records("config:\n  lr: 0.1\n\tdepth: 4\nnext\n\n  after a blank line") == [
        "config:\n  lr: 0.1\n\tdepth: 4", "next", "  after a blank line",
    ]  # fmt: skip


def test_two_tracebacks_that_are_not_chained_are_two_records() -> None:
    one = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: a'
    assert records(f"{one}\n{one}") == [one, one]


def test_a_record_is_bounded_in_lines_and_characters() -> None:
    found = records("head\n" + "\n".join(f"  line {n}" for n in range(1000)))
    assert all(record.count("\n") < RECORD_LINES_MAX for record in found)
    found = records("head\n" + "\n".join("  " + "x" * 4000 for n in range(100)))
    assert all(len(record) <= RECORD_CHARS_MAX + 4100 for record in found)
    assert sum(record.count("x") for record in found) == 400_000


def test_an_open_record_is_given_after_a_quiet_while_only() -> None:
    joiner = RecordJoiner("stdout")
    joiner.feed(Line(10.0, "head"))
    assert joiner.flush(10.0 - OPEN_SECONDS) == []
    assert [record.text for record in joiner.flush(10.001)] == ["head"]
    assert joiner.flush() == []


@given(st.lists(st.binary(max_size=40)))
def test_however_bytes_are_cut_the_lines_are_the_same(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    splitter, at_once = LineSplitter(), LineSplitter()
    cut = [line.text for chunk in chunks for line in splitter.feed(chunk, 1.0)]
    cut += [line.text for line in splitter.flush()]
    assert cut == [line.text for line in at_once.feed(whole, 1.0)] + [line.text for line in at_once.flush()]


def test_a_long_line_is_cut_and_says_so() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * 10_000, 1.0) + splitter.feed(b"y" * 10_000 + b"\nnext\n", 2.0)
    assert [line.text[-30:] for line in lines] == [f"{'x' * 12} … ({20_000 - LINE_BYTES_MAX} more bytes)"[-30:], "next"]


def test_a_progress_bar_is_what_a_terminal_would_still_show() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r 1%\r 50%", 1.0) == []
    assert [line.text for line in splitter.flush(1.0 + PARTIAL_SECONDS)] == [" 50%"]
    assert [line.text for line in splitter.feed(b"\r100%\r\n", 3.0)] == ["100%"]


def test_what_is_shown_is_whole_lines_with_their_rank() -> None:
    prefixer = LinePrefixer(b"[r]: ")
    assert prefixer.feed(b"a\nb\npart", 1.0) == b"[r]: a\n[r]: b\n"
    assert prefixer.feed(b"ial\n", 1.0) == b"[r]: partial\n"
    assert prefixer.feed(b"50%", 2.0) == b""
    assert prefixer.flush(2.0) == b""
    assert prefixer.flush(2.1) == b"[r]: 50%\n"
    shown = prefixer.feed(b"z" * 1_000_000, 3.0)
    assert shown.count(b"z") == 1_000_000


@pytest.mark.parametrize(
    ("text", "type_", "message"),
    [
        (CHAINED, "torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("Traceback (most recent call last):\n  File \"a\"\nKeyboardInterrupt", "KeyboardInterrupt", ""),
        ('  File "a.py", line 1\n    x x\n      ^\nSyntaxError: invalid syntax', "SyntaxError", "invalid syntax"),
        ("Traceback (most recent call last):\n  F\nValueError: one\ntwo", "ValueError", "one\ntwo"),
    ],
)  # fmt: skip
def test_the_error_of_a_record_is_its_last_exception(text: str, type_: str, message: str) -> None:
    error = error_in(text)
    assert error is not None
    assert error.type == type_
    assert error.text.split("\nException raised")[0] == message


@pytest.mark.parametrize("text", ["", "step 3: loss 2.1", "Traceback (most recent call last):", "done", "a\nb"])
def test_text_without_an_exception_has_no_error(text: str) -> None:
    assert error_in(text) is None


def test_what_python_itself_prints_is_understood() -> None:
    program = (
        "try:\n  1 / 0\nexcept ZeroDivisionError:\n  raise ExceptionGroup('many', [ValueError('a'), TypeError('b')])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr
    (record,) = records(printed.rstrip("\n"))
    error = error_in(record)
    assert error is not None
    assert (error.type, error.text) == ("ExceptionGroup", "many (2 sub-exceptions)")


def texts(batches: Iterable[tuple[object, ...]]) -> list[str]:
    return [line.text for batch in batches for line in batch]  # type: ignore[attr-defined]


def test_a_flood_loses_its_oldest_and_counts_it() -> None:
    log = RankLog()
    for number in range(20_000):
        log.feed("stdout", f"line {number} {'x' * 40}\n".encode(), float(number))
    found = texts(log.take(30_000.0, final=True))
    assert found[-1].startswith("line 19999")
    assert log.dropped == 20_000 - (len(found) - 1)
    assert found[0] == f"transom: {log.dropped} lines of this rank were dropped here: too many at once"
    assert sum(len(text) for text in found) < RAW_BYTES_MAX
    assert log.last_lines[-1].startswith("line 19999")
    assert len(log.last_lines) == 20


def test_batches_fit_a_message_and_keep_the_order() -> None:
    log = RankLog()
    for number in range(60):
        log.feed("stderr", f"{number} ".encode() + bytes(3000) + b"\n", float(number))
        batches = log.take(float(number), final=True)
        assert all(sum(len(line.text) for line in batch) <= BATCH_CHARS_MAX for batch in batches)
    log.feed("stdout", b"late\n", 2.0)
    log.feed("stderr", b"early\n", 1.0)
    assert texts(log.take(3.0, final=True)) == ["early", "late"]


def test_the_last_traceback_on_stderr_is_the_error() -> None:
    log = RankLog()
    log.feed("stderr", CHAINED.encode() + b"\n", 1.0)
    log.feed("stdout", b"ValueError: printed, not raised\n", 1.0)
    log.take(2.0, final=True)
    assert log.error is not None
    assert log.error.type == "torch.OutOfMemoryError"
