"""Tests of squall.cluster.faults: the language of what goes wrong.

Faults planted, each caught: milliseconds taken as seconds · a probability above 1 accepted · an unknown kind accepted ·
`restart` lost · the spread of a delay without its unit · a cut at a step accepted.
"""

import pytest

from squall.cluster.faults import (
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
    parse,
)
from squall.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:replica1@t=2", Kill("replica1", AtTime(2.0))),
        ("kill:replica1", Kill("replica1", AtTime(0.0))),
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
    ],
)
def test_a_text_is_read_as_the_fault_it_says(text: str, fault: Fault) -> None:
    assert parse(text) == (fault,)


def test_faults_are_separated_by_semicolons_and_none_is_none() -> None:
    assert parse(" drop:ask=0.1 ;; dup:recall=0.2; ") == (Drop("ask", 0.1), Duplicate("recall", 0.2))
    assert parse("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "kill:evaluator@t=2",
        "kill:replica1@step=1.5",
        "kill:replica1@p=1.5",
        "kill:replica1@step=2s",
        "drop:push=1.5",
        "drop:gossip=0.5",
        "dup:push",
        "delay=fast",
        "cut:replica2|shard0,5s@step=1",
        "pause:replica2@t=1",
        "burn:replica1",
    ],
)
def test_what_is_not_understood_is_named_with_examples_and_kinds(text: str) -> None:
    with pytest.raises(ConfigError, match="expected something like 'kill:replica1@t=2'") as caught:
        parse(f"drop:ask=0.1; {text}")

    assert repr(text) in str(caught.value)
    assert all(kind in str(caught.value) for kind in KINDS)
