"""Two engines prove to each other that they know the job's token, without sending it.

    server → client   protocol, node, epoch, a fresh nonce
    client → server   job, node, a fresh nonce, HMAC-SHA256(token, "client" and all of the above)
    server → client   HMAC-SHA256(token, "server" and all of the above)

A recording of it is worth nothing, because both nonces are part of both proofs; neither proof can be sent
back as the other. The key of the session, which every later frame is proved with, comes from the same words.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from .ring_members import is_node_name
from .ring_wire import Channel, PeerError, PeerRefused
from .wire import text

PROTOCOL = "transom-ring/1"
NONCE_BYTES = 32
TOKEN_BYTES_MIN = 16
WORD_CHARACTERS_MAX = 256

Dice = Callable[[int], bytes]  # so many random bytes, fit for keys


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end. `epoch` changes with each start of an engine: its memory is empty then."""

    node: str
    epoch: str


def answer(channel: Channel, token: bytes, job: str, me: Peer, dice: Dice) -> str:
    """The server's part; the client's node. Raises PeerError, after saying no, where the client cannot prove it."""
    nonce = dice(NONCE_BYTES).hex()
    channel.send({"protocol": PROTOCOL, "node": me.node, "epoch": me.epoch, "nonce": nonce})
    fields = channel.receive()
    theirs, node, its_nonce = (_word(text(fields, name)) for name in ("job", "node", "nonce"))
    words = (PROTOCOL, job, me.node, me.epoch, node, nonce, its_nonce)
    fits = hmac.compare_digest(_prove(token, "client", words), _raw(text(fields, "proof")))
    if not fits or theirs != job or len(its_nonce) != len(nonce) or not is_node_name(node):
        channel.send({"refused": "the token or the job is another"})
        raise PeerError(f"{node!r:.60} could not prove the token of job {job!r}")
    channel.send({"proof": _prove(token, "server", words).decode()})
    channel.secure(_prove(token, "session", words), as_server=True)
    return node


def prove(channel: Channel, token: bytes, job: str, node: str, dice: Dice) -> Peer:
    """The client's part; who answered. Raises PeerRefused where one of the two cannot prove it, or PeerError."""
    hello = channel.receive()
    protocol, server, epoch, its_nonce = (_word(text(hello, name)) for name in ("protocol", "node", "epoch", "nonce"))
    if protocol != PROTOCOL:
        raise PeerRefused(f"{server} speaks {protocol!r:.40}, this engine {PROTOCOL!r}; use one version in a job")
    nonce = dice(NONCE_BYTES).hex()
    words = (PROTOCOL, job, server, epoch, node, its_nonce, nonce)
    channel.send({"job": job, "node": node, "nonce": nonce, "proof": _prove(token, "client", words).decode()})
    reply = channel.receive()
    if "refused" in reply:
        raise PeerRefused(f"{server} refused us: {text(reply, 'refused'):.200}; the engines of a job share one token")
    if not hmac.compare_digest(_prove(token, "server", words), _raw(text(reply, "proof"))):
        raise PeerRefused(f"what answers as {server} does not know the token")
    channel.secure(_prove(token, "session", words), as_server=False)
    return Peer(server, epoch)


def _word(word: str) -> str:
    if len(word) > WORD_CHARACTERS_MAX:
        raise PeerError(f"a word of {len(word)} characters does not belong into a handshake")
    return word


def _prove(token: bytes, role: str, words: tuple[str, ...]) -> bytes:
    """Hex. Each word goes in with its length, so that no two lists of words look alike."""
    parts = [_raw(word) for word in (role, *words)]
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(token, message, "sha256").hex().encode()


def _raw(word: str) -> bytes:
    """JSON can say what is no text; it is no proof either, and must not be an error of ours."""
    return word.encode("utf-8", "surrogatepass")
