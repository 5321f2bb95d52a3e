"""From settings to an engine's part in the ring between nodes: on where a token is given, else off with the reason."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpt_engine.ring_config import RingConfig, RingTls
from pipelines.ledger_address import read_token
from pipelines.settings import RingSettings, Settings, SettingsError, ring_token_given

OFF_WITHOUT_TOKEN = "the ring is off: no token is given; set checkpoint.ring.token_file to keep copies on other nodes"
OFF_ALONE = "the ring is off: the job has one node, which has no neighbour to keep copies on"


def ring_of(settings: Settings, nodes: Sequence[str], *, several: bool = True) -> tuple[RingConfig | None, str]:
    """The ring of an engine whose job has these nodes, in the ring's order; None with the reason where it is off.

    `nodes` empty and `several`: they are not known by name, and tell each other in the job's folder.

    Raises SettingsError and TokenRefused where what is set cannot be.
    """
    chosen = settings.checkpoint.ring
    token = _token(chosen)
    if token is None:
        return None, OFF_WITHOUT_TOKEN
    if (len(nodes) == 1 or not several) and not chosen.addresses:
        return None, OFF_ALONE
    try:
        config = RingConfig(
            token=token,
            nodes=tuple(nodes),
            listen_host=chosen.listen,
            listen_port=chosen.port,
            advertise_host=chosen.advertise or "",
            replication=chosen.replication,
            groups=chosen.groups,
            addresses={node: _address(node, text) for node, text in chosen.addresses.items()},
            memory_bytes_max=chosen.peer_memory_bytes_max,
            bytes_per_second_max=chosen.bytes_per_second_max,
            tls=_tls(chosen),
        )
    except ValueError as error:
        raise SettingsError(f"checkpoint.ring: {error}") from error
    return config, ""


def _token(chosen: RingSettings) -> bytes | None:
    """The token of the file, which must be for us alone, else of the environment."""
    file = chosen.token_file
    if file is None:
        given = ring_token_given()
        return given.strip().encode() if given else None
    token = read_token(file)
    stat = file.stat()
    if stat.st_mode & 0o077 or stat.st_uid not in (os.getuid(), 0):
        raise SettingsError(f"the token file {file} is open to others; run: chmod 600 {file}, as its owner")
    return token.encode()


def _address(node: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"the address of {node} is {text!r}, not host:port")
    return host.strip("[]"), int(port)


def _tls(chosen: RingSettings) -> RingTls | None:
    files = (chosen.tls_certificate, chosen.tls_key, chosen.tls_authority)
    certificate, key, authority = files
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise ValueError("tls_certificate, tls_key and tls_authority are given together or not at all")
    return RingTls(certificate, key, authority)
