"""Notifications to real receivers: an HTTP server that is down, slow or broken, a program, a real Alertmanager."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from ingest.clock import ManualClock, SystemClock
from ingest.memory_bus import MemoryBus
from pipelines.__main__ import app
from pipelines.notify.alertmanager import Alertmanager
from pipelines.notify.mailbox import Mailbox
from pipelines.notify.notice import Notice, Subject, compose
from pipelines.notify.notifications import Heartbeat, Notifications
from pipelines.notify.sending import Command, NotAnAddress, Refused, Undelivered, Webhook, signature
from pipelines.places import Places
from pipelines.recover import Recover
from pipelines.settings import NotifySettings, Settings
from recovery.action import Incident
from tests.machine import program
from tests.receiver_lab import receiver, wait_for
from tests.recovery_world import World, verdict

SECRET = "0123456789abcdef0123456789abcdef"


def notice(state: str = "held", incident_id: str = "v", sequence: int = 1) -> Notice:
    now = SystemClock().now()
    told = Incident(
        incident_id=incident_id, job="llm", attempt=1, at=now, state=state, cause="", sequence=sequence
    )  # fmt: skip
    made = compose(told, Subject("rank_lost", ("rank 1 on n0",), "", now), "http://127.0.0.1:8501")
    assert made is not None
    return made


def secret_file(folder: Path) -> Path:
    file = folder / "secret"
    file.write_text(SECRET + "\n", encoding="utf-8")
    return file


def test_a_webhook_gets_json_with_a_token_and_a_signature(tmp_path: Path) -> None:
    with receiver() as lab:
        Webhook(lab.url, secret_file(tmp_path), secret_file(tmp_path)).send(notice())
    assert json.loads(lab.bodies[0])["incident_id"] == "v"
    assert lab.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert lab.headers[0]["x-transom-signature"] == signature(SECRET.encode(), lab.bodies[0])


def test_a_webhook_that_leads_elsewhere_is_not_followed_with_the_token(tmp_path: Path) -> None:
    with receiver(307, 200) as lab, pytest.raises(Refused, match="answered 307"):
        Webhook(lab.url, secret_file(tmp_path)).send(notice())
    assert len(lab.bodies) == 1


def test_an_address_that_is_none_is_refused_without_repeating_it() -> None:
    with pytest.raises(NotAnAddress) as refused:
        Webhook("hooks.example/T0K3N")
    assert "T0K3N" not in str(refused.value)


def test_a_receiver_that_comes_back_gets_what_waited_in_order() -> None:
    said: list[str] = []
    with receiver(500, 503, 429, 200) as lab:
        box = Mailbox(Webhook(lab.url), said.append, wait_seconds=0.01)
        box.put(notice(incident_id="a"))
        box.put(notice(incident_id="b"))
        wait_for(lambda: len(lab.bodies) == 5)
        box.close(10.0)
    assert [json.loads(body)["incident_id"] for body in lab.bodies] == ["a", "a", "a", "a", "b"]
    assert not said


def test_what_cannot_be_delivered_is_counted_said_without_the_address_and_told_with_the_next() -> None:
    said: list[str] = []
    with receiver(500, 500, 404, 200) as lab:
        box = Mailbox(Webhook(lab.url), said.append, tries_max=2, wait_seconds=0.01)
        for name in "abc":
            box.put(notice(incident_id=name))
        wait_for(lambda: len(lab.bodies) == 4)
        box.close(10.0)
    assert json.loads(lab.bodies[-1])["lost_before"] == 2
    assert box.lost == 0
    assert said == [
        "notify: webhook answered 500; a/1 is not told there",
        "notify: webhook answered 404; b/1 is not told there",
    ]


def test_a_full_queue_drops_the_oldest_and_never_waits() -> None:
    with receiver(0) as lab:
        box = Mailbox(Webhook(lab.url), lambda text: None, notices_max=3)
        box.put(notice(incident_id="first"))
        wait_for(lambda: lab.bodies)  # it is out, and nobody answers
        for number in range(10):
            box.put(notice(incident_id=str(number)))
        assert box.lost == 7
        lab.answers = [200]
        lab.release.set()
        wait_for(lambda: len(lab.bodies) == 4)
        box.close(10.0)
    assert [json.loads(body)["incident_id"] for body in lab.bodies] == ["first", "7", "8", "9"]


def test_a_command_gets_json_on_its_input_and_is_ended_when_it_hangs(tmp_path: Path) -> None:
    copy = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_bytes(sys.stdin.buffer.read())"
    Command([sys.executable, "-c", copy, str(tmp_path / "got")]).send(notice())
    assert json.loads((tmp_path / "got").read_bytes())["state"] == "held"
    with pytest.raises(Undelivered, match="ended with 3"):
        Command([sys.executable, "-c", "raise SystemExit(3)"]).send(notice())
    with pytest.raises(Undelivered, match="has not ended"):
        Command(["sleep", "1000"], seconds_max=0.1).send(notice())
    with pytest.raises(Refused, match="cannot be started"):
        Command([str(tmp_path / "none")]).send(notice())


@pytest.mark.parametrize("fault", [None, 0, 500])
def test_23_a_receiver_that_is_down_or_slow_or_broken_holds_no_recovery_up(tmp_path: Path, fault: int | None) -> None:
    with receiver(fault or 0) as lab:
        url = lab.url if fault is not None else f"http://127.0.0.1:{free_port()}/"
        world = World(tmp_path)
        settings = Settings(notify=NotifySettings(webhook_url=url))
        people = Notifications(settings, world.store, SystemClock(), lambda text: None)
        people.begin()
        world.send(verdict("rank_lost"))
        for _ in range(40):
            world.round()
            world.make_steps()
            people.hear(world.published)
        assert world.attempts() == [1, 2]
        assert world.states() == {"v": "resolved"}
        if fault is not None:
            wait_for(lambda: lab.bodies)
            first = json.loads(lab.bodies[0])
            assert (first["state"], first["culprits"]) == ("stopping", ["rank 1 on n0"])
        lab.release.set()
        people.close()


def test_the_heartbeat_stops_while_recovery_sees_nothing() -> None:
    sees, asked, said = [True], list[bool](), list[str]()

    def healthy() -> bool:
        asked.append(sees[0])
        return sees[0]

    with receiver() as lab:
        beat = Heartbeat(lab.url, 0.02, healthy, said.append)
        beat.start()
        wait_for(lambda: len(lab.bodies) >= 2)
        sees[0] = False
        wait_for(lambda: said)
        seen = len(lab.bodies)
        wait_for(lambda: asked[-5:] == [False] * 5)
        assert len(lab.bodies) == seen
        sees[0] = True
        wait_for(lambda: len(lab.bodies) > seen)
        beat.close()


def test_the_test_command_says_who_took_it_and_who_did_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Nobody is told" in CliRunner().invoke(app, ["notify", "test"]).output
    with receiver(200) as lab:
        (tmp_path / "transom.toml").write_text(
            f'[notify]\nwebhook_url = "{lab.url}"\ncommand = ["false"]\n', encoding="utf-8"
        )
        result = CliRunner().invoke(app, ["notify", "test"])
    assert result.output.splitlines() == ["webhook: took it", "command: ended with 1"]
    assert result.exit_code == 1


@contextmanager
def real_alertmanager(folder: Path, target: str) -> Iterator[str]:
    """A real Alertmanager on loopback, alone, that tells `target` at once."""
    binary = program("prometheus-alertmanager")
    (folder / "config.yml").write_text(
        "route: {receiver: us, group_by: ['...'], group_wait: 0s, group_interval: 1s}\n"
        f"receivers: [{{name: us, webhook_configs: [{{url: '{target}'}}]}}]\n",
        encoding="utf-8",
    )
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                binary, f"--config.file={folder / 'config.yml'}", f"--storage.path={folder / 'store'}",
                f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: process.poll() is not None or answers(f"{url}/-/ready"))
            assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
            yield url
        finally:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def open_alerts(url: str) -> list[Any]:
    with urllib.request.urlopen(f"{url}/api/v2/alerts", timeout=30.0) as answer:
        return sorted(json.load(answer), key=lambda alert: str(alert["labels"]))


def test_a_real_alertmanager_has_one_alert_for_an_incident_until_it_is_resolved(tmp_path: Path) -> None:
    said: list[str] = []
    with receiver() as lab, real_alertmanager(tmp_path, lab.url) as url:
        board = Alertmanager(url, None, "info", 0.2, SystemClock(), lambda: True, said.append)
        board.start()
        board.show(notice("stopping"))
        wait_for(lambda: severities(url) == ["info", "none"])
        board.show(notice("held", sequence=2))
        wait_for(lambda: severities(url) == ["none", "page"])
        (alert,) = [one for one in open_alerts(url) if one["labels"]["severity"] == "page"]
        assert alert["labels"]["training_job"] == "llm"
        assert alert["generatorURL"] == "http://127.0.0.1:8501/incident?id=v"
        board.show(notice("resolved", sequence=3))
        wait_for(lambda: severities(url) == ["none"])
        wait_for(lambda: ("page", "resolved") in told_on(lab.bodies))
        board.close(10.0)
    assert ("page", "firing") in told_on(lab.bodies)
    assert not said


def test_alerts_of_a_recovery_that_is_gone_and_its_watch_lapse_by_themselves(tmp_path: Path) -> None:
    with receiver() as lab, real_alertmanager(tmp_path, lab.url) as url:
        board = Alertmanager(url, None, "info", 1.0, SystemClock(), lambda: True, lambda text: None)
        board.show(notice("held"))
        board.send()
        wait_for(lambda: ("none", "firing") in told_on(lab.bodies))
        wait_for(lambda: severities(url) == [])
        wait_for(lambda: ("none", "resolved") in told_on(lab.bodies))


def severities(url: str) -> list[str]:
    return sorted(alert["labels"]["severity"] for alert in open_alerts(url))


def told_on(bodies: list[bytes]) -> set[tuple[str, str]]:
    """What Alertmanager has told its own receiver: severity and status."""
    alerts = [alert for body in bodies for alert in json.loads(body)["alerts"]]
    return {(alert["labels"]["severity"], alert["status"]) for alert in alerts}


def test_recover_tells_what_it_publishes_and_is_not_healthy_while_it_is_blind(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    bus = MemoryBus(clock=clock)
    bus.create_topics(1)
    with receiver() as lab:
        settings = Settings(state_dir=tmp_path, notify=NotifySettings(webhook_url=lab.url))
        recover = Recover(settings, Places(tmp_path, tmp_path), bus, clock, Random(0))
        people, store = recover._people, recover._store
        assert isinstance(people, Notifications)
        people.turn(sees_bus=True)
        assert people._pulse.healthy()
        with store.transaction():
            row = store.open_incident("v", "llm", 1, clock.now())
            store.move(row, "blind", "its backend does not answer", clock.now())
        recover._publish(bus.producer())
        wait_for(lambda: lab.bodies)
        clock.advance(31.0)
        people.turn(sees_bus=True)
        assert not people._pulse.healthy()
        people.close()
        recover._proving.close()
        store.close()
    assert [json.loads(body)["state"] for body in lab.bodies] == ["blind"]
