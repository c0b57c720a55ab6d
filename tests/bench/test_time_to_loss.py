"""Tests of squall.bench.figures.time_to_loss: which rule and rate a side gets, and what becomes of runs that fail.

Faults planted here by hand, each seen to fail a test: a way that never got there preferred for being quick · all rounds with
one seed · the fastest on one seed taken at its word.
"""

import math

from squall.bench.figures.time_to_loss import TUNING_SEEDS, Way, _Learned
from squall.bench.rounds import alternate

SLOW, FAST, FAILING = ("Adagrad", 0.01), ("Adagrad", 0.1), ("Sgd", 1.0)


class Learner:
    """One whose times are known; remembers what it was asked."""

    def __init__(self, times: dict[Way, tuple[float, bool]]) -> None:
        self.times = times
        self.asked: list[tuple[int, Way]] = []
        self.limits: list[float] = []

    def __call__(self, seed: int, way: Way, limit_s: float) -> tuple[float, bool]:
        self.asked.append((seed, way))
        self.limits.append(limit_s)
        return self.times[way]


def test_each_side_gets_the_way_that_was_fastest_for_it_on_seeds_that_are_not_measured() -> None:
    one = Learner({SLOW: (3.0, True), FAST: (2.0, True), FAILING: (1.0, False)})
    other = Learner({SLOW: (1.0, True), FAST: (2.0, True), FAILING: (9.0, True)})
    learned = _Learned(name="x", learners={"one": one, "other": other})

    learned.tune((SLOW, FAST, FAILING))
    one.asked.clear()
    rounds = alternate(learned.sides(), 3)

    assert learned.ways == {"one": FAST, "other": SLOW}
    assert one.asked == [(0, FAST), (1, FAST), (2, FAST)]
    assert not set(TUNING_SEEDS) & set(range(3))
    assert rounds[0] == {"x: one": 2.0, "x: other": 1.0}
    assert other.limits[:3] == [math.inf, 2.0, 2.0]  # what is twice as slow as the best so far is given up
    assert other.limits[-3:] == [math.inf] * 3  # where it counts, nothing is
    assert learned.notes() == []


def test_of_the_two_fastest_on_one_seed_the_faster_on_all_counts() -> None:
    class Lucky(Learner):
        def __call__(self, seed: int, way: Way, limit_s: float) -> tuple[float, bool]:
            seconds, reached = super().__call__(seed, way, limit_s)
            return (0.1 if way == SLOW and seed == TUNING_SEEDS[0] else seconds), reached

    lucky = Lucky({SLOW: (3.0, True), FAST: (1.0, True), FAILING: (2.0, True)})
    learned = _Learned(name="x", learners={"one": lucky})

    learned.tune((SLOW, FAST, FAILING))

    assert learned.ways == {"one": FAST}
    assert [seed for seed, way in lucky.asked if way == FAILING] == [TUNING_SEEDS[0]]


def test_a_side_that_does_not_get_there_is_named_and_its_whole_time_counts() -> None:
    learned = _Learned(name="x", learners={"one": Learner({FAST: (7.0, False)})})

    learned.tune((FAST,))
    rounds = alternate(learned.sides(), 2)

    assert [one["x: one"] for one in rounds] == [7.0, 7.0]
    assert learned.notes() == ["x: one did not reach the loss with 2 seeds; the whole time of these counts"]
