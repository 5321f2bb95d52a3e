"""Addresses of launchers as text: `unix:/path` on the same machine, `tcp:host:port` from another one."""

from __future__ import annotations

from typing import NamedTuple


class TcpAddress(NamedTuple):
    """A host, by name or number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


def parse_address(text: str) -> str | TcpAddress:
    """The path of a Unix socket, or host and port. Raises ValueError for what is neither."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        return rest
    if kind == "tcp":
        return TcpAddress(*host_and_port(rest))
    raise ValueError(f"{text!r} is no launcher's address; it would be unix:/path or tcp:host:port")


def host_and_port(text: str) -> tuple[str, int]:
    """`host:port`, the host maybe empty or in brackets (IPv6). Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise ValueError(f"{text!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
