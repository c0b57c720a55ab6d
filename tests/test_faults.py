"""Tests of squall.faults: the language of what goes wrong.

Faults planted, each caught: milliseconds taken as seconds · a probability above 1 accepted · an unknown kind accepted ·
`restart` lost, read and printed · the spread of a delay without its unit · a cut at a step accepted · a fault printed
without its time · text behind a fault passed over · the place of an error counted from 0.
"""

import random
from typing import get_args

import pytest

from squall.cluster.kinds import KIND_OF
from squall.errors import ConfigError
from squall.faults import (
    KINDS,
    AtStep,
    AtTime,
    Chance,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Fault,
    Kill,
    Pause,
    faults_of,
    in_words,
    parse,
)
from squall.wire.messages import Bundle, Message


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:replica1@t=2", Kill("replica1", AtTime(2.0))),
        ("kill:replica1", Kill("replica1", AtTime(0.0))),
        ("kill:evaluator@t=2", Kill("evaluator", AtTime(2.0))),
        ("kill:replica1,restart=1@step=3", Kill("replica1", AtStep(3), 1.0)),
        ("kill:replica,restart=500ms@p=0.01", Kill("replica", Chance(0.01), 0.5)),
        ("pause:shard0,3s@t=1.5s", Pause("shard0", 3.0, AtTime(1.5))),
        ("pause:coordinator,250ms@t=1", Pause("coordinator", 0.25, AtTime(1.0))),
        ("drop:push.reply=0.05", Drop("push.reply", 0.05)),
        ("dup:*=1", Duplicate("*", 1.0)),
        ("delay=50ms+-20", Delay(0.05, 0.02)),
        ("delay=1s+-200ms", Delay(1.0, 0.2)),
        ("delay=2", Delay(2.0)),
        ("cut:replica2|shard0,5s@t=1", Cut("replica2", "shard0", 5.0, AtTime(1.0))),
        ("cut:replica2|shard0,5s", Cut("replica2", "shard0", 5.0, AtTime(0.0))),
    ],
)
def test_a_text_is_read_as_the_fault_it_says_and_printed_as_one_that_is_read_alike(
    text: str, fault: Fault
) -> None:
    assert parse(text) == (fault,)
    assert parse(str(fault)) == (fault,)


def test_faults_are_separated_by_semicolons_and_none_is_none() -> None:
    assert parse(" drop:ask=0.1 ;; dup:recall=0.2; ") == (Drop("ask", 0.1), Duplicate("recall", 0.2))
    assert parse("") == ()
    assert in_words(parse("kill:replica@p=0.01;delay=50ms")) == "kill:replica@p=0.01; delay=0.05s"


def test_any_faults_come_back_from_their_own_text() -> None:
    for seed in range(300):
        draw = random.Random(seed)

        def number(draw: random.Random = draw) -> float:
            return draw.choice([0.0, 1.0, 3.25, 1e-7, draw.random(), draw.random() * 1e9])

        role = draw.choice(["replica", "replica12", "shard", "shard0", "coordinator", "evaluator"])
        when = draw.choice([AtTime(number()), AtStep(draw.randrange(10**6)), Chance(draw.random())])
        kind = draw.choice(sorted(KINDS))
        faults: list[Fault] = [
            Kill(role, when, draw.choice([None, number()])),
            Pause(role, number(), when),
            Drop(kind, draw.random()),
            Duplicate(kind, draw.random()),
            Delay(number(), number()),
            Cut(role, "shard1", number(), AtTime(number())),
        ]
        draw.shuffle(faults)
        assert list(parse(in_words(faults))) == faults


@pytest.mark.parametrize(
    ("text", "place", "expected", "got"),
    [
        ("burn:replica1", 1, "kill, pause, drop, dup, delay or cut", "'burn:replica1'"),
        (
            "kill:launcher@t=2",
            6,
            "replica, shard (all of them, or with a number), coordinator or",
            "'launcher@t=2'",
        ),
        ("kill:coordinator1", 17, "its end", "'1'"),
        ("kill:replica1@step=1.5", 20, "a whole number of minibatches", "'1.5'"),
        ("kill:replica1@step=2s", 21, "its end", "'s'"),
        ("kill:replica1@p=1.5", 17, "a probability from 0 to 1", "'1.5'"),
        ("kill:replica1@time=2", 15, "t=, step= or p=", "'time=2'"),
        ("kill:replica1,again=1", 15, "restart=, as in kill:replica1,restart=1s@t=2", "'again=1'"),
        ("pause:replica2@t=1", 15, "a comma and how long, as in pause:replica2,3s@step=20", "'@t=1'"),
        ("pause:replica2,", 16, "seconds, as in 3, 3s or 250ms", "nothing more"),
        ("drop:push=1.5", 11, "a probability from 0 to 1", "'1.5'"),
        ("drop:gossip=0.5", 6, "one of *, ask, ask.reply, fetch", "'gossip=0.5'"),
        ("dup:push", 9, "'='", "nothing more"),
        ("delay=fast", 7, "seconds, as in 3, 3s or 250ms", "'fast'"),
        ("cut:replica2,5s", 13, "'|' and another role", "',5s'"),
        ("cut:replica2|shard0,5s@step=1", 23, "@t=, for a cut has no minibatches of its own", "'@step=1'"),
    ],
)
def test_what_is_not_understood_is_told_with_its_place(
    text: str, place: int, expected: str, got: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"drop:ask=0.1; {text}")

    error = caught.value
    assert error.subject == f"the fault {text!r}, character {place}"
    assert error.expected.startswith(expected)
    assert error.got == got


def test_faults_are_taken_as_text_or_as_values_and_nothing_else() -> None:
    faults = (Drop("ask", 0.5),)
    assert faults_of("drop:ask=0.5", "Job(chaos=)") == faults_of(list(faults), "Job(chaos=)") == faults
    for told in (3, [3], None):
        with pytest.raises(
            ConfigError, match=r"Job\(chaos=\): expected a text of faults, or a sequence of them"
        ):
            faults_of(told, "Job(chaos=)")  # type: ignore[arg-type]


def test_every_message_of_the_protocol_has_a_kind_of_the_language() -> None:
    assert set(KIND_OF) == set(get_args(Message)) - {Bundle}  # which is what is in it
    assert set(KIND_OF.values()) == KINDS - {"*"}
