"""Tests of squall.data.order: the order of examples and the seeds of minibatches.

Faults planted, each caught: epoch left out of the order's key; the order's key a sum of seed and epoch; int32
instead of int64; position left out of `seed_for`; `hash` instead of the mixer; one mixing step dropped; 64 bits
returned; the check of negative numbers removed.
"""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from squall.data import order, seed_for
from squall.errors import ConfigError

WORDS = st.integers(0, 2**64 - 1)


@given(st.integers(0, 200), WORDS, st.integers(0, 10**6))
def test_an_order_holds_each_example_once(n: int, seed: int, epoch: int) -> None:
    found = order(n, seed, epoch)

    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(n))


def test_every_seed_and_epoch_has_an_order_of_its_own() -> None:
    orders = {tuple(order(50, seed, epoch).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_a_first_place_is_as_likely_for_every_example() -> None:
    counts = np.bincount([order(10, 0, epoch)[0] for epoch in range(5000)], minlength=10)

    # Chi-squared with 9 degrees of freedom: above 33.7 once in ten thousand.
    assert ((counts - 500) ** 2 / 500).sum() < 33.7


def test_orders_and_seeds_are_the_same_in_a_process_with_other_hashes() -> None:
    program = "from squall.data import order, seed_for; print(order(9, 3, 4).tolist(), seed_for(3, 4, 5))"
    lines = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hashes, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hashes in ("1", "2")
    }
    assert lines == {f"{order(9, 3, 4).tolist()} {seed_for(3, 4, 5)}\n"}


@given(WORDS, st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_seed_suits_torch_numpy_and_random(seed: int, epoch: int, position: int) -> None:
    found = seed_for(seed, epoch, position)

    assert 0 <= found < 2**32
    torch.Generator().manual_seed(found)
    np.random.RandomState(found)
    random.Random(found)


def test_seeds_of_neighbouring_minibatches_hardly_ever_meet() -> None:
    seeds = {seed_for(s, e, p) for s in range(10) for e in range(10) for p in range(500)}

    # 50,000 draws of 2**32 values meet 0.3 times on average; five times once in ten million.
    assert len(seeds) > 50_000 - 5


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_any_bit_of_any_argument_changes_half_the_bits_of_the_seed(argument: int) -> None:
    bases = np.random.default_rng(0).integers(2**63, size=(100, 3)).tolist()
    for bit in range(64):
        changed = []
        for base in bases:
            other = list(base)
            other[argument] ^= 1 << bit
            changed.append((seed_for(*base) ^ seed_for(*other)).bit_count())
        # 16 on average; the mean of 100 strays by 0.28.
        assert 14.5 < np.mean(changed) < 17.5


def test_arguments_do_not_stand_for_one_another() -> None:
    assert len({seed_for(1, 2, 3), seed_for(2, 1, 3), seed_for(3, 2, 1), seed_for(1, 3, 2)}) == 4


def test_numpy_integers_give_the_same_seed() -> None:
    assert seed_for(np.int64(1), np.int32(2), np.int64(3)) == seed_for(1, 2, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (0, 2**64, 0)])
def test_negative_arguments_are_refused_by_name(wrong: tuple[int, int, int]) -> None:
    names = ("n", "seed", "epoch"), ("seed", "epoch", "position")
    at = next(i for i, value in enumerate(wrong) if value)

    with pytest.raises(ConfigError, match=f"expected {names[0][at]} in"):
        order(*wrong)
    with pytest.raises(ConfigError, match=f"expected {names[1][at]} in"):
        seed_for(*wrong)
