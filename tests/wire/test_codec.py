"""Tests of squall.wire.codec: every message of a run there and back, bytes by hand, and no way to hurt a reader.

Faults planted to check these tests, each caught: unknown fields let pass · a decoder for any type · the classes'
tags taken off · decoding without strictness (`strict=False`) · errors of the decoder let through as they are · a type
that is not of the conversation encoded all the same.
"""

import random
import tracemalloc
import types
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.blocks import Block, Outcome
from squall.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from squall.nouns import Noun
from squall.wire.codec import Codec, code_of
from squall.wire.connection import CODEC
from squall.wire.control import Closings, Control, Failed
from squall.wire.crew import Crew
from squall.wire.joining import Joining
from squall.wire.messages import Ask, Fetch, Message, Push, Pushed, SliceState

ALL: tuple[type[Noun], ...] = (
    *get_args(Message),
    *get_args(Control),
    *get_args(Joining),
    *get_args(Crew),
)

blocks = st.builds(
    lambda stage, epoch, first, size: Block(stage, epoch, first, first + size),
    *[st.integers(0, 2**62 - 1)] * 3,
    st.integers(1, 2**62),
)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Whatever an annotation of a message allows."""
    simple = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bool: st.booleans(),
        types.NoneType: st.none(),
        Block: blocks,
    }
    if annotation in simple:
        return simple[annotation]
    if get_origin(annotation) in (Union, types.UnionType):
        return st.one_of(*map(values_of, get_args(annotation)))
    if get_origin(annotation) is tuple:
        elements = get_args(annotation)
        if ... not in elements:
            return st.tuples(*map(values_of, elements))
        return st.lists(values_of(elements[0]), max_size=4).map(tuple)
    if issubclass(annotation, Enum):
        return st.sampled_from(annotation)
    return messages_of(annotation)


def messages_of(kind: type[Noun]) -> st.SearchStrategy[Noun]:
    return st.builds(kind, **{name: values_of(hint) for name, hint in _annotations(kind).items()})


def _annotations(kind: type[Noun]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__struct_fields__}


messages = st.sampled_from(ALL).flatmap(messages_of)


def refused(data: bytes, codec: Codec = CODEC) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(data)
    return str(caught.value)


def test_a_message_is_an_array_of_its_code_and_its_fields() -> None:
    pushed = Pushed(
        request=7,
        incarnation=0,
        outcomes=(Outcome.APPLIED,),
        states=(SliceState(slice=1, version=300, minibatches=2),),
    )

    assert CODEC.encode(Fetch(request=-1, into=1)) == bytes([0x93, 1, 0xFF, 1])
    assert CODEC.encode(pushed) == (
        bytes([0x95, 4, 7, 0, 0x91, 0xA7]) + b"applied" + bytes([0x91, 0x94, 1, 0xCD, 1, 44, 2, 0])
    )


@settings(max_examples=400)
@given(messages)
def test_what_is_decoded_is_what_was_encoded(message: Noun) -> None:
    data = CODEC.encode(message)

    assert CODEC.decode(data) == message
    assert type(CODEC.decode(memoryview(data))) is type(message)
    assert CODEC.encode(CODEC.decode(data)) == data


@given(messages, st.data())
def test_no_prefix_of_a_message_is_a_message(message: Noun, draw: st.DataObject) -> None:
    data = CODEC.encode(message)

    refused(data[: draw.draw(st.integers(0, len(data) - 1))])


@given(messages, st.binary(min_size=1, max_size=5))
def test_nothing_may_lie_behind_a_message(message: Noun, more: bytes) -> None:
    refused(CODEC.encode(message) + more)


@settings(max_examples=300)
@given(messages, st.randoms(use_true_random=False))
def test_changed_bytes_are_refused_or_a_message_that_keeps_to_its_annotations(
    message: Noun, chance: random.Random
) -> None:
    data = bytearray(CODEC.encode(message))
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)

    try:
        received = CODEC.decode(bytes(data))
    except RemoteProtocolError:
        return
    assert type(received) in ALL
    again = msgspec.convert(
        msgspec.to_builtins(received), type(received)
    )  # looks at each field by its annotation
    assert CODEC.encode(again) == CODEC.encode(received)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_a_message(data: bytes) -> None:
    try:
        assert type(CODEC.decode(data)) in ALL
    except RemoteProtocolError:
        return


@pytest.mark.parametrize(
    "prefix", ["dd ff ff ff ff", "dc ff ff", "c6 ff ff ff ff", "db ff ff ff ff", "df ff ff ff ff"]
)
def test_a_count_is_checked_before_memory_is_allocated(prefix: str) -> None:
    huge = bytes.fromhex(prefix) + b"\1" * 20
    ask = bytes([0x9B, 3, 1, 0x94, 0, 0, 0, 1, 1, 1, 1])  # a Push, up to the versions that it is based on

    tracemalloc.start()
    try:
        refused(huge)
        refused(ask + huge)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 100_000


def test_depth_beyond_all_reason_is_refused() -> None:
    refused(b"\x91" * 100_000)
    refused(bytes([0x93, 1, 1]) + b"\x91" * 100_000)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("", "truncated"),
        ("93 63 00 00", "Invalid value 99"),
        ("92 01 00", "at least length 3"),
        ("94 01 00 00 00", "at most length 2"),
        ("93 01 00 a1 31", "Expected `int`, got `str`"),
        ("93 01 00 c3", "Expected `int`, got `bool`"),
        ("93 01 00 cb 3f f8 00 00 00 00 00 00", "Expected `int`, got `float`"),
        ("93 01 00 c0", "Expected `int`, got `None`"),
        ("82 01 00 02 00", "got `object`"),
        ("93 07 01 a1 ff", "malformed"),
    ],
)
def test_each_kind_of_malformed_message_is_told(data: str, told: str) -> None:
    assert told in refused(bytes.fromhex(data))


def test_what_a_constructor_refuses_is_the_peers_mistake() -> None:
    sound = msgspec.to_builtins(Ask(request=1, finished=None))
    block = [0, 0, 6, 6]  # empty
    finished = [block, 1, "applied", "", 0.0, 1, 0.0]
    assert CODEC.decode(msgspec.msgpack.encode(sound)) == Ask(request=1, finished=None)

    assert "a Block needs" in refused(msgspec.msgpack.encode([code_of(Ask), 1, finished]))


@pytest.mark.parametrize(
    "message",
    [
        Fetch(request=2**64, into=0),
        Fetch(request=object(), into=0),  # type: ignore[arg-type]
        Failed(kind="\ud800", role="", step="", line="", error="", traceback=""),
        Block(0, 0, 0, 1),
    ],
)
def test_what_cannot_be_sent_is_our_own_mistake(message: Noun) -> None:
    with pytest.raises(LocalProtocolError, match=type(message).__name__):
        CODEC.encode(message)


def test_a_long_message_passes() -> None:
    failed = Failed(kind="user", role="", step="", line="", error="", traceback="x" * 3_000_000)

    assert CODEC.decode(CODEC.encode(failed)) == failed
    assert CODEC.decode(CODEC.encode(Closings(blocks=()))) == Closings(blocks=())


def test_a_class_that_cannot_be_sent_is_refused_when_the_codec_is_made() -> None:
    class Untagged(Noun):
        number: int

    class Ambiguous(Noun, tag=1):
        item: list[int] | tuple[int, ...]

    class Twice(Noun, tag=3):
        number: int

    with pytest.raises(ConfigError, match="Untagged"):
        Codec(Untagged)
    with pytest.raises(ConfigError, match="Ambiguous"):
        Codec(Ambiguous)
    with pytest.raises(ConfigError, match="Twice"):
        Codec(Push, Twice)
