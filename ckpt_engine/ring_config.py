"""How an engine takes part in the ring: who the nodes are, what is listened on, and all of its bounds."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .ring_handshake import TOKEN_BYTES_MIN
from .ring_members import is_node_name
from .ring_wire import RAW_BYTES_MAX

CHUNK_BYTES_MIN = 64 << 10
EVERYWHERE = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class RingTls:
    """PEM files. Both ends show a certificate that `authority` has signed."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True)
class RingConfig:
    """One engine's part. `nodes`: those of the job, in the order of the ring, the same on every engine; nodes that
    only the members' folder knows come after them, by name.

    `addresses` are those of nodes that have no file there. `groups`: what fails together, by node.
    """

    token: bytes = field(repr=False)
    nodes: tuple[str, ...] = ()
    listen_host: str = "127.0.0.1"
    listen_port: int = 0  # 0: any free one
    advertise_host: str = ""  # what others are told; empty: listen_host
    replication: int = 1
    groups: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    memory_bytes_max: int = 8 << 30  # for the shards of others
    bytes_per_second_max: int = 0  # of copies to others, of all together; 0: as fast as it goes
    chunk_bytes: int = 8 << 20
    connections_max: int = 64
    dial_seconds_max: float = 3.0
    io_seconds_max: float = 20.0  # for one chunk, and for one answer
    beat_seconds: float = 2.0
    dead_seconds: float = 10.0  # without a beat or a connection: the next node takes the copies meanwhile
    pull_seconds_max: float = 100.0  # a rank that loads waits so long for peers, then it goes to the disk
    retry_seconds_min: float = 0.5
    retry_seconds_max: float = 30.0
    tls: RingTls | None = None

    def __post_init__(self) -> None:
        if len(self.token) < TOKEN_BYTES_MIN:
            raise ValueError(
                f"the ring's token must have at least {TOKEN_BYTES_MIN} bytes, not {len(self.token)}; "
                "make one with: openssl rand -hex 32"
            )
        if self.replication < 1 or self.memory_bytes_max < 1 or self.connections_max < 1:
            raise ValueError("replication, memory_bytes_max and connections_max of the ring must be at least 1")
        if not CHUNK_BYTES_MIN <= self.chunk_bytes <= RAW_BYTES_MAX:
            raise ValueError(f"a chunk must have {CHUNK_BYTES_MIN} to {RAW_BYTES_MAX} bytes, not {self.chunk_bytes}")
        if self.listen_host in EVERYWHERE and not self.advertise_host:
            raise ValueError(
                f"a ring that listens on {self.listen_host or 'all addresses'} must be told which address other "
                "nodes reach it by; set advertise_host"
            )
        for node in (*self.nodes, *self.addresses):
            if not is_node_name(node):
                raise ValueError(f"{node!r} cannot be the name of a node in the ring: letters, digits, '_', '.', '-'")

    @property
    def reached_by(self) -> str:
        return self.advertise_host or self.listen_host


def tls_context(tls: RingTls | None, *, as_server: bool) -> ssl.SSLContext | None:
    """For one end, with the peer's certificate required; None where TLS is off. Raises OSError (ssl.SSLError is one).

    Names in certificates are not compared: who the peer is, the token's handshake says inside.
    """
    if tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if as_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(tls.certificate, tls.key)
    context.load_verify_locations(tls.authority)
    return context
