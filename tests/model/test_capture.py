"""Capture held against the model itself, in both modes and at other batch sizes."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from squall.model.capture import Captured, capture
from tests.models import EXAMPLES, Example


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from tensors_in(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from tensors_in(part)
    elif hasattr(tree, "__dataclass_fields__"):
        yield from tensors_in(vars(tree))


def step(model: nn.Module, call: Any, example: Example, batch: int) -> tuple[Any, list[Tensor | None]]:
    """One forward and backward under a fixed seed: the result and the gradients."""
    args, kwargs = example.inputs(batch)
    torch.manual_seed(3)
    result = call(*args, **kwargs)
    model.zero_grad()
    loss = sum(t.square().sum() + t.sum() for t in tensors_in(result) if t.requires_grad)
    loss.backward()  # type: ignore[union-attr]
    return result, [p.grad for p in model.parameters()]


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    pairs = list(zip(tensors_in(ours), tensors_in(theirs), strict=True))
    assert pairs
    for got, wanted in pairs:
        assert got.dtype == wanted.dtype
        assert got.requires_grad == wanted.requires_grad
        assert torch.equal(got, wanted)


def assert_equals_eager(captured: Captured, example: Example, training: bool, batch: int) -> None:
    theirs = example.model().train(training)
    ours = copy.deepcopy(theirs)
    bound = captured.bind(ours)
    for _ in range(2):
        result, gradients = step(ours, bound, example, batch)
        wanted, wanted_gradients = step(theirs, theirs, example, batch)

        assert_same(result, wanted)
        for got, want in zip(gradients, wanted_gradients, strict=True):
            assert (got is None) == (want is None)
            assert got is None or (want is not None and torch.equal(got, want))
    for (name, got), (_, want) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.nightly] if e.is_slow else []) for n, e in EXAMPLES.items()],
)
def test_outputs_gradients_and_buffers_are_those_of_the_model_to_the_bit(name: str, training: bool) -> None:
    example = EXAMPLES[name]
    model = example.model()
    args, kwargs = example.inputs(4)

    captured = capture(model, args, kwargs, training=training)

    for batch in (4, example.smallest, 3, 7):
        assert_equals_eager(captured, example, training, batch)
