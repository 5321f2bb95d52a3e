"""Ways out of the house: an HTTP request, a signed webhook, a command. Each tries once, within a time."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from pipelines.errors import StatedError
from pipelines.extras import missing_extra
from pipelines.ledger_address import read_token

from .notice import Notice

try:
    import httpx
except ImportError as error:  # pragma: no cover - only where the extra is missing
    raise missing_extra("ledger", "telling people over HTTP (httpx)") from error

SEND_SECONDS_MAX = 10.0
SIGNATURE_HEADER = "X-Transom-Signature"
TRY_AGAIN_STATUS = frozenset({408, 425, 429})

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs addresses, and some of them are secrets


class Undelivered(Exception):
    """It did not arrive this time; another try may help. The text names no address, only what happened."""


class Refused(Undelivered):
    """The receiver does not want it, and would not the next time."""


class NotAnAddress(StatedError):
    """An address or its file cannot be used; the text is one sentence that says what to do."""


class Sender(Protocol):
    """Takes one notice to one receiver."""

    name: str

    def send(self, notice: Notice) -> None:
        """One try. Raises Undelivered, or Refused."""
        ...


def http_address(name: str, url: str) -> str:
    """`url`, if it can be asked. Raises NotAnAddress, which does not repeat it: it may hold a secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise NotAnAddress(f"{name} is not an address; give one that begins with http:// or https://")
    return url


def read_address(name: str, file: Path) -> str:
    """The address in a file. Raises NotAnAddress."""
    try:
        return http_address(f"what {name} names ({file})", file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise NotAnAddress(f"{name}: {file} cannot be read; give a file with one address in it") from error


def post(url: str, body: bytes, headers: Mapping[str, str]) -> None:
    """One POST; its answer's body is not read, and nobody is followed elsewhere. Raises Undelivered, Refused."""
    given = {"Content-Type": "application/json", "User-Agent": "transom", **headers}
    try:
        with httpx.stream("POST", url, content=body, headers=given, timeout=SEND_SECONDS_MAX) as answer:
            status = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise Undelivered(f"no answer ({type(error).__name__})") from None  # its text may hold the address
    if 200 <= status < 300:
        return
    lasting = status < 500 and status not in TRY_AGAIN_STATUS
    raise (Refused if lasting else Undelivered)(f"answered {status}")


class Webhook:
    """JSON to an address of one's own, with a token and a signature where there are files for them."""

    name = "webhook"

    def __init__(self, url: str, token_file: Path | None = None, secret_file: Path | None = None) -> None:
        """Raises NotAnAddress, TokenRefused."""
        self._url = http_address("notify.webhook_url", url)
        self._headers = {"Authorization": f"Bearer {read_token(token_file)}"} if token_file else {}
        self._secret = read_token(secret_file).encode() if secret_file else None

    def send(self, notice: Notice) -> None:
        body = msgspec.json.encode(notice)
        signed = {} if self._secret is None else {SIGNATURE_HEADER: signature(self._secret, body)}
        post(self._url, body, {**self._headers, **signed})


def signature(secret: bytes, body: bytes) -> str:
    """HMAC-SHA256 over the body, as the header has it."""
    return f"sha256={hmac.new(secret, body, hashlib.sha256).hexdigest()}"


class Command:
    """A program with the notice as JSON on its standard input; exit code 0 means that it has arrived."""

    name = "command"

    def __init__(self, words: Sequence[str], seconds_max: float = 3 * SEND_SECONDS_MAX) -> None:
        self._words = tuple(words)
        self._seconds_max = seconds_max

    def send(self, notice: Notice) -> None:
        quiet = subprocess.DEVNULL
        try:
            child = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
            )
        except OSError as error:
            raise Refused(f"cannot be started ({error.strerror})") from None
        with child:
            try:
                child.communicate(msgspec.json.encode(notice), timeout=self._seconds_max)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                raise Undelivered(f"has not ended in {self._seconds_max:.0f} s") from None
        if child.returncode != 0:
            raise Undelivered(f"ended with {child.returncode}")
