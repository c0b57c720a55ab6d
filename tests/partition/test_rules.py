"""Every rule, forward and backward, against the op uncut.

Faults planted in `squall.partition` by hand, each seen to fail a test of this folder:
windows: reach or taps without dilation · stride ignored · holes of strides filled · edge fill on the wrong side · the last
group left out · transposed windows rounded down.
pooling: fill 0 instead of minus infinity · count_include_pad, divisor_override or the dilation ignored · uneven adaptive
windows left to the op.
convolution: output_padding not filled · the op pads though its edges differ · uneven groups taken for even ones · the odd
element of "same" in front · a transposed group's filters by the wrong modulus · a locally connected layer's transposed.
pieces: the gradient of a halo counted twice · not in order · a gap filled with 0 · a hole not noticed.
reductions: bias in each partial product · a mean divided twice · softmax not shifted in the finish · maxima added (seen
only once large logits were drawn) · group of another channel · affine skipped when cut · biased running variance · float32
sums of squares · ignored targets counted · smoothing without weights · a padding row's gradient · rows of other shares.
attention: causal offset lost · one key too few. masks: numbered within the piece · not scaled · epoch not in the key.
shape: a reshape's product checked on its first row only · offset of a joined input lost · pad value · negative index ·
broadcast axes aligned at the front. regions: differences that overlap. traffic: a value sent once for each op.
"""

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
