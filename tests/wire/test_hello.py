"""The hello, byte by byte, without a socket. The oracle for proofs is `hmac.new` over what was said.

Faults planted by hand, each seen to fail a test here: the version is not compared · the magic is not compared · one nonce
for all connections · the proof does not cover the caller's nonce · both proofs have the same label · the caller does
not check the door's proof · any proof is taken.
"""

import hashlib
import hmac
import struct

import pytest

from squall.errors import ConfigError
from squall.wire.hello import (
    GREETING_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    VERDICT_BYTES,
    VERSION,
    CallerHello,
    DoorHello,
    RefusedError,
    check_token,
    new_token,
)

TOKEN = b"a token of the cluster"


def proof(label: bytes, said: bytes, token: bytes = TOKEN) -> bytes:
    return hmac.new(token, b"squall " + label + said, hashlib.sha256).digest()


def greeting(version: int = VERSION, magic: bytes = MAGIC, nonce: bytes = bytes(NONCE_BYTES)) -> bytes:
    return struct.pack("<8sHH32s", magic, version, 0, nonce)


def test_both_sides_prove_the_token_over_both_nonces() -> None:
    door, caller = DoorHello(TOKEN), CallerHello(TOKEN)
    challenge = door.take(caller.hello)
    said = caller.hello + challenge

    answer = caller.take_challenge(challenge)
    verdict = door.take(answer)

    assert answer == proof(b"caller", said)
    assert verdict == b"\0" + proof(b"door", said)
    caller.take_verdict(verdict)
    assert door.num_wanted == 0


def test_every_step_has_a_fixed_size() -> None:
    door, caller = DoorHello(TOKEN), CallerHello(TOKEN)
    assert len(caller.hello) == door.num_wanted == GREETING_BYTES == 44
    challenge = door.take(caller.hello)
    assert len(challenge) == GREETING_BYTES
    assert door.num_wanted == PROOF_BYTES == 32
    assert len(door.take(caller.take_challenge(challenge))) == VERDICT_BYTES == 33


def test_another_token_is_refused_on_both_sides() -> None:
    door, caller = DoorHello(TOKEN), CallerHello(b"some other token here")
    answer = caller.take_challenge(door.take(caller.hello))

    with pytest.raises(RefusedError, match="another token") as refused:
        door.take(answer)

    assert refused.value.kind == "token"
    assert len(refused.value.answer) == VERDICT_BYTES
    with pytest.raises(RefusedError, match="same cluster token"):
        caller.take_verdict(refused.value.answer)


def test_what_was_recorded_is_refused_when_it_is_said_again() -> None:
    door, caller = DoorHello(TOKEN), CallerHello(TOKEN)
    recorded = caller.take_challenge(door.take(caller.hello))

    again = DoorHello(TOKEN)
    again.take(caller.hello)

    with pytest.raises(RefusedError, match="or an old one"):
        again.take(recorded)


def test_the_doors_proof_cannot_be_sent_back_as_a_callers() -> None:
    door, caller = DoorHello(TOKEN), CallerHello(TOKEN)
    said = caller.hello + door.take(caller.hello)
    with pytest.raises(RefusedError):
        door.take(proof(b"door", said))


def test_a_door_that_does_not_know_the_token_is_not_believed() -> None:
    caller = CallerHello(TOKEN)
    caller.take_challenge(greeting())
    with pytest.raises(RefusedError):
        caller.take_verdict(b"\0" + proof(b"door", caller.hello + greeting(), b"guessed"))


@pytest.mark.parametrize("version", [0, VERSION + 1, 0xFFFF])
def test_another_version_is_told_ours(version: int) -> None:
    with pytest.raises(RefusedError, match=f"version {VERSION}") as refused:
        DoorHello(TOKEN).take(greeting(version))

    assert refused.value.kind == "version"
    with pytest.raises(RefusedError, match="Install the same version"):
        CallerHello(TOKEN).take_challenge(refused.value.answer)


def test_what_is_no_hello_is_refused_without_an_answer() -> None:
    for data in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(44), bytes(44), b"\xff" * 44):
        with pytest.raises(RefusedError, match="expected the hello") as refused:
            DoorHello(TOKEN).take(data)
        assert (refused.value.kind, refused.value.answer) == ("hello", b"")


def test_nonces_are_fresh() -> None:
    said = {CallerHello(TOKEN).hello for _ in range(20)}
    challenges = {DoorHello(TOKEN).take(greeting()) for _ in range(20)}
    assert len(said) == len(challenges) == 20


def test_tokens_are_long_and_short_ones_are_refused() -> None:
    assert len({new_token() for _ in range(20)}) == 20
    assert check_token(new_token())
    with pytest.raises(ConfigError, match="at least 16 letters, but got 5"):
        check_token("short")
