"""`transom diagnose` reads files, folders and streams, says what it could not read, and never ends in a traceback."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pipelines.__main__ import app
from pipelines.diagnose import CannotDiagnose, gather

OOM = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 336.00 MiB.\n"


def run(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)], input=stdin)


def test_a_folder_is_read_with_all_below_it_and_the_answer_names_file_and_line(tmp_path: Path) -> None:
    logs = tmp_path / "attempt_0" / "2"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text("starting\n" + OOM)
    (logs / "stdout.log").write_text("step 1 | loss 3.0\n")
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "cuda_oom" in result.stdout
    assert f"{logs / 'stderr.log'}:2" in result.stdout
    assert "2 files, 3 lines" in result.stdout


def test_gz_is_read_and_what_is_no_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank_2.log.gz").write_bytes(gzip.compress(OOM.encode()))
    (tmp_path / "torn.log.gz").write_bytes(gzip.compress(OOM.encode() * 2000)[:-40])
    (tmp_path / "core.1").write_bytes(bytes(range(256)) * 64)
    (tmp_path / "model.pt").write_bytes(b"PK")
    (tmp_path / "packed.log.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00")
    told = tmp_path / "told.json"
    result = run(tmp_path, "--json", told)
    assert result.exit_code == 0
    tree = json.loads(told.read_text())
    assert tree["diagnosis"]["symptom"] == "cuda_oom"
    named = {Path(note["source"]).name for note in tree["not_read"]["first"]}
    assert {"torn.log.gz", "core.1", "model.pt", "packed.log.zst"} == named


def test_a_log_that_begins_with_nuls_is_still_a_log(tmp_path: Path) -> None:
    (tmp_path / "cut.log").write_bytes(b"\0" * 50_000 + OOM.encode())
    (tmp_path / "broken.log").write_bytes(b"caf\xe9 \xff\xfe fine\n" * 20)
    result = run(tmp_path)
    assert "cuda_oom" in result.stdout
    assert "not read" not in result.stdout


def test_standard_input_is_read(tmp_path: Path) -> None:
    result = run("-", stdin=OOM.encode())
    assert result.exit_code == 0
    assert "standard input:1" in result.stdout


def test_json_goes_to_standard_output_alone(tmp_path: Path) -> None:
    assert json.loads(run("-", "--json", "-", stdin=OOM.encode()).stdout)["diagnosis"]["rank"] == 2


def test_an_empty_folder_and_an_empty_file_are_answered_in_a_sentence(tmp_path: Path) -> None:
    assert "Nothing was read: there is no log in what was given." in run(tmp_path).stdout
    (tmp_path / "empty.log").touch()
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "No cause found in 0 lines of one source." in result.stdout
    (tmp_path / "empty.log").write_text("one\n")
    assert "1 file, 1 line, 4 bytes" in run(tmp_path).stdout


def test_a_path_that_is_not_there_is_bad_use(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing")
    assert result.exit_code == 2
    assert "there is no" in result.stderr
    assert "Traceback" not in result.output


def test_an_unreadable_file_is_named_and_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log").write_text("secret")
    (tmp_path / "b.log").write_text(OOM)
    opened = Path.open

    def refuse(path: Path, *arguments: str, **named: str) -> object:
        if path.name == "a.log":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", refuse)
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "cuda_oom" in result.stdout
    assert "a.log (cannot be read to its end: Permission denied)" in result.stdout


def test_each_file_is_read_once_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        (tmp_path / f"rank_{number}.log").write_text("x\n")
    (tmp_path / "latest").symlink_to(tmp_path / "rank_10.log")
    (tmp_path / "around").symlink_to(tmp_path)
    reading = gather([str(tmp_path), str(tmp_path / "rank_1.log")])
    assert [path.name for path in reading.files][-2:] == ["rank_1.log", "rank_2.log"]
    assert len(reading.files) == 3


def test_rules_of_ones_own_come_first_and_a_broken_one_is_bad_use(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "site.toml").write_text(
        '[[rule]]\nid = "our_mount"\nclass = "storage_error"\nrole = "root"\nadvice = "restart_exclude_node"\n'
        'severity = "error"\npattern = "fabricfs: lost the mount"\ngate = ["lost the mount"]\nsource = "us"\n'
        'must_match = ["fabricfs: lost the mount"]\nmust_not_match = ["fabricfs: mounted"]\n'
    )
    result = run("-", "--rules", rules, stdin=b"fabricfs: lost the mount of /data\n")
    assert "our_mount" in result.stdout
    assert "restart without the node" in result.stdout
    (rules / "site.toml").write_text("[[rule]]\nid = 3\n")
    result = run("-", "--rules", rules, stdin=b"")
    assert result.exit_code == 2
    assert "the log rules cannot be used" in result.stderr


def test_a_path_without_a_name_is_refused() -> None:
    with pytest.raises(CannotDiagnose):
        gather(["/nonexistent/x"])


def test_what_powershell_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / "little.log").write_bytes(("\ufeff" + "starting\r\n" + OOM).encode("utf-16-le"))
    (tmp_path / "big.log").write_bytes(("\ufeff" + "starting\r\n").encode("utf-16-be"))
    result = run(tmp_path)
    assert "cuda_oom" in result.stdout
    assert f"{tmp_path / 'little.log'}:2" in result.stdout
    assert "2 files, 3 lines" in result.stdout


def test_packed_bytes_on_standard_input_are_unpacked_and_binary_ones_are_named() -> None:
    assert "standard input:1" in run("-", stdin=gzip.compress(OOM.encode())).stdout
    assert "standard input (binary)" in run("-", stdin=bytes(range(256)) * 64).stdout
    torn = run("-", stdin=gzip.compress(OOM.encode() * 2000)[:-40])
    assert torn.exit_code == 0
    assert "standard input (cannot be read to its end" in torn.stdout


def test_a_closed_standard_input_stops_nobody_who_does_not_need_it(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(OOM)
    command = [sys.executable, "-m", "pipelines", "diagnose"]
    shell = ["/bin/sh", "-c", '"$@" <&-', "sh"]
    done = subprocess.run([*shell, *command, str(tmp_path), "-"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cuda_oom" in done.stdout
    assert "not read: standard input (closed)" in done.stdout


def test_a_pipe_that_is_given_is_read_and_one_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a file" in run(tmp_path).stdout
    writer = threading.Thread(target=pipe.write_text, args=(OOM,), daemon=True)
    writer.start()
    assert "cuda_oom" in run(pipe).stdout
    writer.join()


def test_a_link_to_a_folder_elsewhere_is_named_and_one_that_goes_round_is_not(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rank_2.log").write_text(OOM)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "latest").symlink_to(tmp_path / "elsewhere")
    (logs / "around").symlink_to(logs)
    (logs / "itself").symlink_to("itself")
    reading = gather([str(logs)])
    assert reading.files == []
    told = {Path(note.source).name: note.why for note in reading.notes}
    assert set(told) == {"latest", "itself"}
    assert told["latest"] == "a link to a folder elsewhere; give that folder too"


def test_a_folder_that_may_be_listed_but_not_entered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log").write_text(OOM)
    (tmp_path / "hidden.log").write_text("x")
    for question in ("is_dir", "is_symlink", "stat"):
        asked = getattr(Path, question)

        def refuse(path: Path, *arguments: object, asked=asked, **named: object) -> object:
            if path.name == "hidden.log":
                raise PermissionError(13, "Permission denied", str(path))
            return asked(path, *arguments, **named)

        monkeypatch.setattr(Path, question, refuse)
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "cuda_oom" in result.stdout
    assert "hidden.log (Permission denied)" in result.stdout


def test_an_answer_that_cannot_be_written_is_bad_use(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(OOM)
    result = run(tmp_path / "a.log", "--json", tmp_path / "nowhere" / "told.json")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
