"""The tables of the deciders against what simulated clusters bring about.

Every legal pair of phase and event happens, many times over; every other pair is refused and changes nothing.
"""

import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import pytest

from squall.blocks import Block, BlockSet
from squall.coordinator import events as coordinator
from squall.coordinator.machine import CoordinatorMachine
from squall.machines import IllegalEventError, Machine, key_of
from squall.nouns import Noun
from squall.replica import session as replica
from squall.replica.downpour import Computed
from squall.replica.session import ReplicaSession
from squall.shard import events as shard
from squall.shard.events import Worker
from squall.shard.machine import ShardMachine
from squall.slices import RangeSet
from squall.wire.messages import (
    Ask,
    Books,
    Diverged,
    Fetch,
    Fetched,
    Goodbye,
    Held,
    Hold,
    Inquire,
    Lease,
    Leave,
    Push,
    Pushed,
    Recall,
    Refuse,
    Refused,
    Release,
    Released,
    Resume,
    Returned,
)
from tests.simulated.directed import DIRECTED
from tests.simulated.schedules import Schedule, random_schedule, run

TIMES = 20
MACHINES: tuple[type[Machine], ...] = (ShardMachine, CoordinatorMachine, ReplicaSession)
RARE = (
    "back_before_the_start",
    "closed_when_fetching",
    "diverged_before_the_start",
    "gone_before_the_start",
    "goodbye_before_the_start",
    "held",
    "held_and_ruined",
    "followed",
    "followed_and_stopped",
    "held_at_the_end",
    "held_at_the_start",
    "last_one_dies",
    "late_after_the_end",
    "notice_in_the_first_second",
    "recalled",
    "replaced",
    "ruined",
    "ruined_unheard",
    "ruined_while_others_wait",
    "saved_and_closed",
    "shard_killed_after_the_end",
    "shard_killed_before_the_start",
    "shard_killed_while_all_leave",
    "shard_killed_while_nobody_has_work",
    "shards_killed",
    "spoken_to_in_vain",
    "stopped_before_the_start",
    "stopped_twice",
    "unheard_recall",
)


def schedules() -> Iterator[Schedule]:
    """A fixed set, run in one process."""
    yield from (random_schedule(seed) for seed in range(60))
    yield from (DIRECTED[name](variant) for name in RARE for variant in range(TIMES))


@pytest.mark.timeout(180)
def test_every_legal_pair_happens_at_least_twenty_times() -> None:
    counts: Counter[tuple[str, str, str]] = Counter()
    for schedule in schedules():
        counts.update(run(schedule).judge.pairs)

    legal = [(kind.__name__, phase.name, event.__name__) for kind in MACHINES for phase, event in kind.TABLE]

    assert {pair: counts[pair] for pair in legal if counts[pair] < TIMES} == {}
    assert set(counts) == set(legal)


# Illegal pairs ------------------------------------------------------------------------------------------

BLOCK = Block(0, 0, 0, 1)
WORKER = Worker(replica=0, partition=0, incarnation=0)
PUSH = Push(
    request=1,
    block=BLOCK,
    attempt=1,
    minibatches=1,
    examples=1,
    based_on=(0,),
    absent=(),
    not_finite="",
    into=None,
)
TO_COORDINATOR = (Ask(request=1, finished=None), Goodbye(), Resume(leases=(), done=()))
OF_SHARDS = (
    Refused(request=1, block=BLOCK, outcomes=()),
    Diverged(block=BLOCK, tensor=0),
    Returned(incarnation=1, everywhere=()),
    Held(request=1, anywhere=(), everywhere=()),
    Released(request=1),
    Books(epoch=1, incarnation=0, anywhere=(), everywhere=(), refused=()),
)
TO_SHARDS = (
    Refuse(request=1, block=BLOCK),
    Hold(request=1, admitted=()),
    Release(request=1, name=""),
    Inquire(epoch=1),
)
OF_COORDINATOR = (
    Lease(request=1, block=BLOCK, attempt=1, refresh=False),
    Leave(request=1, why=""),
    Recall(why=""),
)
REPLIES = (
    Fetched(request=1, incarnation=0, states=()),
    Pushed(request=1, incarnation=0, outcomes=(), states=()),
)

