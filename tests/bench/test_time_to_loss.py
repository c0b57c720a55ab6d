"""Tests of squall.bench.figures.time_to_loss: which rate a side gets, and what becomes of runs that fail.

Faults planted here by hand, each seen to fail a test: a rate that never got there preferred for being quick · all rounds with
one seed.
"""

from squall.bench.figures.time_to_loss import TUNING_SEED, _Learned
from squall.bench.rounds import alternate


class Learner:
    """One whose times are known; remembers what it was asked."""

    def __init__(self, times: dict[float, tuple[float, bool]]) -> None:
        self.times = times
        self.asked: list[tuple[int, float]] = []

    def __call__(self, seed: int, rate: float) -> tuple[float, bool]:
        self.asked.append((seed, rate))
        return self.times[rate]


def test_each_side_gets_the_rate_that_was_fastest_for_it_on_a_seed_that_is_not_measured() -> None:
    one = Learner({0.01: (3.0, True), 0.1: (2.0, True), 1.0: (1.0, False)})
    other = Learner({0.01: (1.0, True), 0.1: (2.0, True), 1.0: (9.0, True)})
    learned = _Learned(name="x", learners={"one": one, "other": other})

    learned.tune((0.01, 0.1, 1.0))
    one.asked.clear()
    rounds = alternate(learned.sides(), 3)

    assert learned.rates == {"one": 0.1, "other": 0.01}
    assert one.asked == [(0, 0.1), (1, 0.1), (2, 0.1)]
    assert TUNING_SEED not in range(3)
    assert rounds[0] == {"x: one": 2.0, "x: other": 1.0}
    assert learned.notes() == []


def test_a_side_that_does_not_get_there_is_named_and_its_whole_time_counts() -> None:
    learned = _Learned(name="x", learners={"one": Learner({0.1: (7.0, False)})})

    learned.tune((0.1,))
    rounds = alternate(learned.sides(), 2)

    assert [one["x: one"] for one in rounds] == [7.0, 7.0]
    assert learned.notes() == ["x: one did not reach the loss with 2 seeds; the whole time of these counts"]
