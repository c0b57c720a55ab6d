"""One function for everything that decodes bytes of a peer: it takes any bytes, and raises nothing but refusals.

Each target returns what it made of the bytes, for who wants to look; memory that it took is bounded by the input.
"""

import copy
import json
import random
import socket
import struct
from collections.abc import Callable, Sequence

import torch

from squall.errors import RemoteProtocolError
from squall.wire.bulk import HEADER as BULK_HEADER
from squall.wire.bulk import Incoming, bytes_of
from squall.wire.connection import CODEC
from squall.wire.hello import (
    GREETING_BYTES,
    MAGIC,
    VERDICT_BYTES,
    VERSION,
    CallerHello,
    DoorHello,
    RefusedError,
)
from squall.wire.stream import StreamChannel, frame
from tests.fuzz.examples import MESSAGES, example

TOKEN = b"the token of the fuzzers"


def hello_of_a_caller(data: bytes) -> object:
    """What a door makes of a caller's first bytes."""
    door, at, answers = DoorHello(TOKEN), 0, []
    try:
        while door.num_wanted and at + door.num_wanted <= len(data):
            part = data[at : at + door.num_wanted]
            at += len(part)
            answers.append(door.take(part))
    except RefusedError as error:
        return error
    assert door.num_wanted, "nobody guesses a proof"
    return answers


def hello_of_a_door(data: bytes) -> object:
    """What a caller makes of a door's first bytes."""
    caller = CallerHello(TOKEN)
    try:
        if len(data) >= GREETING_BYTES + VERDICT_BYTES:
            caller.take_challenge(data[:GREETING_BYTES])
            caller.take_verdict(data[GREETING_BYTES : GREETING_BYTES + VERDICT_BYTES])
            raise AssertionError("nobody guesses a proof")
    except RefusedError as error:
        return error
    return None


def message(data: bytes) -> object:
    """What the codec makes of one message: it, or a refusal; what it took keeps to its annotations."""
    try:
        decoded = CODEC.decode(data)
    except RemoteProtocolError as error:
        return error
    assert repr(CODEC.decode(CODEC.encode(decoded))) == repr(decoded)  # a nan is not equal to itself
    return decoded


def stream(data: bytes) -> object:
    """What a stream makes of bytes in pieces: messages until one is none."""
    near, far = socket.socketpair()
    channel, found = StreamChannel(far, max_frame_bytes=1 << 16), []
    cut = len(data) // 2
    try:
        for part in (data[:cut], data[cut:]):
            near.sendall(part)
            found += [message(received) for received, _ in channel.arrived()]
    except RemoteProtocolError as error:
        found.append(error)
    finally:
        near.close()
        channel.close()
    return found


def transfer(data: bytes) -> object:
    """What the receiver of a tensor makes of bytes: it writes none unless they are announced as it expects."""
    near, far = socket.socketpair()
    memory = torch.zeros(4)
    incoming = Incoming(7, [bytes_of(memory)])
    is_meant = data[:20] == BULK_HEADER.pack(b"BULK", 7, 16)
    near.sendall(data)
    near.close()
    try:
        while not incoming.is_done and incoming.receive(far):
            pass
    except RemoteProtocolError as error:
        assert not memory.any()
        return error
    finally:
        far.close()
    assert is_meant or len(data) < 20
    return memory


TARGETS: dict[str, Callable[[bytes], object]] = {
    target.__name__: target for target in (hello_of_a_caller, hello_of_a_door, message, stream, transfer)
}

STRANGE = [
    None,
    True,
    0,
    -1,
    1.5,
    1 << 40,
    1 << 70,
    "",
    "float32",
    "nonsense",
    [],
    {},
    [[]],
    [0],
    [[0, 1]],
    {"a": 1},
]

WIRE_SEEDS = [
    struct.pack("<8sHH32s", MAGIC, VERSION, 0, bytes(32)) + bytes(65),
    CallerHello(TOKEN).hello + bytes(32),
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(40),
    BULK_HEADER.pack(b"BULK", 7, 16) + bytes(16),
    BULK_HEADER.pack(b"BULK", 7, 1 << 63),
    *(CODEC.encode(example(kind)) for kind in MESSAGES),
    *(frame(CODEC.encode(example(kind))) for kind in MESSAGES),
]


def other_json(lots: random.Random, text: bytes) -> bytes:
    """JSON with another value, or none, somewhere within."""
    whole = at = json.loads(text)
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        if not keys:
            return text
        key = lots.choice(keys)
        if not isinstance(at[key], dict | list) or not at[key] or lots.random() < 0.2:
            break
        at = at[key]
    if lots.random() < 0.2:
        del at[key]
    else:
        at[key] = copy.deepcopy(lots.choice(STRANGE))
    return json.dumps(whole).encode()


def mutant(lots: random.Random, seeds: Sequence[bytes] = WIRE_SEEDS) -> bytes:
    """Some bytes: a seed with a few things wrong, several together, or nothing that was ever meant."""
    if lots.random() < 0.1:
        return lots.randbytes(lots.randrange(300))
    if (seed := lots.choice(seeds)).startswith(b'{"') and lots.random() < 0.8:
        return other_json(lots, seed.splitlines()[0])
    data = bytearray(b"".join(lots.choice(seeds) for _ in range(lots.choice((1, 1, 1, 2, 3)))))
    for _ in range(lots.choice((0, 1, 1, 2, 5))):
        at, kind = lots.randrange(len(data) + 1), lots.randrange(6)
        if kind == 0:
            data[at : at + 1] = lots.randbytes(1)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + lots.randrange(20)]
        elif kind == 3:
            data[at:at] = lots.randbytes(lots.randrange(20))
        elif kind == 4:
            number = lots.choice((0, 1, -1, 1 << 31, 1 << 62, -(1 << 63)))
            data[at : at + 8] = struct.pack("<q", number)
        else:
            data[at : at + 4] = struct.pack("<I", lots.choice((0, 0xFFFFFFFF, 0x7FFFFFFF, len(data))))
        if not data:
            break
    return bytes(data)
