"""Every rule, forward and backward, against the op uncut."""

import random

import pytest
import torch

from squall.partition.call import Ref
from squall.partition.indices import Indices
from squall.partition.pieces import Piece
from squall.partition.regions import Region
from squall.partition.rules import local, stages
from tests.partition.cutting import case_of, check_cut, check_stages
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


def test_running_statistics_move_as_uncut_ones_do_whether_features_or_examples_are_cut() -> None:
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(6, 4, 3, generator=generator, dtype=torch.float64) + 3
    running = [torch.randn(4, generator=generator, dtype=torch.float64), torch.rand(4, dtype=torch.float64)]
    args = (Ref(0), None, None, Ref(1), Ref(2), True, 0.3, 1e-5, False)
    call = case_of("aten.batch_norm.default", args, [value, *[each.clone() for each in running]]).call
    expected = [each.clone() for each in running]
    torch.ops.aten.batch_norm.default(value, None, None, *expected, True, 0.3, 1e-5, False)

    features = [[each[:2].clone(), each[2:].clone()] for each in running]
    for half in range(2):
        out = Region.whole(value.shape).replace(1, Indices.span(2 * half, 2 * half + 2))
        held = [Region.of((4,), (2 * half, 2 * half + 2))] * 2
        pieces = [Piece(place, each[half]) for place, each in zip(held, features, strict=True)]
        local(call, out, [[Piece(out, value[:, 2 * half : 2 * half + 2])], *[[piece] for piece in pieces]])
    plan = stages(call)
    assert plan is not None
    examples = [each.clone() for each in running]
    sums = sum(
        plan.stages[0].run(Region.whole(value.shape).replace(0, part), [value[list(part)]], [])
        for part in (Indices.span(0, 2), Indices.span(2, 6))
    )
    share = Region.whole(value.shape).replace(0, Indices.span(0, 2))
    plan.stages[1].run(share, [value[:2], *examples], [sums])

    for mine, other, theirs in zip(features, examples, expected, strict=True):
        torch.testing.assert_close(torch.cat(mine), theirs)
        torch.testing.assert_close(other, theirs)


def test_a_large_mean_does_not_eat_the_variance_of_float32_values() -> None:
    value = torch.randn(64, 2, generator=torch.Generator().manual_seed(1)) * 0.01 + 1000
    case = case_of(
        "aten.batch_norm.default", (Ref(0), None, None, None, None, True, 0.1, 0.0, False), [value]
    )
    plan = stages(case.call)
    assert plan is not None
    halves = [Region.of((64, 2), (0, 32), (0, 2)), Region.of((64, 2), (32, 64), (0, 2))]
    sums = sum(
        plan.stages[0].run(half, [part], []) for half, part in zip(halves, value.split(32), strict=True)
    )
    mine = torch.cat(
        [plan.stages[1].run(half, [part], [sums]) for half, part in zip(halves, value.split(32), strict=True)]
    )
    exact = value.double() - value.double().mean(0)
    exact = exact / exact.square().mean(0).sqrt()
    assert float((mine - exact).abs().max()) < 1e-5
    assert mine.dtype == torch.float32
