"""What torch leaves in a rank's error file is believed as far as it has the form, and never waited for."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from recovery.launcher.error_file import ERROR_FILE_BYTES_MAX, error_file, make_folder, read_error


def torch_says(message: object) -> bytes:
    return json.dumps({"message": message}).encode()


def test_the_exception_and_its_stack_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    extra = {"py_callstack": "Traceback (most recent call last):\n  …", "timestamp": "1790000000"}
    path.write_bytes(torch_says({"message": "ValueError: bad: label", "extraInfo": extra}))
    found = read_error(path)
    assert found is not None
    assert (found.type, found.text) == ("ValueError", "bad: label")
    assert found.traceback.startswith("Traceback")


def test_what_torch_itself_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    ErrorHandler().record_exception(ValueError("bad label"))
    found = read_error(path)
    assert found is not None
    assert (found.type, found.text) == ("ValueError", "bad label")


@pytest.mark.parametrize("message", ["torch.OutOfMemoryError: CUDA out of memory", "died without a type"])
def test_an_older_form_is_read_too(tmp_path: Path, message: str) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(torch_says(message))
    found = read_error(path)
    assert found is not None
    assert message.endswith(found.text)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\xff", torch_says(7), torch_says({"message": None}), b"[" * 9999]
)
def test_anything_else_is_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(content)
    assert read_error(path) is None
    assert read_error(tmp_path / "no such file") is None


def test_neither_a_pipe_nor_a_link_nor_a_gigabyte_holds_the_launcher_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_error(tmp_path / "pipe") is None
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert read_error(tmp_path / "link") is None
    large = tmp_path / "large"
    large.write_bytes(torch_says("E: " + "x" * (2 * ERROR_FILE_BYTES_MAX)))
    assert read_error(large) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(("message", "extraInfo", "py_callstack")), inner, max_size=2)
        ),
        max_leaves=6,
    )
)
def test_whatever_lies_there_is_read_without_a_fault(tmp_path_factory: pytest.TempPathFactory, said: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(said))
    read_error(path)


def test_each_attempt_begins_without_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    path = error_file(tmp_path / "jobs" / "job" / "nodes" / "n0.json", 2, 5)
    assert path == tmp_path / "jobs" / "job" / "errors" / "attempt-2" / "rank-5.json"
    make_folder(path)
    path.write_bytes(torch_says("ValueError: old"))
    make_folder(path)
    assert read_error(path) is None
    assert path.parent.stat().st_mode & 0o777 == 0o700
