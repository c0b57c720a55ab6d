"""Tests of squall.observe.events: each event is one valid JSON object that says all it knows.

Faults planted here by hand, each seen to fail a test: no replacement of NaN · infinity let through · the class's name
left out · a Block handed out as it is · NumPy numbers handed out as they are.
"""

import json
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_args

import numpy as np
import pytest

from squall.blocks import Block
from squall.observe.events import (
    AlsoFailed,
    Checkpointed,
    Disturbed,
    Ended,
    Evaluated,
    Event,
    Joined,
    Left,
    Link,
    Progress,
    Recovered,
    Redone,
    Refused,
    RoleStatus,
    Silent,
    Unkept,
    as_record,
)

BLOCK = Block(0, 2, 10, 15)
EVENTS: list[Event] = [
    Progress(
        time_s=1.0,
        stage=0,
        epoch=0,
        minibatches=3,
        links=(Link(sender="replica0.0", receiver="shard0", bytes_per_second=5.0),),
        roles=(RoleStatus(name="replica0.0", state="working", minibatches=3),),
        waits=("replica0.0 waits for shard0",),
    ),
    Evaluated(time_s=1.0, epoch=0, minibatches=3, metrics={"test_loss": 0.5}, versions=(3, 4)),
    Joined(time_s=1.0, role="replica0.0", incarnation=1),
    Left(time_s=1.0, role="replica0.0", why="killed by signal 9", incarnation=2),
    Disturbed(time_s=1.5, role="replica0", what="kill", fault="kill:replica0@t=1"),
    Redone(time_s=1.0, block=BLOCK, attempt=2, replica=1, why="replica 0 was lost"),
    Refused(time_s=1.0, block=BLOCK, why="not finite"),
    Checkpointed(time_s=1.0, path="checkpoints/3", minibatches=3),
    Recovered(time_s=1.0, role="shard0", incarnation=1, lost=3),
    Unkept(time_s=1.0, role="shard0", why="No space left on device"),
    Silent(time_s=6.0, role="shard0", seconds=5.0, waiting=("replica0.0",)),
    AlsoFailed(time_s=1.0, error="shard0 was killed by SIGKILL"),
    Ended(time_s=1.0, why="all steps are done"),
]


def test_the_list_above_has_every_event() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_a_record_is_strict_json_with_the_class_and_every_field(event: Event) -> None:
    record = as_record(event)

    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert list(record) == ["event", *(field.name for field in fields(event))]
    assert record["event"] == type(event).__name__


def test_records_within_a_record_are_plain_too() -> None:
    progress, redone = as_record(EVENTS[0]), as_record(EVENTS[5])

    assert progress["links"] == [{"sender": "replica0.0", "receiver": "shard0", "bytes_per_second": 5.0}]
    assert progress["roles"] == [{"name": "replica0.0", "state": "working", "minibatches": 3}]
    assert redone["block"] == {"stage": 0, "epoch": 2, "first": 10, "stop": 15}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), np.float32("nan")])
def test_a_number_that_is_not_finite_becomes_null(value: float) -> None:
    record = as_record(Evaluated(time_s=1.0, epoch=0, minibatches=1, metrics={"test_loss": value}))
    assert record["metrics"] == {"test_loss": None}


def test_numbers_of_numpy_become_plain_ones() -> None:
    numpys: Any = {"metrics": {"a": np.float32(0.5)}, "versions": (np.int64(3),)}
    record = as_record(Evaluated(time_s=1.0, epoch=0, minibatches=1, **numpys))
    assert (type(record["metrics"]["a"]), record["metrics"]["a"]) == (float, 0.5)
    assert (type(record["versions"][0]), record["versions"][0]) == (int, 3)


def test_what_json_has_no_word_for_is_refused_by_its_kind() -> None:
    with pytest.raises(TypeError, match="but got object"):
        as_record(Ended(time_s=1.0, why=object()))  # type: ignore[arg-type]


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        EVENTS[2].time_s = 2.0  # type: ignore[misc]
