"""Whole clusters by the thousand, in one thread: whatever goes wrong, every block is applied once on every slice.

A failing seed says which command replays it. Each effect of each decider is compared with `coordinator_rules`,
`shard_rules` and `replica_rules`; `facts` judges the end. The faults that these see are `mutants`'s.
"""

import re
from collections import Counter
from dataclasses import replace

import pytest

from squall.blocks import Block, Outcome
from squall.cluster.world import Pace
from squall.faults import AtTime, Cut, Delay, Drop, Duplicate, Kill, Pause
from tests.simulated import facts, schedules, suite
from tests.simulated.directed import DIRECTED
from tests.simulated.schedules import Schedule, random_schedule, run

NUM_SCHEDULES = 2_000
NUM_NIGHTLY = 5_000
CHUNK = 100


@pytest.mark.parametrize(
    "first",
    [
        *range(0, NUM_SCHEDULES, CHUNK),
        *(
            pytest.param(first, marks=pytest.mark.nightly)
            for first in range(NUM_SCHEDULES, NUM_NIGHTLY, CHUNK)
        ),
    ],
)
def test_random_schedules_end_with_every_block_applied_once_or_refused(first: int) -> None:
    for seed in range(first, first + CHUNK):
        suite.check(random_schedule(seed), seed)


@pytest.mark.parametrize("name", DIRECTED)
def test_directed_schedules_end_with_every_block_applied_once_or_refused(name: str) -> None:
    for variant in range(4):
        suite.check(DIRECTED[name](variant), f"{name}/{variant}")


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.nightly) for first in range(CHUNK, 500, CHUNK))]
)
def test_checkpoints_beside_a_paused_replica_are_each_one_cut(first: int) -> None:
    """Three checkpoints of a run in which one replica stands still, and all else that chance brings."""
    num_whole = 0
    for seed in range(first, first + CHUNK):
        drawn = random_schedule(seed)
        schedule = replace(
            drawn,
            num_replicas=max(2, drawn.num_replicas),
            minibatches_per_epoch=12,
            steps=None,
            epochs=1,
            rests=False,
            checkpoints=(1.5, 2.5, 4.0),
            faults=(*drawn.faults, Pause("replica1", 30.0, AtTime(1.0 + seed % 3))),
        )
        result = run(schedule)
        assert not facts.faults_of(result), schedule
        stored = Counter(store.name for _, store in result.arithmetic.stored)
        num_whole += sum(count == schedule.num_shards for count in stored.values())
    assert num_whole > CHUNK // 2


def test_without_faults_every_checkpoint_that_is_asked_for_is_stored() -> None:
    for seed in range(40):
        drawn = replace(random_schedule(seed), faults=(), poisoned=(), sick=())
        schedule = replace(
            drawn, minibatches_per_epoch=20, epochs=2, steps=None, checkpoints=(1.5, 3.0), warm_start=0
        )
        result = run(replace(schedule, rests=False, pace=Pace(apply_s=drawn.pace.apply_s)))
        names = [store.name for _, store in result.arithmetic.stored]
        assert Counter(names) == {"0": schedule.num_shards, "1": schedule.num_shards}, seed


def test_a_coordinator_that_follows_leaves_blocks_with_those_who_hold_them() -> None:
    """Where nothing else goes wrong, no block is pushed twice, though coordinators are killed."""
    for seed in range(40):
        kills = tuple(Kill("coordinator", AtTime(at_s + 0.05 * seed), 0.3) for at_s in (1.0, 4.0))
        drawn = replace(random_schedule(seed), faults=kills, poisoned=(), sick=(), waiting=None)
        drawn = replace(drawn, pace=Pace(jitter=0.1))  # else a slow one is overdue now and then
        result = run(replace(drawn, minibatches_per_epoch=20, epochs=1, steps=None))
        assert not facts.faults_of(result)
        assert result.judge.num_followers > 0
        assert {row.outcome for _, _, row in result.arithmetic.rows} == {Outcome.APPLIED}, seed


def test_random_schedules_hold_faults_of_every_kind() -> None:
    drawn = [random_schedule(seed) for seed in range(200)]
    for kind in (Cut, Delay, Drop, Duplicate, Kill, Pause):
        assert sum(kind in schedule.has for schedule in drawn) > 20, kind
    kills = [fault for schedule in drawn for fault in schedule.faults if isinstance(fault, Kill)]
    assert {fault.restart is None for fault in kills} == {True, False}
    paused = {
        fault.role.rstrip("0123456789") for s in drawn for fault in s.faults if isinstance(fault, Pause)
    }
    assert paused == {"replica", "shard", "coordinator"}


def test_a_schedule_is_the_same_each_time() -> None:
    first, again = (run(random_schedule(7)) for _ in range(2))
    assert first.told == again.told
    assert first.arithmetic.rows == again.arithmetic.rows


def test_a_failing_seed_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "faults_of", lambda result: ["something"])
    with pytest.raises(AssertionError, match=re.escape("python -m tests.simulated.schedules 41")):
        suite.check(random_schedule(41), 41)


def test_the_command_replays_a_random_and_a_directed_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("3", "poisoned/1"):
        schedules.replay(name)
        assert "wrong: nothing" in capsys.readouterr().out


def test_a_block_that_was_applied_twice_is_seen() -> None:
    result = run(Schedule(seed=0, num_replicas=1))
    result.arithmetic.applied[1].append(result.arithmetic.applied[1][0])
    assert any("2 times" in wrong for wrong in facts.faults_of(result))


def test_checkpoints_that_are_no_cut_are_seen() -> None:
    result = run(Schedule(seed=0, num_replicas=2, checkpoints=(2.0,)))
    (_, one), (_, _) = result.arithmetic.stored
    one.books[0].settled.add(Block(0, 5, 0, 1))
    assert any("other positions on slice" in wrong for wrong in facts.faults_of(result))


def test_a_block_that_is_missing_on_one_slice_is_seen() -> None:
    result = run(Schedule(seed=0, num_replicas=1))
    lost = result.arithmetic.applied[1].pop()
    assert f"slice 1 has not applied {lost}" in facts.faults_of(result)
