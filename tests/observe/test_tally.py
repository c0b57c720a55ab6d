"""Tests of squall.observe.tally against sums made by hand.

Faults planted here by hand, each seen to fail a test: staleness over all rows instead of applied ones · variance of a
sample instead of the population · `attempt >= 1` for redone · the first moment's examples counted as speed ·
speed over all slices · blocks counted once a slice · lost work counted as speed · the highest slice as the first ·
a block whose second attempt was not needed not redone · times one replica from too few blocks, from times that vary, and above
the number of replicas.
"""

import math
from typing import Any

import numpy as np
import pytest

from squall.observe.ledger import LEDGER_DTYPE, Ledger
from squall.observe.tally import ReplicaTally, samples_per_second, summarise, times_one_replica


def ledger(*rows: dict[str, Any]) -> Ledger:
    usual = {"attempt": 1, "minibatches": 1, "examples": 10, "outcome": "applied"}
    array = np.zeros(len(rows), LEDGER_DTYPE)
    for at, row in enumerate(rows):
        for name, value in (usual | row).items():
            array[name][at] = value
    return array


def test_an_empty_ledger_adds_up_to_nothing() -> None:
    summary = summarise(ledger())
    assert (summary.rows, summary.applied, summary.samples_per_second, summary.replicas) == (0, 0, 0.0, ())
    assert math.isnan(summary.staleness_mean)


def test_staleness_is_that_of_applied_pushes_on_all_slices() -> None:
    rows: list[dict[str, Any]] = [
        {"block": at, "slice": at % 2, "staleness": staleness} for at, staleness in enumerate([0, 1, 1, 4])
    ]
    summary = summarise(ledger(*rows, {"staleness": 100, "outcome": "repeated"}))

    # Mean 6/4; mean of squares 18/4.
    assert summary.staleness_mean == pytest.approx(1.5)
    assert summary.staleness_variance == pytest.approx(18 / 4 - 1.5**2)


def test_a_block_counts_once_however_many_slices_and_rows_it_has() -> None:
    slices = [{"slice": 0}, {"slice": 1}]
    rows: list[dict[str, Any]] = [
        *({"block": 1} | where for where in slices),
        *({"block": 2, "attempt": 2} | where for where in slices),
        *({"block": 2, "outcome": "repeated"} | where for where in slices * 2),
        *({"block": 3, "outcome": "refused"} | where for where in slices),
        *({"block": 1, "outcome": "not_finite"} | where for where in slices),
        *({"block": 1, "outcome": "rolled_back"} | where for where in slices),
    ]
    summary = summarise(ledger(*rows))

    assert summary.rows == 14
    assert (summary.applied, summary.redone, summary.repeated) == (2, 1, 1)
    assert (summary.refused, summary.not_finite, summary.rolled_back) == (1, 1, 1)


def test_a_block_computed_again_is_redone_also_where_that_was_not_needed() -> None:
    again = {"block": 1, "attempt": 2, "outcome": "repeated"}
    summary = summarise(ledger({"block": 1}, again, {"block": 2}, {"block": 2, "outcome": "repeated"}))
    assert (summary.redone, summary.repeated) == (1, 2)
    assert summarise(ledger({"block": 1, "attempt": 2, "outcome": "not_finite"})).redone == 0


def alone_and_together(before: int, after: int, *, faster: float, jitter: float = 0.0) -> Ledger:
    """So many blocks of one replica, one a second, then so many of all, so many times as fast."""
    gaps = np.concatenate([np.full(before, 1.0), np.full(after, 1 / faster)])
    gaps *= 1 + jitter * (np.arange(len(gaps)) % 8 == 0)
    rows: list[dict[str, Any]] = [
        {"block": at, "time_s": time_s} for at, time_s in enumerate(np.cumsum(gaps).tolist())
    ]
    return ledger(*rows)


@pytest.mark.parametrize(
    ("told", "warm_start", "replicas", "times"),
    [
        (alone_and_together(40, 40, faster=1.5), 40, 2, 1.5),
        (alone_and_together(40, 40, faster=2.5), 40, 2, None),
        (alone_and_together(40, 40, faster=2.5), 40, 3, 2.5),
        (alone_and_together(40, 40, faster=1.0), 40, 1, None),
        (alone_and_together(30, 40, faster=1.5), 30, 2, None),
        (alone_and_together(40, 15, faster=1.5), 40, 2, None),
        (alone_and_together(40, 40, faster=1.5, jitter=50.0), 40, 2, None),
        (alone_and_together(0, 40, faster=1.5), 0, 2, None),
        (ledger(), 8, 2, None),
    ],
)
def test_times_one_replica_is_said_only_where_the_measure_is_sound(
    told: Ledger, warm_start: int, replicas: int, times: float | None
) -> None:
    found = times_one_replica(told, warm_start=warm_start, replicas=replicas)
    assert found == (None if times is None else pytest.approx(times, rel=0.01))


def test_speed_is_what_came_after_the_first_moment_over_the_time_since() -> None:
    # Two replicas, each with ten examples a second: twenty a second, whatever came before second 1.
    rows: list[dict[str, Any]] = [
        {"time_s": time_s, "block": 2 * time_s + which} for time_s in (1, 2, 3) for which in (0, 1)
    ]
    assert samples_per_second(ledger(*rows)) == pytest.approx(20.0)


def test_speed_counts_each_block_on_one_slice_only() -> None:
    rows: list[dict[str, Any]] = [
        {"time_s": time_s, "slice": which} for time_s in (1, 2, 3) for which in (4, 5)
    ]
    assert samples_per_second(ledger(*rows)) == pytest.approx(10.0)


def test_the_slice_that_counts_is_the_lowest_with_anything_applied() -> None:
    rows: list[dict[str, Any]] = [
        {"time_s": 1, "shard": 0, "slice": 0, "outcome": "refused"},
        *({"time_s": time_s, "shard": 0, "slice": 1} for time_s in (1, 2)),
        *({"time_s": time_s, "shard": 1, "slice": 0} for time_s in (1, 1.5)),
    ]
    assert samples_per_second(ledger(*rows)) == pytest.approx(10.0)


def test_work_that_was_lost_and_done_again_counts_once_as_speed() -> None:
    rows: list[dict[str, Any]] = [
        {"time_s": 0.0},
        {"time_s": 1.0},
        {"time_s": 1.5, "outcome": "rolled_back"},
        {"time_s": 2.0, "attempt": 2},
    ]
    assert samples_per_second(ledger(*rows)) == pytest.approx(5.0)


@pytest.mark.parametrize(("time_s", "speed"), [(2.0, 10.0), (0.0, 0.0)])
def test_pushes_of_one_moment_are_measured_from_the_beginning_of_the_run(time_s: float, speed: float) -> None:
    assert samples_per_second(ledger({"time_s": time_s}, {"time_s": time_s})) == speed


def test_replicas_are_counted_one_by_one_on_the_first_slice() -> None:
    rows: list[dict[str, Any]] = [
        {"replica": 3, "staleness": 2, "minibatches": 2, "examples": 20},
        {"replica": 3, "staleness": 1},
        {"replica": 3, "slice": 1, "staleness": 50},
        {"replica": 0, "staleness": 0},
        {"replica": 1, "outcome": "repeated"},
    ]
    assert summarise(ledger(*rows)).replicas == (
        ReplicaTally(replica=0, blocks=1, minibatches=1, examples=10, staleness_mean=0.0),
        ReplicaTally(replica=3, blocks=2, minibatches=3, examples=30, staleness_mean=1.5),
    )
