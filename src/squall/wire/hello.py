"""The first bytes of a TCP connection: of fixed size, with a version, and proof on both sides of the cluster's token.

    caller                                     door
      hello      44 bytes  ------------------>            magic, version, nonce of the caller
                           <------------------  44 bytes  magic, version and verdict, nonce of the door
      proof      32 bytes  ------------------>            HMAC-SHA256 over both, keyed with the token
                           <------------------  33 bytes  verdict, and the door's own proof
      introduction, a framed message  ------->            from here on `squall.wire.codec`

Nothing else is read before. Whoever listens on the line never sees the token, and what was recorded is worth nothing
a second time, for both nonces are fresh. The two proofs differ in a label, so that neither can be sent back as the
other. Proof is of the connection's beginning only: what follows is neither encrypted nor signed, which is why doors
open on loopback addresses only.

This file does no I/O: bytes in, bytes out. Magic, version and the place of both never change.
"""

import hashlib
import hmac
import secrets
import struct
from enum import IntEnum

from squall.errors import ConfigError, RemoteProtocolError

VERSION = 1
MAGIC = b"\x8bSQUALL\n"
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
MIN_TOKEN_LETTERS = 16

_GREETING = struct.Struct(f"<{len(MAGIC)}sHH{NONCE_BYTES}s")
_VERDICT = struct.Struct(f"<B{PROOF_BYTES}s")
GREETING_BYTES = _GREETING.size
VERDICT_BYTES = _VERDICT.size


class Verdict(IntEnum):
    """What a door says to a caller."""

    GO_ON = 0
    OTHER_VERSION = 1
    WRONG_TOKEN = 2


class RefusedError(RemoteProtocolError):
    """A caller is not let in.

    Attributes:
        kind: a word to count by: "hello", "version", "token", "introduction", "silent" or "crowded".
        answer: the bytes to send before the connection is closed; often none.
    """

    def __init__(self, *, kind: str, reason: str, answer: bytes = b"") -> None:
        self.kind, self.answer = kind, answer
        super().__init__(reason=reason)


def new_token() -> str:
    """A cluster's secret: 64 letters."""
    return secrets.token_hex(32)


def check_token(token: str) -> bytes:
    """The token as a key.

    Raises:
        ConfigError: it is too short to keep anyone out.
    """
    if not isinstance(token, str) or len(token) < MIN_TOKEN_LETTERS:
        raise ConfigError(
            subject="the cluster token",
            expected=f"at least {MIN_TOKEN_LETTERS} letters",
            got=f"{len(token)}" if isinstance(token, str) else type(token).__name__,
            remedy="Take the one that the cluster made, or squall.wire.hello.new_token().",
        )
    return token.encode()


class DoorHello:
    """The door's side of one connection.

    Attributes:
        num_wanted: bytes to receive next and pass to `take`, all at once; 0 when the caller has proved itself.

    >>> door, caller = DoorHello(b"token"), CallerHello(b"token")
    >>> challenge = door.take(caller.hello)
    >>> verdict = door.take(caller.take_challenge(challenge))
    >>> caller.take_verdict(verdict), door.num_wanted
    (None, 0)
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._said = b""
        self.num_wanted = GREETING_BYTES

    def take(self, data: bytes) -> bytes:
        """Take the next `num_wanted` bytes; return what to answer.

        Raises:
            RefusedError: the caller is not one of ours.
        """
        return self._take_proof(data) if self._said else self._take_hello(data)

    def _take_hello(self, data: bytes) -> bytes:
        magic, version, _, _ = _GREETING.unpack(data)
        if magic != MAGIC:
            raise RefusedError(
                kind="hello", reason=f"expected the hello of a Squall role, but got {data[:16]!r}"
            )
        nonce = secrets.token_bytes(NONCE_BYTES)
        if version != VERSION:
            raise RefusedError(
                kind="version",
                reason=f"expected version {VERSION} of the protocol, but got {version}",
                answer=_GREETING.pack(MAGIC, VERSION, Verdict.OTHER_VERSION, nonce),
            )
        answer = _GREETING.pack(MAGIC, VERSION, Verdict.GO_ON, nonce)
        self._said = data + answer
        self.num_wanted = PROOF_BYTES
        return answer

    def _take_proof(self, data: bytes) -> bytes:
        if not hmac.compare_digest(data, _proof(self._token, b"caller", self._said)):
            raise RefusedError(
                kind="token",
                reason="expected proof of the cluster's token, but got that of another token, or an old one",
                answer=_VERDICT.pack(Verdict.WRONG_TOKEN, bytes(PROOF_BYTES)),
            )
        self.num_wanted = 0
        return _VERDICT.pack(Verdict.GO_ON, _proof(self._token, b"door", self._said))


class CallerHello:
    """The caller's side of one connection.

    Attributes:
        hello: the bytes to send first.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._said = b""
        self.hello = _GREETING.pack(MAGIC, VERSION, 0, secrets.token_bytes(NONCE_BYTES))

    def take_challenge(self, data: bytes) -> bytes:
        """Take the door's first answer (`GREETING_BYTES`); return the proof to send.

        Raises:
            RefusedError: nobody of ours answers there.
        """
        magic, version, verdict, _ = _GREETING.unpack(data)
        if magic != MAGIC:
            raise RefusedError(
                kind="hello", reason=f"expected a Squall role to answer, but got {data[:16]!r}"
            )
        if (version, verdict) != (VERSION, Verdict.GO_ON):
            raise RefusedError(
                kind="version",
                reason=f"expected version {VERSION} of the protocol, but the other side has {version}. "
                "Install the same version of Squall on both.",
            )
        self._said = self.hello + data
        return _proof(self._token, b"caller", self._said)

    def take_verdict(self, data: bytes) -> None:
        """Take the door's second answer (`VERDICT_BYTES`).

        Raises:
            RefusedError: our token is not the door's.
        """
        verdict, proof = _VERDICT.unpack(data)
        is_proved = hmac.compare_digest(proof, _proof(self._token, b"door", self._said))
        if verdict != Verdict.GO_ON or not is_proved:
            raise RefusedError(
                kind="token",
                reason="expected the same cluster token on both sides, but got two different ones",
            )


def _proof(token: bytes, label: bytes, said: bytes) -> bytes:
    return hmac.digest(token, b"squall " + label + said, "sha256")
