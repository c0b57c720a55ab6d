"""Tests of squall.wire.messages: the vocabulary is whole, frozen, and each word has one code.

Faults planted, each caught: a message without a code · a code used twice · a message that is not frozen · positional
arguments allowed · a request without a number.
"""

from dataclasses import FrozenInstanceError, fields
from typing import get_args

import pytest

from squall.blocks import Block
from squall.wire import messages
from squall.wire.messages import CODES, Fetch, Goodbye, Message, Push

ALL = get_args(Message)
UNASKED = {messages.Recall, messages.Goodbye, messages.Diverged}


def test_each_message_has_one_code_that_fits_a_byte() -> None:
    assert set(CODES.values()) == set(ALL)
    assert len(CODES) == len(ALL)
    assert all(0 < code < 256 for code in CODES)


def test_codes_of_the_wire_are_never_given_to_another_message() -> None:
    names = "Fetch Fetched Push Pushed Ask Lease Leave Recall Goodbye Refuse Refused Diverged"
    assert [CODES[code].__name__ for code in range(1, 13)] == names.split()


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_message_is_frozen_and_takes_its_facts_by_name(kind: type) -> None:
    names = [field.name for field in fields(kind)]
    message = kind(**dict.fromkeys(names, 0))

    with pytest.raises((FrozenInstanceError, TypeError)):
        setattr(message, names[0] if names else "anything", 1)
    assert not hasattr(message, "__dict__")
    if names:
        with pytest.raises(TypeError):
            kind(*[0] * len(names))


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind not in UNASKED])
def test_each_request_and_each_answer_carries_a_number(kind: type) -> None:
    assert "request" in [field.name for field in fields(kind)]


def test_messages_compare_by_what_they_say() -> None:
    assert Fetch(request=1, into=0) == Fetch(request=1, into=0) != Fetch(request=1, into=1)
    assert Goodbye() == Goodbye()
    push = Push(
        request=1,
        block=Block(0, 0, 0, 1),
        attempt=1,
        minibatches=1,
        examples=1,
        based_on=(0,),
        absent=(),
        not_finite="",
        into=None,
    )
    assert len({push, push}) == 1
