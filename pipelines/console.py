"""Starts the Streamlit console as its own process: for this machine only, unless a token says otherwise."""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ingest.clock import Clock
from pipelines.errors import StatedError
from pipelines.extras import is_there, missing_extra
from pipelines.ledger_address import ledger_address, read_token
from pipelines.own_process import go_with_parent, step_back
from pipelines.places import Places
from pipelines.settings import ConsoleSettings, Settings

UI_FOLDER = Path(__file__).resolve().parent.parent / "ui"
APP = UI_FOLDER / "entry" / "app.py"
THEME = UI_FOLDER / "config" / "theme.toml"
CONSOLE_NICE = 5  # ranks come first, but a person waits: at 19 a busy machine never draws a page
READY_SECONDS_MAX = 60.0
POLL_SECONDS = 0.1


class ConsoleRefused(StatedError):
    """The console cannot be started like this; the text is one sentence that says what to do."""


class PortTaken(ConsoleRefused):
    """Its port cannot be had."""


@dataclass(frozen=True, slots=True)
class ConsolePlan:
    """How to start the console; `command` is complete in itself, no variable is needed for it."""

    url: str
    host: str
    port: int
    command: tuple[str, ...]


def plan_console(
    settings: ConsoleSettings,
    ledger: str | Path,
    *,
    ledger_token_file: Path | None = None,
    open_to_others: bool = False,
    login_token_file: Path | None = None,
    viewer_token_file: Path | None = None,
    finished: Path | None = None,
    rules: Path | None = None,
) -> ConsolePlan:
    """A console over the ledger at this address: a Unix socket's path, or an http:// URL with its token.

    Or over the finished ledger in the folder `finished`. Whoever logs in with the viewer's token sees, and commands
    nothing. `rules` is the folder of the user's log rules.

    Raises ConsoleRefused: Streamlit is missing, the port is taken, or the address is not this machine's alone
    and `open_to_others` and a file with a login token were not both given.
    """
    if not has_streamlit():
        raise ConsoleRefused(str(missing_extra("ui", "the console (Streamlit)")))
    if not is_loopback(settings.host):
        if not open_to_others:
            raise ConsoleRefused(
                f"{settings.host} is not this machine's own address; whoever reaches it could approve restarts: "
                "use 127.0.0.1 and a tunnel, or pass --open-to-others with --token-file"
            )
        if login_token_file is None:
            raise ConsoleRefused(f"a console on {settings.host} needs a login token: pass --token-file")
    if viewer_token_file is not None and login_token_file is None:
        raise ConsoleRefused("a viewer's token needs an operator's beside it: pass --token-file too")
    for file in (login_token_file, ledger_token_file, viewer_token_file):
        if file is not None:
            read_token(file)
    port = free_port(settings.host, settings.port)
    command = [sys.executable, "-P", "-m", "pipelines.console", "--ledger", str(ledger)]
    command += ["--host", settings.host, "--port", str(port)]
    command += ["--ledger-token-file", str(ledger_token_file)] if ledger_token_file is not None else []
    given = {
        "--login-token-file": login_token_file, "--viewer-token-file": viewer_token_file,
        "--finished": finished.absolute() if finished is not None else None, "--rules": rules,
    }  # fmt: skip
    command += [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    return ConsolePlan(f"http://{shown}:{port}", settings.host, port, tuple(command))


def has_streamlit() -> bool:
    return is_there("streamlit")


def console_plan(
    settings: Settings,
    places: Places,
    *,
    open_to_others: bool = False,
    login_token_file: Path | None = None,
    viewer_token_file: Path | None = None,
    finished: Path | None = None,
) -> ConsolePlan:
    """The console of these settings, over the ledger's socket or its TCP address. Raises as `plan_console` does."""
    where = ledger_address(settings, places)
    return plan_console(
        settings.console,
        where.address,
        ledger_token_file=where.token_file,
        open_to_others=open_to_others,
        login_token_file=login_token_file,
        viewer_token_file=viewer_token_file,
        finished=finished,
        rules=settings.detect.rules_dir,
    )


def streamlit_flags(host: str, port: int) -> tuple[str, ...]:
    """What Streamlit is told: where to listen, no statistics, no file watcher, no prompt, our theme."""
    flags = {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "true",
        "server.showEmailPrompt": "false",
        "server.fileWatcherType": "none",
        "server.runOnSave": "false",
        "server.enableAgentApi": "false",
        "server.maxUploadSize": "1",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "client.showErrorLinks": "false",
        "runner.magicEnabled": "false",
        "global.developmentMode": "false",
        "logger.level": "warning",
        "theme.base": str(THEME),
    }
    return (str(APP), *(f"--{name}={value}" for name, value in flags.items()))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def free_port(host: str, port: int) -> int:
    """`port` if it can be had, any free one for 0. Raises PortTaken where it is taken or not ours."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise PortTaken(
            f"the console cannot listen on {host}:{port} ({why}); "
            "choose another port with --port or TRANSOM_CONSOLE__PORT (0: any free one)"
        ) from error


def is_ready(plan: ConsolePlan) -> bool:
    """Whether the console answers."""
    connection = http.client.HTTPConnection(plan.host, plan.port, timeout=2.0)
    try:
        connection.request("GET", "/_stcore/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_ready(plan: ConsolePlan, clock: Clock, seconds_max: float = READY_SECONDS_MAX) -> bool:
    """Whether the console answered within that time."""
    deadline = clock.monotonic() + seconds_max
    while not is_ready(plan):
        if clock.monotonic() >= deadline:
            return False
        clock.sleep(POLL_SECONDS)
    return True


def child_environ(given: Mapping[str, str], arguments: argparse.Namespace) -> dict[str, str]:
    """The environment of Streamlit: where the ledger is, and the tokens, which no command line shows."""
    remote = arguments.ledger.startswith(("http://", "https://"))
    own = {
        "TRANSOM_API_URL": arguments.ledger if remote else "",
        "TRANSOM_API_SOCKET": "" if remote else arguments.ledger,
        "TRANSOM_API_TOKEN": read_token(arguments.ledger_token_file) if arguments.ledger_token_file else "",
        "TRANSOM_CONSOLE_TOKEN": read_token(arguments.login_token_file) if arguments.login_token_file else "",
        "TRANSOM_CONSOLE_VIEWER_TOKEN": read_token(arguments.viewer_token_file) if arguments.viewer_token_file else "",
        "TRANSOM_LEDGER_FOLDER": str(arguments.finished or ""),
        "TRANSOM_RULES_FOLDER": str(arguments.rules or ""),
    }
    return {**given, **own}


def become_streamlit(words: Sequence[str]) -> NoReturn:
    """Step back, go when our parent goes, and turn into Streamlit: both outlive the exec."""
    parser = argparse.ArgumentParser(prog="pipelines.console")
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--ledger-token-file", type=Path)
    for flag in ("--login-token-file", "--viewer-token-file", "--finished", "--rules"):
        parser.add_argument(flag, type=Path)
    arguments = parser.parse_args(words)
    environ = child_environ(os.environ, arguments)
    if not is_loopback(arguments.host) and not environ["TRANSOM_CONSOLE_TOKEN"]:
        raise ConsoleRefused(f"a console on {arguments.host} needs a login token: pass --token-file")
    step_back(CONSOLE_NICE)
    go_with_parent(environ)
    flags = streamlit_flags(arguments.host, arguments.port)
    os.execve(sys.executable, [sys.executable, "-P", "-m", "streamlit", "run", *flags], environ)


if __name__ == "__main__":
    try:
        become_streamlit(sys.argv[1:])
    except StatedError as refusal:
        sys.exit(f"transom: {refusal}")
