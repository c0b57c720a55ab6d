"""Pushes that overlap with computing, and a bound on staleness, under the same random schedules."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from squall.cluster.world import Pace
from squall.wire.messages import Outcome
from tests.simulated.facts import faults_of
from tests.simulated.schedules import Schedule, random_schedule, run

CHUNK = 50
BOUND = 3


def applied(schedule: Schedule) -> list[tuple[int, int]]:
    """(replica, staleness) of every applied push on the first slice."""
    rows = [row for _, _, row in run(schedule).arithmetic.rows if row.slice == 0]
    return [
        (row.sender.replica, row.staleness) for row in rows if row.outcome is Outcome.APPLIED and row.sender
    ]


def judge(schedule: Schedule) -> None:
    wrong = faults_of(run(schedule))
    assert not wrong, (schedule, wrong)


def bounded(seed: int) -> Schedule:
    schedule = random_schedule(seed)
    n_push = schedule.n_push
    n_fetch = min(schedule.n_fetch, n_push)
    return replace(schedule, max_staleness=BOUND, n_fetch=n_fetch, overlaps=False)


@pytest.mark.parametrize("chunk", range(4))
def test_no_push_is_staler_than_the_bound_and_every_block_is_done(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        judge(bounded(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", range(4, 44))
def test_no_push_is_staler_than_the_bound_in_two_thousand_schedules(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        judge(bounded(seed))


@pytest.mark.parametrize("chunk", range(4))
def test_pushes_that_overlap_apply_every_block_once(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        judge(replace(random_schedule(seed), overlaps=True, max_staleness=None))


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
def test_mean_staleness_tends_to_n_less_one_and_with_overlap_to_twice_n_less_one(num_replicas: int) -> None:
    schedule = Schedule(seed=1, num_replicas=num_replicas, minibatches_per_epoch=380, epochs=1)
    plain = np.mean([staleness for _, staleness in applied(schedule)])
    overlapped = np.mean([staleness for _, staleness in applied(replace(schedule, overlaps=True, ahead=2))])
    assert abs(plain - (num_replicas - 1)) < 0.2
    assert abs(overlapped - (2 * num_replicas - 1)) < 0.35


def test_under_a_bound_a_replica_ten_times_slower_still_contributes() -> None:
    schedule = Schedule(
        seed=1,
        num_replicas=4,
        minibatches_per_epoch=200,
        epochs=1,
        max_staleness=BOUND,
        pace=Pace(speeds=(1.0, 1.0, 1.0, 0.1)),
    )
    rows = applied(schedule)
    shares = Counter(replica for replica, _ in rows)
    assert max(staleness for _, staleness in rows) <= BOUND
    assert shares[3] >= 10
