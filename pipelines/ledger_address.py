"""Where the ledger's API is read: over its Unix socket on its own machine, over TCP with a token from another one."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import NamedTuple

from pipelines.errors import StatedError
from pipelines.places import Places
from pipelines.settings import Settings, SettingsError

TOKEN_LENGTH_MIN = 16


class TokenRefused(StatedError):
    """A token file cannot be used; the text is one sentence that says what to do."""


class LedgerAddress(NamedTuple):
    """A Unix socket's path, or an http:// address with the file that holds its token."""

    address: str
    token_file: Path | None = None

    def token(self) -> str | None:
        """The token, where one is needed. Raises TokenRefused."""
        return None if self.token_file is None else read_token(self.token_file)


def ledger_address(settings: Settings, places: Places) -> LedgerAddress:
    """The socket where `record` runs here (or would); where `record.host` is set and no socket is here, that address.

    Raises SettingsError for an address without a token file.
    """
    host = settings.record.host
    if host is None or places.api_socket.exists():
        return LedgerAddress(str(places.api_socket))
    if settings.record.token_file is None:
        raise SettingsError("record.host serves the ledger on TCP, which needs record.token_file; set that too")
    shown = _reachable(host)
    return LedgerAddress(f"http://{shown}:{settings.record.port}", settings.record.token_file)


def read_token(file: Path) -> str:
    """The token in a file, long enough to be one. Raises TokenRefused."""
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TokenRefused(f"the token file {file} cannot be read ({why}); give one that can") from error
    if len(token) < TOKEN_LENGTH_MIN or not token.isascii() or not token.isprintable():
        raise TokenRefused(
            f"the token in {file} is not one: at least {TOKEN_LENGTH_MIN} printable ASCII characters on one line; "
            f"make one with: openssl rand -hex 32 > {file}"
        )
    return token


def _reachable(host: str) -> str:
    """A host to connect to: the address of all interfaces is none, and an IPv6 address stands in brackets."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return f"[{address}]" if address.version == 6 else str(address)
