"""The two ends of a TCP connection prove to each other that they know the job's token, without sending it.

    launcher → asker   {"protocol": …, "nonce": …}
    asker → launcher   {"nonce": …, "proof": HMAC-SHA256(token, "asker" and all words so far)}
    launcher → asker   {"node": …, "proof": HMAC-SHA256(token, "launcher" and all words so far)}, or {"refused": …}
    from then on       64 hex digits, a space, and one line as on the Unix socket, both ways

The digits prove the line and its number in this direction of this connection: nothing can be forged, repeated,
left out or sent back. A recording is worth nothing on another connection, because both nonces are part of every
proof. Nothing is encrypted: what is said to a launcher is no secret, that it was said by us is what counts.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

PROTOCOL = "transom-launcher/1"
NONCE_BYTES = 32
TOKEN_BYTES_MIN = 16
GREETING_BYTES_MAX = 2048  # of one line before both ends have proved themselves
PROOF_BYTES = 65  # before each line: hex digits and a space

Dice = Callable[[int], bytes]  # so many random bytes, fit for keys


class NotProved(Exception):
    """The other end does not know the token, or what came is not what it sent; the text says which."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """What everybody who speaks with a job's launchers from another machine has."""

    job: str
    token: bytes = field(repr=False)
    dice: Dice = field(default=secrets.token_bytes, repr=False)

    def __post_init__(self) -> None:
        if len(self.token) < TOKEN_BYTES_MIN:
            raise ValueError(
                f"the launchers' token of job {self.job} has {len(self.token)} bytes and needs {TOKEN_BYTES_MIN}; "
                "make one with: openssl rand -hex 32"
            )


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's first line."""

    protocol: str
    nonce: str


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The asker's first line."""

    nonce: str
    proof: str


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's second line: its own proof, or why there is none."""

    node: str = ""
    proof: str = ""
    refused: str = ""


_CHALLENGES = msgspec.json.Decoder(Challenge)
_CLAIMS = msgspec.json.Decoder(Claim)
_WELCOMES = msgspec.json.Decoder(Welcome)


class Seals:
    """Lines after the greeting, each with its proof; one object for one end of one connection."""

    def __init__(self, session_key: bytes, *, launcher: bool) -> None:
        names = (b"launcher", b"asker") if launcher else (b"asker", b"launcher")
        self._sending, self._receiving = (hmac.digest(session_key, name, "sha256") for name in names)
        self._sent = self._received = 0

    def seal(self, line: bytes) -> bytes:
        """The line as it goes out."""
        proof = _mac(self._sending, self._sent, line)
        self._sent += 1
        return proof + b" " + line

    def open(self, line: bytes) -> bytes:
        """The line that was sent; `line` is without its newline. Raises NotProved."""
        proof, body = line[: PROOF_BYTES - 1], line[PROOF_BYTES:]
        if line[PROOF_BYTES - 1 : PROOF_BYTES] != b" " or not hmac.compare_digest(
            _mac(self._receiving, self._received, body + b"\n"), proof
        ):
            raise NotProved("a line came that its sender has not proved")
        self._received += 1
        return body


class LauncherEnd:
    """The launcher's side of one connection, without any input or output of its own."""

    def __init__(self, key: JobKey, node: str) -> None:
        self._key = key
        self._node = node
        self._nonce = key.dice(NONCE_BYTES).hex()
        self._seals: Seals | None = None

    @property
    def proved(self) -> bool:
        return self._seals is not None

    def challenge(self) -> bytes:
        """The first line."""
        return _line(Challenge(protocol=PROTOCOL, nonce=self._nonce))

    def welcome(self, line: bytes) -> bytes:
        """What to answer to the asker's claim. Raises NotProved; `refusal` is what is said then."""
        try:
            claim = _CLAIMS.decode(line)
        except (ValueError, RecursionError) as error:
            raise NotProved(f"a claim was expected, not {line[:40]!r}") from error
        words: tuple[str, ...] = (PROTOCOL, self._key.job, self._nonce, claim.nonce)
        if len(claim.nonce) != 2 * NONCE_BYTES or not _same(_prove(self._key.token, "asker", words), claim.proof):
            raise NotProved("whoever asks does not know the job's token")
        words = (*words, self._node)
        self._seals = Seals(_session_key(self._key.token, words), launcher=True)
        return _line(Welcome(node=self._node, proof=_prove(self._key.token, "launcher", words)))

    def refusal(self, text: str) -> bytes:
        """The last line to somebody who is turned away."""
        return _line(Welcome(refused=text))

    def open(self, line: bytes) -> bytes:
        """The request in a proved line. Raises NotProved."""
        assert self._seals is not None
        return self._seals.open(line)

    def seal(self, line: bytes) -> bytes:
        """A reply as it goes out."""
        assert self._seals is not None
        return self._seals.seal(line)


class AskerEnd:
    """The asker's side of one connection, without any input or output of its own."""

    def __init__(self, key: JobKey) -> None:
        self._key = key
        self._words: tuple[str, ...] = ()

    def claim(self, line: bytes) -> bytes:
        """What to answer to the launcher's challenge. Raises NotProved."""
        try:
            challenge = _CHALLENGES.decode(line)
        except (ValueError, RecursionError) as error:
            raise NotProved("what answers there is no launcher") from error
        if challenge.protocol != PROTOCOL or len(challenge.nonce) != 2 * NONCE_BYTES:
            raise NotProved(f"it speaks {challenge.protocol!r:.40}, not {PROTOCOL!r}; use one version in a job")
        nonce = self._key.dice(NONCE_BYTES).hex()
        self._words = (PROTOCOL, self._key.job, challenge.nonce, nonce)
        return _line(Claim(nonce=nonce, proof=_prove(self._key.token, "asker", self._words)))

    def finish(self, line: bytes, node: str = "") -> Seals:
        """The seals of the connection, once the launcher has proved itself, as the one of `node` where that is given.

        Raises NotProved.
        """
        try:
            welcome = _WELCOMES.decode(line)
        except (ValueError, RecursionError) as error:
            raise NotProved("what answers there is no launcher") from error
        if welcome.refused:
            raise NotProved(f"it refused us: {welcome.refused:.200}; who speaks with a job's launchers has its token")
        words = (*self._words, welcome.node)
        if not _same(_prove(self._key.token, "launcher", words), welcome.proof):
            raise NotProved("what answers there does not know the job's token")
        if node and welcome.node != node:
            raise NotProved(f"the launcher of {welcome.node} answers there")
        return Seals(_session_key(self._key.token, words), launcher=False)


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _prove(token: bytes, role: str, words: tuple[str, ...]) -> str:
    """Each word goes in with its length, so that no two lists of words look alike."""
    parts = [word.encode("utf-8", "surrogatepass") for word in (role, *words)]
    return hmac.digest(token, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256").hex()


def _session_key(token: bytes, words: tuple[str, ...]) -> bytes:
    return bytes.fromhex(_prove(token, "session", words))


def _same(proof: str, claimed: str) -> bool:
    return hmac.compare_digest(proof.encode(), claimed.encode("utf-8", "surrogatepass"))


def _mac(key: bytes, number: int, line: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + line, "sha256").hex().encode()
