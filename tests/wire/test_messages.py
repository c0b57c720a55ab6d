"""Tests of squall.wire.messages: the vocabulary is whole, frozen, and each word has one code.

Faults planted, each caught: a message without a code · a code used twice · a message that is not frozen · positional
arguments allowed · a request without a number.
"""

from typing import get_args

import pytest

from squall.blocks import Block
from squall.nouns import Noun
from squall.wire import messages
from squall.wire.codec import code_of
from squall.wire.control import Control
from squall.wire.messages import Fetch, Goodbye, Message, Push

ALL = get_args(Message)
UNASKED = {
    messages.Recall,
    messages.Goodbye,
    messages.Diverged,
    messages.Returned,
    messages.Resume,
    messages.Bundle,
}
OF_AN_EPOCH = {messages.Inquire, messages.Books}


def test_each_message_has_one_code_that_fits_a_byte() -> None:
    codes = [code_of(kind) for kind in (*ALL, *get_args(Control))]

    assert len(set(codes)) == len(codes)
    assert all(isinstance(code, int) and 0 < code < 128 for code in codes)


def test_codes_of_the_wire_are_never_given_to_another_message() -> None:
    names = "Fetch Fetched Push Pushed Ask Lease Leave Recall Goodbye Refuse Refused Diverged Hold Held Release Released"
    names += " Returned Inquire Books Resume Bundle"
    assert {code_of(kind): kind.__name__ for kind in ALL} == dict(enumerate(names.split(), 1))


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_message_is_frozen_and_takes_its_facts_by_name(kind: type[Noun]) -> None:
    names = list(kind.__struct_fields__)
    message = kind(**dict.fromkeys(names, 0))

    with pytest.raises(AttributeError):
        setattr(message, names[0] if names else "anything", 1)
    assert not hasattr(message, "__dict__")
    if names:
        with pytest.raises(TypeError):
            kind(*[0] * len(names))


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind not in UNASKED])
def test_each_request_and_each_answer_carries_a_number(kind: type[Noun]) -> None:
    assert ("epoch" if kind in OF_AN_EPOCH else "request") in list(kind.__struct_fields__)


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
