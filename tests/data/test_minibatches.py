"""Tests of squall.data.minibatches: which examples a (epoch, position) names.

Faults planted, each caught: a short last minibatch dropped; `drop_last` ignored; the order of epoch 0 used for
all; one order kept instead of two; the number of examples always batch_size; a negative position accepted;
shuffle=False shuffled.
"""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import squall.data.minibatches as minibatches_module
from squall.data import Minibatches, Source, order
from squall.errors import ConfigError


class Numbers(Source):
    """Hands out the indices themselves."""

    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples

    def batch(self, indices: NDArray[np.int64]) -> Any:
        return indices.tolist()


def epoch_of(minibatches: Minibatches, epoch: int) -> list[int]:
    loaded = [minibatches.load(epoch, position) for position in range(minibatches.num_minibatches)]
    assert [num for _, num in loaded] == [len(batch) for batch, _ in loaded]
    return [example for batch, _ in loaded for example in batch]


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "drop_last", "expected"),
    [(10, 5, False, 2), (11, 5, False, 3), (11, 5, True, 2), (3, 5, False, 1), (5, 5, True, 1)],
)
def test_minibatches_of_an_epoch_are_counted(
    num_examples: int, batch_size: int, drop_last: bool, expected: int
) -> None:
    found = Minibatches(Numbers(num_examples), batch_size, seed=0, drop_last=drop_last)
    assert found.num_minibatches == expected


def test_an_epoch_goes_through_the_public_order() -> None:
    found = Minibatches(Numbers(23), 5, seed=3)

    for epoch in (0, 1, 7):
        assert epoch_of(found, epoch) == order(23, 3, epoch).tolist()


def test_without_shuffling_examples_keep_their_order_in_every_epoch() -> None:
    found = Minibatches(Numbers(7), 3, seed=3, shuffle=False)
    assert epoch_of(found, 0) == epoch_of(found, 5) == list(range(7))


def test_drop_last_leaves_the_end_of_the_order_out() -> None:
    found = Minibatches(Numbers(7), 3, seed=3, drop_last=True)
    assert epoch_of(found, 2) == order(7, 3, 2)[:6].tolist()


def test_positions_can_be_asked_for_in_any_order() -> None:
    found, again = (Minibatches(Numbers(9), 2, seed=1) for _ in range(2))

    names = [(epoch, position) for epoch in range(3) for position in range(found.num_minibatches)]
    there = {name: found.load(*name) for name in names}
    back = {name: again.load(*name) for name in reversed(names)}

    assert there == back


def test_the_orders_of_two_epochs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        made.append(epoch)
        return order(n, seed, epoch)

    monkeypatch.setattr(minibatches_module, "order", counted)
    found = Minibatches(Numbers(9), 2, seed=1)

    for epoch in (0, 1, 0, 1, 2, 1, 2, 0):
        found.load(epoch, 0)

    assert made == [0, 1, 2, 0]


@pytest.mark.parametrize("position", [-1, 2])
def test_a_position_outside_the_epoch_is_refused(position: int) -> None:
    with pytest.raises(ConfigError, match=r"expected a position in \[0, 2\)"):
        Minibatches(Numbers(4), 2, seed=0).load(0, position)


@pytest.mark.parametrize(("batch_size", "seed"), [(0, 0), (-1, 0), (1, -1)])
def test_settings_that_make_no_sense_are_refused(batch_size: int, seed: int) -> None:
    with pytest.raises(ConfigError, match="batch_size >= 1"):
        Minibatches(Numbers(4), batch_size, seed)


def test_dropping_the_only_minibatch_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least batch_size=5 examples, but got 4"):
        Minibatches(Numbers(4), 5, seed=0, drop_last=True)
