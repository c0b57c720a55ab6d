"""Tests of squall.cluster.world: what time, links and faults do, with one lone or a few replicas.

Faults planted, each caught: a paused role acting · a copy of a message lost · the latency of a duplicate taken once ·
a cut that never ends · a kill at a step one minibatch late · a kind of role taken for its first · `linger_s` ignored.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from squall.blocks import BlockSet
from squall.cluster.links import Link, Links
from squall.cluster.modelled import ModelledArithmetic
from squall.cluster.world import NoEndError, Outside, Pace, World
from squall.coordinator.events import Ended, Stop
from squall.coordinator.machine import CoordinatorMachine
from squall.coordinator.members import Patience
from squall.coordinator.work import WorkPlan
from squall.faults import Fault, parse
from squall.machines import Machine, key_of
from squall.replica.downpour import DownpourLoop, downpour
from squall.shard.books import SliceBook
from squall.shard.machine import ShardMachine


@dataclass
class Seen:
    """Every event that a role was handed: when, whose, which kind."""

    events: list[tuple[float, str, str]] = field(default_factory=list)

    def times(self, role: str, kind: str) -> list[float]:
        return [time for time, name, what in self.events if (name, what) == (role, kind)]

    def count(self, kind: str) -> int:
        return Counter(what for _, _, what in self.events)[kind]


def make_world(
    seen: Seen,
    *,
    faults: Sequence[Fault] = (),
    replicas: int = 1,
    minibatches: int = 4,
    pace: Pace | None = None,
    outside: Sequence[Outside] = (),
    seed: int = 0,
) -> World:
    plan = WorkPlan(
        stage=0, minibatches_per_epoch=minibatches, block_length=1, epochs=1, steps=None, warm_start=0
    )

    def watch(name: str, machine: Machine, event: Any, effects: tuple[Any, ...]) -> None:
        seen.events.append((world.now, name, key_of(event).__name__))

    world = World(
        directs=CoordinatorMachine(
            plan=plan, num_replicas=replicas, num_shards=1, settled=BlockSet(), patience=Patience(start_s=9.0)
        ),
        shards=[ShardMachine(shard=0, incarnation=0, books=(SliceBook.new(0, 0),))],
        slices=[(0,)],
        num_replicas=replicas,
        loop=lambda: downpour(DownpourLoop(n_fetch=1, n_push=1, has_local_steps=False)),
        arithmetic=ModelledArithmetic(),
        pace=pace or Pace(jitter=0.0),
        faults=faults,
        outside=outside,
        seed=seed,
        watch=watch,
    )
    return world


def run(*, faults: str = "", linger_s: float = 0.0, **facts: Any) -> Seen:
    seen = Seen()
    make_world(seen, faults=parse(faults), **facts).run(bound_s=500.0, linger_s=linger_s)
    return seen


def test_a_minibatch_takes_the_time_that_its_replicas_speed_says() -> None:
    seen = run(pace=Pace(speeds=(4.0,), jitter=0.0, links=Links(Link(0.0))))
    assert seen.times("replica0", "Computed") == [0.25, 0.5, 0.75, 1.0]


def test_the_same_seed_gives_the_same_story_and_another_one_another() -> None:
    faults = "delay=50ms+-40ms; drop:*=0.1; dup:*=0.1"
    stories = [run(faults=faults, seed=seed, replicas=2, pace=Pace()).events for seed in (3, 3, 4)]
    assert stories[0] == stories[1] != stories[2]


def test_a_paused_role_takes_nothing_until_it_goes_on_and_then_everything() -> None:
    seen = run(faults="pause:replica0,5s@t=1.5")
    times = [time for time, name, _ in seen.events if name == "replica0"]
    assert not [time for time in times if 1.5 < time < 6.5]
    assert seen.count("Computed") == 4


def test_a_dropped_message_is_sent_again_until_it_passes() -> None:
    seen = run(faults="drop:push=0.5", seed=1)
    assert seen.count("Applied") == 4
    assert seen.times("replica0", "Computed")[-1] > 4.1, "some pushes had to be sent again"


def test_a_message_that_is_always_lost_leaves_a_schedule_without_an_end() -> None:
    with pytest.raises(NoEndError, match="500"):
        run(faults="drop:push=1")


def test_a_duplicated_message_arrives_twice_and_is_applied_once() -> None:
    seen = run(faults="dup:push=1")
    assert (seen.count("Push"), seen.count("Applied")) == (8, 4)


def test_a_delay_lies_within_its_spread_for_each_message() -> None:
    seen = run(faults="delay=100ms+-50ms", minibatches=12, pace=Pace(jitter=0.0, resend_s=99.0))
    ways = [
        arrived - sent
        for sent, arrived in zip(
            seen.times("replica0", "Computed"), seen.times("shard0", "Push"), strict=True
        )
    ]
    assert all(0.05 <= way <= 0.152 for way in ways)
    assert len(set(ways)) == 12


def test_a_cut_ends_after_its_time() -> None:
    seen = run(faults="cut:replica0|shard0,5s@t=0.5")
    pushes = seen.times("shard0", "Push")
    assert not [time for time in pushes if time < 5.5]
    assert seen.count("Applied") == 4


def test_a_replica_killed_at_a_step_dies_before_it_and_comes_back() -> None:
    seen = run(faults="kill:replica0,restart=2@step=2")
    (lost,) = seen.times("coordinator", "Lost")
    assert sum(time < lost + 1.5 for time in seen.times("replica0", "Computed")) == 2
    assert seen.count("Joined") == 2
    assert seen.count("Computed") == 4, "the third minibatch never ended in the first life"


def test_a_kind_of_role_stands_for_all_of_it() -> None:
    seen = run(faults="kill:replica,restart=1@t=1.5", replicas=3, minibatches=9)
    assert len(seen.times("coordinator", "Lost")) == 3


def test_when_no_replica_is_left_the_run_stops() -> None:
    seen = Seen()
    assert make_world(seen, faults=parse("kill:replica0@t=1.5")).run() == "no replica is left"


def test_events_from_outside_come_when_they_should() -> None:
    stop = Outside(at_s=2.5, role="coordinator", event=Stop(now=2.5, why="enough"))
    seen = Seen()
    assert make_world(seen, outside=(stop,)).run() == "enough"
    assert seen.times("coordinator", "Stop") == [2.5]


def test_who_may_go_on_is_asked_and_why_not_is_the_reason_of_the_end() -> None:
    seen = Seen()
    world = make_world(seen)
    assert world.run(may_go_on=lambda: "time" if world.now >= 2.0 else None) == "time"
    assert seen.count("Computed") < 4


def test_what_is_late_arrives_after_the_end_if_time_goes_on() -> None:
    assert run(faults="dup:goodbye=1").count("Goodbye") == 1
    assert run(faults="dup:goodbye=1", linger_s=1.0).count("Goodbye") == 2


def test_the_end_is_told() -> None:
    told: list[object] = []
    world = make_world(Seen())
    world._tell = lambda now, effect: told.append(effect)
    world.run()
    assert told[-1] == Ended(why="epochs")
