"""Tests of squall.bench.rounds: throughput from a ledger, held against ledgers whose speed is known.

Faults planted here by hand, each seen to fail a test: the row at the start counted too · the longest-lived replica's end taken ·
the first replica's start taken · repeated rows counted · rows of every slice counted · rounds that all go forwards.
"""

import numpy as np
import pytest

from squall.bench.rounds import alternate, steady_rate
from squall.errors import RunError
from squall.observe.ledger import LEDGER_DTYPE, Ledger


def ledger(
    times: dict[int, list[float]], *, examples: int = 10, slices: int = 1, outcome: str = "applied"
) -> Ledger:
    """Rows at those times, by replica."""
    rows = np.zeros(sum(map(len, times.values())) * slices, LEDGER_DTYPE)
    pairs = [
        (replica, time, one) for replica, all_ in times.items() for time in all_ for one in range(slices)
    ]
    for row, (replica, time, one) in zip(rows, sorted(pairs, key=lambda pair: pair[1]), strict=True):
        row["replica"], row["time_s"], row["slice"] = replica, time, one
        row["examples"], row["outcome"] = examples, outcome
    return rows


def steadily(start: float, period: float, count: int) -> list[float]:
    return [start + period * number for number in range(count)]


def test_one_replica_with_a_row_of_ten_every_half_second_does_twenty_a_second() -> None:
    assert steady_rate(ledger({0: steadily(1.0, 0.5, 9)}), warm=2) == pytest.approx(20)


def test_replicas_of_unequal_speed_add_up() -> None:
    rows = ledger({0: steadily(0.0, 0.5, 41), 1: steadily(0.3, 2.0, 11)})

    assert steady_rate(rows, warm=1) == pytest.approx(20 + 5)


def test_what_was_done_before_the_last_replica_came_and_after_the_first_had_ended_is_left_out() -> None:
    alone_before, together = steadily(0.0, 0.01, 100), steadily(10.1, 1.0, 5)
    alone_after = steadily(20.0, 0.01, 100)
    rows = ledger({0: [*alone_before, *together, *alone_after], 1: steadily(10.0, 1.0, 5)})

    assert steady_rate(rows, warm=1) == pytest.approx(20)


def test_slices_do_not_count_a_block_twice() -> None:
    assert steady_rate(ledger({0: steadily(0.0, 1.0, 10)}, slices=3), warm=1) == pytest.approx(10)


def test_only_what_was_applied_counts() -> None:
    rows = ledger({0: steadily(0.0, 1.0, 10)})
    repeated = ledger({0: steadily(0.5, 1.0, 9)}, outcome="repeated")
    both = np.concatenate([rows, repeated])

    assert steady_rate(both[np.argsort(both["time_s"])], warm=1) == pytest.approx(10)


@pytest.mark.parametrize("times", [{}, {0: [1.0, 2.0]}, {0: [1.0, 2.0, 3.0], 1: [4.0, 5.0, 6.0]}])
def test_where_there_is_no_steady_state_there_is_no_rate(times: dict[int, list[float]]) -> None:
    with pytest.raises(RunError, match="rate"):
        steady_rate(ledger(times), warm=2)


def test_sides_are_measured_in_turn_and_every_other_round_backwards() -> None:
    order: list[str] = []

    def side(name: str) -> dict[str, float]:
        order.append(name)
        return {name: float(len(order))}

    rounds = alternate([lambda: side("a"), lambda: side("b"), lambda: side("c")], 3)

    assert "".join(order) == "abccbaabc"
    assert [one["a"] for one in rounds] == [1, 6, 7]
