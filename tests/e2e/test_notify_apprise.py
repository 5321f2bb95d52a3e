"""Notices through apprise to a real HTTP server, by apprise's own json:// addresses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ingest.clock import SystemClock
from pipelines.__main__ import app
from pipelines.notify.apprise_sender import AppriseSender, apprise_senders
from pipelines.notify.mailbox import Mailbox
from pipelines.notify.notice import Notice, Subject, compose
from pipelines.notify.sending import NotAnAddress, Undelivered
from recovery.action import Incident
from tests.receiver_lab import receiver, wait_for

# apprise looks for a module that Python 3.13 has no more, and carries on without it.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
SECRET = "T0K3N-0123456789"


def notice(state: str = "held") -> Notice:
    now = SystemClock().now()
    told = Incident(incident_id="v", job="llm", attempt=1, at=now, state=state, cause="", sequence=1)
    made = compose(told, Subject("rank_lost", ("rank 1 on n0",), "", now), "http://127.0.0.1:8501")
    assert made is not None
    return made


def json_address(url: str) -> str:
    return url.replace("http://", "json://").replace("secret-path", SECRET)


def urls_file(folder: Path, *urls: str, mode: int = 0o600) -> Path:
    file = folder / "urls"
    file.write_text("# pagers\n\n" + "\n".join(urls) + "\n", encoding="utf-8")
    file.chmod(mode)
    return file


def test_title_text_and_link_arrive_with_the_right_kind(tmp_path: Path) -> None:
    with receiver() as lab:
        (sender,) = apprise_senders(urls_file(tmp_path, json_address(lab.url)))
        sender.send(notice())
        sender.send(notice("resolved"))
    told = [json.loads(body) for body in lab.bodies]
    assert told[0]["title"] == "llm: rank_lost (rank 1 on n0): held, a person's turn"
    assert "http://127.0.0.1:8501/incident?id=v" in told[0]["message"]
    assert [one["type"] for one in told] == ["failure", "success"]


def test_each_address_is_a_receiver_of_its_own_and_one_that_is_broken_gets_no_other_told_twice(tmp_path: Path) -> None:
    said: list[str] = []
    with receiver(500) as broken, receiver() as well:
        file = urls_file(tmp_path, json_address(broken.url), json_address(well.url))
        boxes = [Mailbox(one, said.append, tries_max=2, wait_seconds=0.01) for one in apprise_senders(file)]
        for box in boxes:
            box.put(notice())
        wait_for(lambda: len(broken.bodies) == 2 and well.bodies and said)
        for box in boxes:
            box.close(30.0)
    assert len(well.bodies) == 1
    assert said == ["notify: apprise 1 did not take it; v/1 is not told there"]


def test_a_receiver_that_says_nothing_holds_nobody_up(tmp_path: Path) -> None:
    with receiver(0) as lab:
        (sender,) = apprise_senders(urls_file(tmp_path, json_address(lab.url)))
        box = Mailbox(sender, lambda text: None)
        box.put(notice())
        box.put(notice())
        wait_for(lambda: lab.bodies)
        lab.release.set()
        box.close(30.0)


def test_what_others_can_read_or_apprise_does_not_know_is_refused_without_repeating_it(tmp_path: Path) -> None:
    with pytest.raises(NotAnAddress, match="others can read"):
        apprise_senders(urls_file(tmp_path, f"json://host/{SECRET}", mode=0o640))
    with pytest.raises(NotAnAddress, match=r"address 2 in notify\.apprise\.urls_file") as refused:
        apprise_senders(urls_file(tmp_path, "json://host/", f"nosuch://{SECRET}"))
    assert SECRET not in str(refused.value)
    with pytest.raises(NotAnAddress, match="has 0 addresses"):
        apprise_senders(urls_file(tmp_path))


def test_nothing_is_logged_of_an_address(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with receiver(403) as lab, pytest.raises(Undelivered, match="did not take it"):
        AppriseSender(json_address(lab.url), 1).send(notice())
    assert not caplog.records
    assert SECRET not in "".join(capfd.readouterr())


def test_the_test_command_tries_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with receiver() as lab:
        file = urls_file(tmp_path, json_address(lab.url))
        (tmp_path / "transom.toml").write_text(f'[notify.apprise]\nurls_file = "{file}"\n', encoding="utf-8")
        result = CliRunner().invoke(app, ["notify", "test"])
    assert result.output.splitlines() == ["apprise 1: took it"]
    assert len(lab.bodies) == 1