EVENTS: dict[type[Machine], tuple[Any, ...]] = {
    ShardMachine: (
        shard.Attach(worker=WORKER),
        shard.Detach(worker=WORKER),
        *(shard.FromWorker(sender=WORKER, message=message) for message in (Fetch(request=1, into=0), PUSH)),
        *(shard.FromCoordinator(message=message) for message in TO_SHARDS),
        shard.ComeBack(),
        shard.Applied(),
        shard.NotFinite(tensor=0),
        shard.Save(name=""),
        shard.Close(),
    ),
    CoordinatorMachine: (
        coordinator.Joined(now=0.0, replica=0, incarnation=0),
        *(coordinator.FromReplica(now=0.0, replica=0, incarnation=0, message=m) for m in TO_COORDINATOR),
        *(coordinator.FromShard(now=0.0, shard=0, message=message) for message in OF_SHARDS),
        coordinator.Lost(now=0.0, replica=0, incarnation=0, why=""),
        coordinator.ShardLost(now=0.0, shard=0),
        coordinator.Tick(now=0.0),
        coordinator.Stop(now=0.0, why=""),
        coordinator.Checkpoint(now=0.0, name=""),
        coordinator.Copied(now=0.0, request=1),
    ),
    ReplicaSession: (
        replica.Started(),
        *(replica.FromShard(shard=0, message=message) for message in REPLIES),
        *(replica.FromCoordinator(message=message) for message in OF_COORDINATOR),
        Computed(loss=0.0, examples=1),
        replica.Reconnected(shard=0),
        replica.Redirected(),
        replica.Tick(),
    ),
}


def illegal_events(machine: Machine) -> list[Any]:
    """Every event that the table does not list in this phase: of its own kinds, and of the others'."""
    return [
        event
        for kind in MACHINES
        for event in EVENTS[kind]
        if (machine.phase, key_of(event)) not in machine.TABLE
    ]


def snapshot(value: Any) -> Any:
    """A state all the way down, in a form that compares by content."""
    match value:
        case None | bool() | int() | float() | str() | Enum():
            return value
        case BlockSet():
            return value.entries()
        case RangeSet():
            return tuple(value)
        case dict():
            return [(snapshot(key), snapshot(entry)) for key, entry in value.items()]
        case set() | frozenset():
            return {snapshot(entry) for entry in value}
        case list() | tuple() | deque():
            return tuple(snapshot(entry) for entry in value)
        case types.GeneratorType():
            frame = value.gi_frame
            return None if frame is None else (frame.f_lasti, repr(frame.f_locals))
    if isinstance(value, Noun):
        return type(value).__name__, *(snapshot(getattr(value, name)) for name in value.__struct_fields__)
    if is_dataclass(value):
        return type(value).__name__, *(snapshot(getattr(value, field.name)) for field in fields(value))
    if hasattr(value, "__dict__"):
        return type(value).__name__, snapshot(vars(value))
    raise TypeError(f"a decider holds a {type(value).__name__}, which is no plain state")


def phases(kind: type[Machine]) -> Iterable[Enum]:
    return {phase for phase, _ in kind.TABLE}


@cache
def refused() -> dict[tuple[type[Machine], Enum], int]:
    """How many machines of a kind and phase refused all illegal events unchanged."""
    counts: Counter[tuple[type[Machine], Enum]] = Counter()

    def watch(name: str, machine: Machine, event: Any, effects: tuple[Any, ...]) -> None:
        if counts[type(machine), machine.phase] >= 5:
            return
        counts[type(machine), machine.phase] += 1
        before = snapshot(vars(machine))
        for illegal in illegal_events(machine):
            with pytest.raises(IllegalEventError, match=f"phase {machine.phase.name} cannot take"):
                machine.handle(illegal)
        assert snapshot(vars(machine)) == before

    for name in (
        "ruined",
        "ruined_unheard",
        "followed",
        "saved_and_closed",
        "slow_to_begin",
        "stopped_twice",
        "recalled",
    ):
        for variant in range(3):
            run(DIRECTED[name](variant), also=watch)
    return dict(counts)


@pytest.mark.parametrize("kind", MACHINES)
def test_every_other_pair_is_refused_and_changes_nothing(kind: type[Machine]) -> None:
    met = refused()
    for phase in phases(kind):
        assert met[kind, phase] == 5, phase


def test_the_samples_hold_every_event_that_the_tables_list() -> None:
    for kind in MACHINES:
        assert {key_of(event) for event in EVENTS[kind]} == {event for _, event in kind.TABLE}
