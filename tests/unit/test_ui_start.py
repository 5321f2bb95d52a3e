"""How the console is started: for whom it listens, what Streamlit is told, where tokens go, and what is refused."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import console
from pipelines.console import ConsoleRefused, child_environ, is_loopback, plan_console, streamlit_flags
from pipelines.ledger_address import TokenRefused, ledger_address
from pipelines.places import Places
from pipelines.settings import ConsoleSettings, RecordSettings, Settings, SettingsError

TOKEN = "0123456789abcdef"


def arguments(**given: object) -> argparse.Namespace:
    base = {"ledger": "/s", "host": "127.0.0.1", "port": 1, "ledger_token_file": None, "login_token_file": None}
    base |= dict.fromkeys(("viewer_token_file", "finished", "rules"))
    return argparse.Namespace(**base | given)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return file


def test_any_free_port_is_found_and_stands_in_command_and_address(tmp_path: Path) -> None:
    plan = plan_console(ConsoleSettings(port=0), tmp_path / "record.sock")
    assert plan.port > 0
    assert plan.url == f"http://127.0.0.1:{plan.port}"
    assert str(plan.port) in plan.command


def test_command_and_address_agree_also_where_any_free_port_was_asked_for(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path / "state", console=ConsoleSettings(port=0))
    places = Places.of(settings)
    plan = console.console_plan(settings, places)
    assert plan.url.rpartition(":")[2] in plan.command


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConsoleRefused, match="choose another port"):
            plan_console(ConsoleSettings(port=port), tmp_path)


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.5", False),
     ("gpu-7", False)],
)  # fmt: skip
def test_only_loopback_addresses_are_this_machines_alone(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


def test_other_addresses_need_the_flag_and_a_token(tmp_path: Path, token_file: Path) -> None:
    wide = ConsoleSettings(host="0.0.0.0", port=0)
    with pytest.raises(ConsoleRefused, match="--open-to-others"):
        plan_console(wide, tmp_path, login_token_file=token_file)
    with pytest.raises(ConsoleRefused, match="--token-file"):
        plan_console(wide, tmp_path, open_to_others=True)
    plan = plan_console(wide, tmp_path, open_to_others=True, login_token_file=token_file)
    assert str(token_file) in plan.command
    assert TOKEN not in " ".join(plan.command), "a command line can be read by everybody on the machine"


def test_a_short_or_missing_token_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("secret")
    wide = ConsoleSettings(host="0.0.0.0", port=0)
    with pytest.raises(TokenRefused, match="at least 16"):
        plan_console(wide, tmp_path, open_to_others=True, login_token_file=short)
    with pytest.raises(TokenRefused, match="cannot be read"):
        plan_console(wide, tmp_path, open_to_others=True, login_token_file=tmp_path / "none")


def test_the_child_is_told_the_ledgers_place_and_nothing_left_over(token_file: Path) -> None:
    stale = {"TRANSOM_API_URL": "http://old", "TRANSOM_CONSOLE_TOKEN": "old", "PATH": "/bin"}
    environ = child_environ(stale, arguments(ledger="/run/record.sock"))
    assert environ["TRANSOM_API_SOCKET"] == "/run/record.sock"
    assert (environ["TRANSOM_API_URL"], environ["TRANSOM_CONSOLE_TOKEN"]) == ("", "")
    remote = child_environ({}, arguments(ledger="http://10.0.0.5:8787", ledger_token_file=token_file))
    assert remote["TRANSOM_API_URL"] == "http://10.0.0.5:8787"
    assert remote["TRANSOM_API_TOKEN"] == TOKEN


def test_the_started_process_itself_refuses_an_open_address_without_a_token() -> None:
    with pytest.raises(ConsoleRefused, match="login token"):
        console.become_streamlit(["--ledger", "/s", "--host", "0.0.0.0", "--port", "1"])


def test_streamlit_is_told_to_be_quiet_local_and_private() -> None:
    flags = streamlit_flags("127.0.0.1", 8501)
    for flag in (
        "--server.address=127.0.0.1", "--server.headless=true", "--browser.gatherUsageStats=false",
        "--server.fileWatcherType=none", "--client.showErrorDetails=none", "--server.enableAgentApi=false",
    ):  # fmt: skip
        assert flag in flags


def test_every_flag_is_one_that_streamlit_knows() -> None:
    from streamlit import config

    names = [flag.removeprefix("--").partition("=")[0] for flag in streamlit_flags("127.0.0.1", 1)[1:]]
    known = config.get_config_options()
    assert [name for name in names if name not in known] == []


def test_without_streamlit_the_console_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "has_streamlit", lambda: False)
    with pytest.raises(ConsoleRefused, match=r"transom\[ui\]"):
        plan_console(ConsoleSettings(port=0), tmp_path)


def test_starting_the_console_does_not_load_streamlit_into_the_command_line() -> None:
    code = "import sys, pipelines.console; sys.exit('streamlit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_ledger_is_read_over_its_socket_here_and_over_tcp_with_a_token_from_another_machine(
    tmp_path: Path, token_file: Path
) -> None:
    record = RecordSettings(host="10.0.0.5", port=9000, token_file=token_file)
    settings = Settings(state_dir=tmp_path / "state", record=record, console=ConsoleSettings(port=0))
    places = Places.of(settings)
    assert ledger_address(settings, places) == ("http://10.0.0.5:9000", token_file)
    command = console.console_plan(settings, places).command
    assert command[command.index("--ledger") + 1] == "http://10.0.0.5:9000"
    assert command[command.index("--ledger-token-file") + 1] == str(token_file)
    places.api_socket.touch()
    assert ledger_address(settings, places) == (str(places.api_socket), None)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8787"), ("::", "http://[::1]:8787"), ("fd00::1", "http://[fd00::1]:8787"),
     ("gpu-7", "http://gpu-7:8787")],
)  # fmt: skip
def test_an_address_that_record_listens_on_becomes_one_to_connect_to(
    tmp_path: Path, token_file: Path, host: str, url: str
) -> None:
    settings = Settings(state_dir=tmp_path / "state", record=RecordSettings(host=host, token_file=token_file))
    assert ledger_address(settings, Places.of(settings)).address == url


def test_a_ledger_on_tcp_without_a_token_is_refused(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path / "state", record=RecordSettings(host="10.0.0.5"))
    with pytest.raises(SettingsError, match=r"needs record\.token_file"):
        ledger_address(settings, Places.of(settings))


def test_a_viewers_token_alone_is_refused_and_beside_the_operators_it_stands_in_no_command_line(
    tmp_path: Path, token_file: Path
) -> None:
    viewer = tmp_path / "viewer"
    viewer.write_text("viewer-0123456789abcdef")
    with pytest.raises(ConsoleRefused, match="operator's"):
        plan_console(ConsoleSettings(port=0), tmp_path, viewer_token_file=viewer)
    plan = plan_console(ConsoleSettings(port=0), tmp_path, login_token_file=token_file, viewer_token_file=viewer)
    assert str(viewer) in plan.command
    assert "viewer-0123456789abcdef" not in " ".join(plan.command)
    environ = child_environ({}, arguments(login_token_file=token_file, viewer_token_file=viewer))
    assert environ["TRANSOM_CONSOLE_VIEWER_TOKEN"] == "viewer-0123456789abcdef"


def test_a_finished_ledgers_folder_reaches_the_console(tmp_path: Path) -> None:
    plan = plan_console(ConsoleSettings(port=0), "", finished=tmp_path, rules=tmp_path / "rules")
    assert plan.command[plan.command.index("--finished") + 1] == str(tmp_path)
    environ = child_environ({}, arguments(finished=tmp_path, rules=tmp_path / "rules"))
    assert environ["TRANSOM_LEDGER_FOLDER"] == str(tmp_path)
    assert environ["TRANSOM_RULES_FOLDER"] == str(tmp_path / "rules")
