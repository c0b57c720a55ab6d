"""Tests of squall.observe.story: what became of a run, from what it left.

Faults planted here by hand, each seen to fail a test: the records of an earlier life taken for the newest · a death matched
with the life after the next · what was rolled back counted as done · done counted on one slice only · a cut-off run told
as failed · what is lost counted from the start · blocks redone counted once for each slice · a wait counted from when it was
told · one that others join told twice · one that was over told to the end.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from squall.blocks import Block
from squall.observe.events import (
    AlsoFailed,
    Ended,
    Event,
    Joined,
    Progress,
    Redone,
    Refused,
    Silent,
    as_record,
)
from squall.observe.events import Left as LeftRun
from squall.observe.ledger import LEDGER_DTYPE, Ledger
from squall.observe.story import GONE, Durable, Left, Story, Wait, newest_life, tell

BLOCK = Block(0, 1, 4, 6)


def rows(*told: tuple[int, int, str, int]) -> Ledger:
    """Rows of (slice, block, outcome, attempt), each of two minibatches, a second apart."""
    ledger = np.zeros(len(told), LEDGER_DTYPE)
    for at, (number, block, outcome, attempt) in enumerate(told):
        ledger[at]["slice"], ledger[at]["block"], ledger[at]["outcome"] = number, block, outcome
        ledger[at]["attempt"], ledger[at]["minibatches"], ledger[at]["first"] = attempt, 2, 2 * block
        ledger[at]["time_s"], ledger[at]["replica"] = float(at), 1
    return ledger


def story(events: Sequence[Event], ledger: Ledger | None = None, **settings: Any) -> Story:
    usual = {
        "history": [as_record(event) for event in events],
        "ledger": rows() if ledger is None else ledger,
    }
    return tell(Left(**{"slices": 2} | usual | settings))


def joined(role: str, incarnation: int, time_s: float = 0.0) -> Joined:
    return Joined(time_s=time_s, role=role, incarnation=incarnation)


def left(role: str, incarnation: int, time_s: float, why: str = "was killed by SIGKILL") -> LeftRun:
    return LeftRun(time_s=time_s, role=role, why=why, incarnation=incarnation)


def test_each_death_is_told_with_its_life_and_when_the_next_one_came() -> None:
    told = story(
        [
            joined("replica0.0", 0),
            joined("replica1.0", 0),
            left("replica1.0", 0, 2.0),
            joined("replica1.0", 1, 2.5),
            left("replica1.0", 1, 3.0, "ran out of memory"),
            left("replica0.0", 0, 4.0),
            joined("replica1.0", 2, 4.25),
            left("evaluator", 0, 5.0),
            left("replica1.0", 2, 6.0, "steps"),
            Ended(time_s=7.0, why="steps"),
        ]
    )
    assert [(d.role, d.incarnation, d.time_s, d.back_s) for d in told.deaths] == [
        ("replica1.0", 0, 2.0, 2.5),
        ("replica1.0", 1, 3.0, 4.25),
        ("replica0.0", 0, 4.0, None),
        ("evaluator", 0, 5.0, None),
    ]
    assert told.deaths[1].why == "ran out of memory"
    assert (told.state, told.cause, told.after_s) == ("done", None, 7.0)


def test_how_it_ended_and_why() -> None:
    def of(*events: Event, **settings: Any) -> tuple[str, str | None]:
        told = story([joined("replica0.0", 0), *events], **settings)
        return told.state, told.cause

    assert of(Ended(time_s=1.0, why="time")) == ("done", None)
    assert of(Ended(time_s=1.0, why="interrupted")) == ("stopped", None)
    assert of(Ended(time_s=1.0, why="failed", error="shard0 was\nkilled")) == ("failed", "shard0 was killed")
    assert of() == ("cut off", GONE)
    assert of(is_going_on=True) == ("going on", None)


def test_what_is_done_is_on_every_slice_and_what_was_rolled_back_is_not() -> None:
    ledger = rows(
        (0, 0, "applied", 1),
        (1, 0, "applied", 1),
        (0, 1, "applied", 2),
        (1, 1, "applied", 2),
        (0, 2, "applied", 1),
        (0, 1, "repeated", 3),
        (1, 3, "not_finite", 1),
        (0, 0, "rolled_back", 1),
        (1, 0, "rolled_back", 1),
        (0, 0, "applied", 2),
    )
    kept = Durable(path="checkpoints/000001", minibatches=1)
    told = story([], ledger, durable=kept, resumed=1)
    assert (told.minibatches, told.lost) == (2, 1)
    assert (told.redone, told.repeated, told.rolled_back) == (2, 1, 2)
    assert told.last == "epoch 0, positions 0 to 1, by replica 1, at 9.0 s"
    assert story([], ledger).lost == 2
    assert story([], ledger, durable=Durable(path="checkpoints/000002", minibatches=9)).lost == 0


def test_only_the_newest_life_is_told_however_the_ones_before_ended() -> None:
    first = [joined("replica0.0", 0), left("replica0.0", 0, 1.0), joined("replica0.0", 1)]
    events: list[Event] = [
        *first,
        Ended(time_s=2.0, why="failed", error="x"),
        *first,
        *first[:1],
        joined("shard0", 0),
    ]
    history = [as_record(event) for event in events]
    assert newest_life(history) == history[-2:]
    assert story(events).deaths == ()
    assert len(newest_life(history[:-2])) == 3
    assert len(newest_life(history[:4])) == 4


def test_what_failed_after_the_cause_is_told_after_it() -> None:
    told = story(
        [
            AlsoFailed(time_s=1.0, error="shard0\nexited"),
            Ended(time_s=2.0, why="failed", error="ValueError: x"),
        ]
    )
    assert (told.cause, told.also) == ("ValueError: x", ("shard0 exited",))


def test_refusals_and_the_extent_of_the_run_are_told() -> None:
    told = story(
        [
            Redone(time_s=1.0, block=BLOCK, attempt=2, replica=0, why="lost"),
            Refused(time_s=1.0, block=BLOCK, why="the gradient of 'w' was not finite"),
            Progress(time_s=3.0, stage=0, epoch=1, minibatches=7, total_minibatches=40),
        ]
    )
    assert told.refused == ("epoch 1, positions 4 to 5: the gradient of 'w' was not finite",)
    assert told.total == 40
    assert (told.minibatches, told.last, told.lost) == (0, "", 0)


def silent(role: str, time_s: float, seconds: float, *waiting: str) -> Silent:
    return Silent(time_s=time_s, role=role, seconds=seconds, waiting=waiting)


def test_waits_are_told_with_when_they_began_and_how_long_they_were() -> None:
    told = story(
        [
            silent("shard1", 6.0, 5.0, "replica0.0"),
            silent("shard0", 7.0, 5.5, "replica0.0"),
            silent("shard1", 9.0, 5.0, "replica1.0"),
            silent("shard1", 13.0, 12.0),
            silent("shard1", 20.0, 6.0, "replica0.0"),
            Ended(time_s=30.0, why="stopped"),
        ]
    )
    assert told.waits == (
        Wait(role="shard1", since_s=1.0, seconds=12.0),
        Wait(role="shard0", since_s=1.5),
        Wait(role="shard1", since_s=14.0),
    )
