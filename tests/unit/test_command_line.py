"""What the command line prints is what was said, and a service that ends is told of in its own words."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from ingest.clock import SystemClock
from pipelines import replay_source
from pipelines.children import ChildFailed, Children
from pipelines.cli.recovery import explain
from pipelines.recording import RecordingWriter
from pipelines.replay_command import Wanted, run_replay
from pipelines.replayed import Replayed
from pipelines.settings import Settings
from tests.ledger_messages import JOB, verdict

SUMMARY = "Rank 0 said: [rank0]: Error [/home/me/train.py] in model[layer]"


def test_brackets_of_a_log_line_are_shown_by_replay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RecordingWriter(tmp_path, JOB, now=1000.0):
        pass
    monkeypatch.setattr(replay_source, "replay_messages", lambda *_: Replayed([verdict(summary=SUMMARY)], [1.0]))
    text = StringIO()
    wanted = Wanted(runs=(tmp_path,), settings=(("", Settings()),))
    run_replay(wanted, Console(file=text, width=200), Console(file=StringIO()), SystemClock())
    assert SUMMARY in text.getvalue()


def test_brackets_of_a_log_line_are_shown_by_explain_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = SimpleNamespace(
        summary=SUMMARY, fault_class="user_error", severity="error", attempt=1, job="j", culprits=(), victims=0
    )
    evidence = SimpleNamespace(text=SUMMARY, peers_median=None)
    story = SimpleNamespace(
        incident=view, verdicts=[SimpleNamespace(evidence=(evidence,))], actions=(), receipts=(), transitions=()
    )

    class Client:
        def __enter__(self) -> SimpleNamespace:
            return SimpleNamespace(incident=lambda _: story)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("pipelines.cli.recovery.client_of", lambda *_: Client())
    explain("id", state_dir=tmp_path)
    assert capsys.readouterr().out.count(SUMMARY) == 2


def told_by_the_end_of(folder: Path, program: str) -> str:
    clock = SystemClock()
    with Children(folder, clock) as children:
        (folder / "service.log").write_text("transom: an old trouble of an earlier life\n")
        child = children.start("service", [sys.executable, "-u", "-c", program])
        child.process.wait()
        with pytest.raises(ChildFailed) as caught:
            children.check()
    return str(caught.value)


def test_a_child_that_ends_by_a_known_error_is_told_of_in_one_sentence(tmp_path: Path) -> None:
    program = "import sys; print('starting'); sys.exit('transom: the port is taken; choose another')"
    told = told_by_the_end_of(tmp_path, program)
    assert told == "service ended by itself (exit code 1): the port is taken; choose another"


def test_a_child_that_ends_in_another_way_is_shown_with_the_end_of_its_own_log(tmp_path: Path) -> None:
    told = told_by_the_end_of(tmp_path, "raise KeyError('x')")
    assert told.endswith("KeyError: 'x'")
    assert str(tmp_path / "service.log") in told
    assert "an old trouble" not in told
