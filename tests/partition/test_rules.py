"""Every rule, forward and backward, against the op uncut."""

import random

import pytest

from squall.partition.rules import stages
from tests.partition.cutting import check_cut, check_stages
from tests.partition.ops import OPS, STAGED

DAILY, NIGHTLY = 200, 5000


def try_cuts(name: str, first: int, count: int) -> None:
    for seed in range(first, first + count):
        rng = random.Random(f"{name} {seed}")
        case = OPS[name](rng)
        try:
            check_cut(case, rng)
        except Exception as error:
            error.add_note(f"{name}, seed {seed}: {case}")
            raise


def try_stages(name: str, first: int, count: int) -> None:
    tried = 0
    for seed in range(first, first + count):
        rng = random.Random(f"stages of {name} {seed}")
        case = OPS[name](rng)
        if stages(case.call) is None:
            continue
        tried += 1
        try:
            check_stages(case, rng)
        except Exception as error:
            error.add_note(f"stages of {name}, seed {seed}: {case}")
            raise
    assert tried > count / 4


@pytest.mark.parametrize("name", OPS)
def test_a_cut_op_gives_the_uncut_ops_output_and_gradients(name: str) -> None:
    try_cuts(name, 0, DAILY)


@pytest.mark.parametrize("name", STAGED)
def test_an_op_cut_over_what_it_reduces_gives_the_same(name: str) -> None:
    try_stages(name, 0, DAILY)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", OPS)
def test_a_cut_op_gives_the_same_in_thousands_of_cases(name: str) -> None:
    try_cuts(name, DAILY, NIGHTLY)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", STAGED)
def test_a_cut_reduction_gives_the_same_in_thousands_of_cases(name: str) -> None:
    try_stages(name, DAILY, NIGHTLY)
