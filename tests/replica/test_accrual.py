"""The sum of a block's gradients, against the sum of what was added.

Planted, each seen by a test here: a second minibatch overwrites · a large tensor whose last gradient came earlier is
never checked · a neighbour's verdict counts for an absent tensor · the end of a run of neighbours is left out · what is
present, checked or not finite is kept from the block before · sums of lower precision are rounded at every minibatch,
or never copied out · the second buffer's views, or its neighbours, are the first's.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from squall.model.install import pieces_of
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace
from squall.replica import accrual
from squall.replica.accrual import BlockGradient

LARGE = 20
SHAPES = ((3,), (5, 5), (2, 2), (), (0, 4), (4, 6), (7,))  # two of them large
GOOD = [torch.full(shape, float(index + 1)) for index, shape in enumerate(SHAPES)]


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accrual, "LARGE", LARGE)


class Block:
    """A block's gradient and where it goes."""

    def __init__(self, num_shards: int = 1, dtype: torch.dtype = torch.float32, buffers: int = 1) -> None:
        parameters = {f"p{index}": torch.zeros(shape, dtype=dtype) for index, shape in enumerate(SHAPES)}
        self.layout = Layout.balanced(ParameterSpace.of(nn.ParameterDict(parameters)), num_shards)
        self.vectors = [
            [torch.zeros(spec.size, dtype=dtype) for spec in self.layout.slices] for _ in range(buffers)
        ]
        self.gradient = BlockGradient(self.layout, self.vectors, is_one_minibatch=False)

    def take(
        self, *minibatches: Sequence[Tensor | None], buffer: int = 0, is_told_of_the_end: bool = True
    ) -> tuple[tuple[int, ...], str]:
        self.gradient.begin()
        for number, gradients in enumerate(minibatches):
            self.gradient.use(buffer, ends=is_told_of_the_end and number == len(minibatches) - 1)
            present = {index: own for index, own in enumerate(gradients) if own is not None}
            for index in self.gradient.large & present.keys():
                self.gradient.add(index, present.pop(index))
            self.gradient.add_all(present)
        return self.gradient.end()

    def sums(self, buffer: int = 0) -> list[Tensor]:
        pieces = pieces_of(self.layout, self.vectors[buffer])
        whole = [torch.cat([piece.vector for piece in own]) if own else torch.zeros(0) for own in pieces]
        return [vector.view(shape) for vector, shape in zip(whole, SHAPES, strict=True)]


def without(absent: int) -> list[Tensor | None]:
    return [None if index == absent else own for index, own in enumerate(GOOD)]


def with_bad(tensor: int, value: float) -> list[Tensor]:
    gradients = [own.clone() for own in GOOD]
    gradients[tensor].view(-1)[-1] = value
    return gradients


@pytest.mark.parametrize("num_shards", [1, 3])
def test_it_is_the_sum_of_the_minibatches_whatever_their_number(num_shards: int) -> None:
    block = Block(num_shards, buffers=2)
    for number, buffer in ((1, 0), (3, 1), (2, 0)):
        assert block.take(*[GOOD] * number, buffer=buffer) == ((), "")

        for mine, one in zip(block.sums(buffer), GOOD, strict=True):
            assert torch.equal(mine, number * one)


def test_a_tensor_counts_as_absent_only_if_no_minibatch_had_its_gradient() -> None:
    block = Block()

    assert block.take(without(1), without(2)) == ((), "")
    assert [own.max().item() for own in block.sums()[:3]] == [2, 2, 3]
    assert block.take(without(1), without(1)) == ((1,), "")


@pytest.mark.parametrize("is_told_of_the_end", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("minibatch", [0, 1])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_value_that_is_not_finite_is_named_by_the_first_tensor_that_has_one(
    num_shards: int, minibatch: int, value: float, is_told_of_the_end: bool
) -> None:
    block = Block(num_shards)
    for tensor in (0, 1, 2, 3, 5, 6):
        minibatches: list[Sequence[Tensor | None]] = [GOOD, GOOD]
        minibatches[minibatch] = with_bad(tensor, value)

        told = block.take(*minibatches, is_told_of_the_end=is_told_of_the_end)

        assert told == ((), f"p{tensor}")
    assert block.take(GOOD, GOOD, is_told_of_the_end=is_told_of_the_end) == ((), "")


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_bad_value_is_seen_though_the_last_minibatch_has_none_of_that_tensor(tensor: int) -> None:
    assert Block().take(with_bad(tensor, math.nan), without(tensor)) == ((), f"p{tensor}")


@pytest.mark.parametrize("tensor", [1, 2])
def test_nothing_is_known_of_a_block_from_the_one_before_or_the_other_buffer(tensor: int) -> None:
    block = Block(buffers=2)
    assert block.take(GOOD) == ((), "")

    assert block.take(with_bad(tensor, math.nan), buffer=1, is_told_of_the_end=False) == ((), f"p{tensor}")


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_an_absent_tensor_has_left_from_an_earlier_block_does_not_count(tensor: int) -> None:
    block = Block()
    block.take(with_bad(tensor, math.nan))

    assert block.take(without(tensor)) == ((tensor,), "")


def test_numbers_that_overflow_only_their_sum_are_finite() -> None:
    block = Block()
    assert block.take([torch.full(shape, 3e38) for shape in SHAPES]) == ((), "")


def test_sums_of_lower_precision_are_rounded_once() -> None:
    block = Block(dtype=torch.bfloat16)
    ones = [torch.ones(shape, dtype=torch.bfloat16) for shape in SHAPES]
    crumbs = [torch.full(shape, 2.0**-9, dtype=torch.bfloat16) for shape in SHAPES]

    assert block.take(ones, *[crumbs] * 4) == ((), "")

    for own in block.sums():
        assert torch.equal(own, torch.full(own.shape, 1 + 2.0**-7, dtype=torch.bfloat16))


def test_a_sum_that_only_its_rounding_makes_infinite_is_seen() -> None:
    block = Block(dtype=torch.float16)
    half = [torch.full(shape, 60_000.0, dtype=torch.float16) for shape in SHAPES]

    assert block.take(half, half) == ((), "p0")


def test_sparse_and_turned_gradients_count_as_what_they_stand_for() -> None:
    block, gradients = Block(), [own.clone() for own in GOOD]
    turned = torch.arange(24.0).view(6, 4).T
    gradients[5] = turned
    gradients[2] = torch.tensor([[0.0, 0.0], [9.0, 0.0]]).to_sparse()

    assert block.take(gradients, gradients) == ((), "")

    assert torch.equal(block.sums()[5], 2 * turned)
    assert block.sums()[2].tolist() == [[0, 0], [18, 0]]
