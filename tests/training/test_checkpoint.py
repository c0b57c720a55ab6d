"""Slices on disk and cut anew: what a resumed run goes on with, for every rule and for rules by name.

Planted faults, each seen to fail a test here: the slots of the first slice taken for all; a slot that a slice
lacks left out; steps counted anew; the minibatches of a schedule counted anew.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from squall.blocks import Block
from squall.model.install import assemble, split
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace
from squall.rules.adagrad import Adagrad
from squall.rules.adam import Adam
from squall.rules.apply import SliceState, apply_
from squall.rules.momentum import Momentum
from squall.rules.patterns import RulePerTensor, Rules, rule_per_tensor
from squall.rules.rule import Rule
from squall.rules.sgd import Sgd
from squall.schedules import step
from squall.shard.books import SliceBook
from squall.shard.store import read_slices, write_slices
from squall.training.checkpoint import Checkpoint, relaid

MIXTURE = Rules(
    {
        "0.*": Adagrad(learning_rate=0.1, initial_accumulator_value=0.3),
        "1.*": Sgd(learning_rate=step(0.1, every=2, gamma=0.5)),
        "*.bias": Momentum(learning_rate=0.1),
        "*": Adam(learning_rate=0.01),
    }
)
FIXED = [Momentum(learning_rate=0.1, dampening=0.5), Adam(learning_rate=step(0.01, every=4, gamma=0.1))]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 9), nn.Linear(9, 3))


Push = tuple[dict[str, Tensor], frozenset[int]]


def pushes(count: int, space: ParameterSpace) -> list[Push]:
    """Flat gradients, and who is absent: each tensor on its turn, and the first two until the sixth push."""
    torch.manual_seed(1)
    return [
        (
            {"float32": torch.randn(space.numel("float32"))},
            frozenset({number % len(space.tensors)} | ({0, 1} if number < 6 else set())),
        )
        for number in range(count)
    ]


def push(states: list[SliceState], layout: Layout, rule: Rule | RulePerTensor, gradients: list[Push]) -> None:
    for flat, absent in gradients:
        for state, grad in zip(states, split(layout, flat), strict=True):
            apply_(state, rule, grad, absent=absent, minibatches=1)


def fresh(layout: Layout, rule: Rule | RulePerTensor) -> list[SliceState]:
    vectors = split(layout, {"float32": layout.space.flat(network(), "float32")})
    return [
        SliceState.create(spec, vector, rule) for spec, vector in zip(layout.slices, vectors, strict=True)
    ]


def books_of(layout: Layout, minibatches: int) -> list[SliceBook]:
    books = [SliceBook.new(spec.slice, spec.partition) for spec in layout.slices]
    for book in books:
        book.version = book.minibatches = minibatches
        book.settled.add(Block(0, 0, 0, minibatches))
    return books


def stored(states: list[SliceState], layout: Layout, minibatches: int, folder: Path) -> Checkpoint:
    """The states after a way over the disk."""
    read: list[SliceState] = []
    for shard in range(layout.num_shards):
        specs = layout.slices_of(shard)
        own = [states[spec.slice] for spec in specs]
        write_slices(folder / f"{shard}", own, books_of(layout, minibatches))
        back, books = read_slices(folder / f"{shard}", specs)
        for state, book in zip(back, books, strict=True):
            state.minibatches = book.minibatches
        read += back
    return Checkpoint(
        layout=layout,
        states=tuple(read),
        books=tuple(books_of(layout, minibatches)),
        buffers={},
        minibatches=minibatches,
        time_s=0.0,
        identity={},
        starts=0,
    )


@pytest.mark.parametrize(("before", "after"), [(3, 3), (3, 1), (1, 5), (7, 2), (4, 5)])
@pytest.mark.parametrize("rule", [*FIXED, MIXTURE])
def test_training_goes_on_on_other_shards_as_if_nothing_had_been(
    rule: Rule | Rules, before: int, after: int, tmp_path: Path
) -> None:
    space = ParameterSpace.of(network())
    resolved = rule_per_tensor(rule, space)
    old, new, whole = (Layout.balanced(space, shards) for shards in (before, after, 1))
    gradients = pushes(9, space)
    states = fresh(old, resolved)
    push(states, old, resolved, gradients[:5])

    states, books = relaid(stored(states, old, 5, tmp_path), new)
    push(states, new, resolved, gradients[5:])

    uninterrupted = fresh(whole, resolved)
    push(uninterrupted, whole, resolved, gradients)
    expected = assemble(whole, [state.params for state in uninterrupted])
    for name, value in assemble(new, [state.params for state in states]).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
    assert [book.minibatches for book in books] == [5] * len(new.slices)
