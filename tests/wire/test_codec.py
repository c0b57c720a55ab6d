"""Tests of squall.wire.codec: bytes written by hand, round trips of anything, and no way to hurt a reader.

Faults planted to check these tests, each caught: trailing bytes not looked at - count not checked before the loop - a
bool of 2 taken as True - magic not checked - the header's length not checked - `__post_init__` not called when slots
are set one by one - tag 0 taken by a union without None - names of fixed and other fields in the dataclass's own order
- a str's limit off - enum members written by their index plus one.
"""

import random
import struct
import tracemalloc
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NewType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.blocks import Block
from squall.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from squall.wire.codec import Codec

ReplicaId = NewType("ReplicaId", int)


class Outcome(Enum):
    APPLIED = "applied"
    REPEATED = "repeated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    replica: ReplicaId
    missing: tuple[int, ...]
    block: Block
    is_finite: bool
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Everything:
    name: str
    scale: float
    data: bytes
    block: Block | None
    blocks: tuple[Block, ...]
    rows: tuple[tuple[int, bool], ...]
    outcome: Outcome | None
    either: Push | Block
    texts: tuple[str | None, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Plain:
    number: int = 3


@dataclass(frozen=True, slots=True)
class Texts:
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flags:
    flags: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


CODEC = Codec({1: Push, 2: Everything, 3: Plain, 4: Texts, 5: Flags, 6: Nothing})

int64s = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
blocks = st.builds(
    lambda stage, epoch, first, size: Block(stage, epoch, first, first + size),
    *[st.integers(0, 2**62 - 1)] * 3,
    st.integers(1, 2**62),
)
pushes = st.builds(
    Push,
    replica=int64s,
    missing=st.lists(int64s, max_size=40).map(tuple),
    block=blocks,
    is_finite=st.booleans(),
    outcome=st.sampled_from(Outcome),
)
everythings = st.builds(
    Everything,
    name=st.text(),
    scale=floats,
    data=st.binary(),
    block=st.none() | blocks,
    blocks=st.lists(blocks, max_size=3).map(tuple),
    rows=st.lists(st.tuples(int64s, st.booleans()), max_size=3).map(tuple),
    outcome=st.none() | st.sampled_from(Outcome),
    either=pushes | blocks,
    texts=st.lists(st.none() | st.text(), max_size=3).map(tuple),
    rates=st.lists(floats, max_size=3).map(tuple),
)
messages = pushes | everythings | st.builds(Plain, number=int64s) | st.just(Nothing())


def framed(code: int, record: bytes) -> bytes:
    return struct.pack("<BBBI", ord("S"), 1, code, 7 + len(record)) + record


def push(**changes: Any) -> Push:
    facts: dict[str, Any] = {
        "replica": ReplicaId(7),
        "missing": (4, 5),
        "block": Block(0, 1, 2, 3),
        "is_finite": True,
    }
    return Push(**facts | {"outcome": Outcome.REPEATED} | changes)


def refused(data: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        CODEC.decode(data)
    return str(caught.value)


def test_a_record_is_its_fixed_fields_and_then_the_others() -> None:
    expected = framed(1, struct.pack("<qqqqqBB", 7, 0, 1, 2, 3, 1, 1) + struct.pack("<Iqq", 2, 4, 5))

    assert CODEC.encode(push()) == expected


def test_other_fields_are_prefixed_by_their_length_count_or_member() -> None:
    message = Everything(
        "h\u00e9",
        0.5,
        b"\0\1",
        None,
        (Block(0, 0, 0, 1),),
        ((9, True),),
        Outcome.APPLIED,
        Block(1, 1, 1, 2),
        (None,),
        (),
    )
    record = (
        struct.pack("<d", 0.5) + b"\3\0h\xc3\xa9" + b"\2\0\0\0\0\1" + b"\0"
        + struct.pack("<Iqqqq", 1, 0, 0, 0, 1) + struct.pack("<Iq?", 1, 9, True) + b"\1\0"
        + struct.pack("<Bqqqq", 2, 1, 1, 1, 2) + struct.pack("<IB", 1, 0) + struct.pack("<I", 0)
    )  # fmt: skip

    assert CODEC.encode(message) == framed(2, record)


@given(messages)
def test_what_is_decoded_is_what_was_encoded(message: object) -> None:
    data = CODEC.encode(message)

    assert CODEC.decode(data) == message
    assert CODEC.decode(memoryview(data)) == message
    assert CODEC.encode(CODEC.decode(data)) == data


@given(messages, st.data())
def test_no_prefix_of_a_message_is_a_message(message: object, draw: st.DataObject) -> None:
    data = CODEC.encode(message)
    short = data[: draw.draw(st.integers(0, len(data) - 1))]
    told = short[:3] + struct.pack("<I", len(short)) + short[7:] if len(short) >= 7 else short

    refused(short)
    refused(told)


@settings(max_examples=300)
@given(messages, st.randoms(use_true_random=False))
def test_changed_bytes_are_refused_or_another_message_of_that_type(
    message: object, chance: random.Random
) -> None:
    data = bytearray(CODEC.encode(message))
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)

    try:
        received = CODEC.decode(bytes(data))
    except RemoteProtocolError:
        return
    assert CODEC.encode(received) == data  # there is one way to write it, so nothing was guessed


@given(st.binary(max_size=200), st.integers(0, 8))
def test_random_bytes_are_refused_or_a_message(record: bytes, code: int) -> None:
    for data in (record, framed(code, record)):
        try:
            CODEC.encode(CODEC.decode(data))
        except RemoteProtocolError:
            continue


@pytest.mark.parametrize("count", [2**32 - 1, 2**31, 1000])
@pytest.mark.parametrize("code", [4, 5])
def test_a_count_is_checked_before_memory_is_allocated(code: int, count: int) -> None:
    tracemalloc.start()
    try:
        told = refused(framed(code, struct.pack("<I", count) + b"\1" * 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert f"a count of {count} elements" in told
    assert peak < 100_000


def test_each_kind_of_malformed_message_is_told() -> None:
    good = CODEC.encode(push())
    not_canonical = bytearray(good)
    not_canonical[7 + 40] = 2
    no_such_member = bytearray(good)
    no_such_member[7 + 41] = 2

    assert "unknown code 99" in refused(framed(99, b""))
    assert "promises" in refused(good + b"\0")
    assert "expected the message to end" in refused(framed(6, b"\0"))
    assert "wire version" in refused(b"T" + good[1:])
    assert "wire version" in refused(good[:1] + b"\2" + good[2:])
    assert "0 or 1, but got 2" in refused(bytes(not_canonical))
    assert refused(bytes(no_such_member))
    assert "utf-8" in refused(framed(4, struct.pack("<IH", 1, 1) + b"\xff"))
    assert "a length of 9 bytes" in refused(framed(4, struct.pack("<IH", 1, 9) + b"abc"))
    assert "expected a tag from 1 to 2, but got 0" in refused(_with_tag(0))
    assert "expected a tag from 1 to 2, but got 3" in refused(_with_tag(3))
    assert refused(b"")


def _with_tag(tag: int) -> bytes:
    message = Everything("", 0.0, b"", None, (), (), None, Block(0, 0, 0, 1), (), ())
    data = bytearray(CODEC.encode(message))
    assert data[-41] == 2  # the member of `either`; behind it are the block and two empty tuples
    data[-41] = tag
    return bytes(data)


def test_what_a_constructor_refuses_is_the_peers_mistake() -> None:
    data = bytearray(CODEC.encode(push(block=Block(0, 0, 5, 6))))
    data[7 + 24 : 7 + 32] = struct.pack("<q", 6)  # first = stop

    assert "a Block needs" in refused(bytes(data))


@pytest.mark.parametrize(
    "message",
    [
        push(replica=2**63),
        push(replica="seven"),
        push(missing=[4]),
        push(missing=("four",)),
        push(block=None),
        push(outcome="applied"),
        Texts(("\ud800",)),
        Texts(("x" * 65536,)),
        Texts((3,)),  # type: ignore[arg-type]
        Block(0, 0, 0, 1),
        3,
    ],
)
def test_what_an_annotation_does_not_allow_is_our_own_mistake(message: object) -> None:
    with pytest.raises(LocalProtocolError, match=type(message).__name__):
        CODEC.encode(message)


def test_the_longest_text_passes() -> None:
    message = Texts(("x" * 65535,))

    assert CODEC.decode(CODEC.encode(message)) == message


def test_a_class_that_cannot_be_sent_is_refused_when_the_codec_is_made() -> None:
    @dataclass(frozen=True)
    class Loose:
        items: list[int]

    @dataclass(frozen=True)
    class Unbounded:
        items: tuple[Nothing, ...]

    @dataclass(frozen=True)
    class Hidden:
        item: int = field(default=0, init=False)

    @dataclass
    class Mutable:
        item: int

    for wrong in (Loose, Unbounded, Hidden, Mutable, int):
        with pytest.raises(ConfigError, match=wrong.__name__):
            Codec({1: wrong})
    with pytest.raises(ConfigError, match="code"):
        Codec({256: Plain})
    with pytest.raises(ConfigError, match="code"):
        Codec({1: Plain, 2: Plain})
