"""Plans made in training, laid over the same model in evaluation: partitions compute what the module itself does.

Faults planted by hand, each seen to fail a test here: sizes of the example taken for every batch's · an op's share in training
given to the op of that name in evaluation, whatever its shape.
"""

import pytest
import torch
from torch import Tensor, nn

from squall.model.capture import capture
from squall.model.structure import Structure
from squall.partition import planner
from squall.partition.inference import Inference
from squall.partition.model_plan import Plan
from tests.models import EXAMPLES

NAMES = ["lenet", "normalised", "unet"]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_training_predicts_what_the_model_does(name: str) -> None:
    example = EXAMPLES[name]
    model = example.model().double()
    args, _ = example.inputs(5)
    args = tuple(each.double() if each.is_floating_point() else each for each in args)
    graph = capture(model, args).graph
    with torch.no_grad():
        expected, _ = Structure.of(model.eval()(*args))
    state = tensors_of(model.train())
    cuts = [planner.horizontal(graph, 2), planner.random(graph, 3, 1)]
    for cut in cuts:
        inference = Inference(
            model, Plan.of(graph, cut, how="tried"), lambda key: state[key].detach().clone()
        )
        for count in (5, 1):
            found, _ = Structure.of(inference(tuple(each[:count] for each in args)))
            for got, wanted in zip(found, expected, strict=True):
                assert (got - wanted[:count]).abs().max() < 1e-10
    assert model.training, "the model is left as it was"


@pytest.mark.parametrize("name", ["unet", "cells"])
def test_no_size_of_a_graph_is_the_examples_own(name: str) -> None:
    """Some kernels ask for a size as a number, which must not fix that of all values after them."""
    example = EXAMPLES[name]
    args, _ = example.inputs(5)
    graph = capture(example.model(), args).graph
    (result,) = graph.outputs
    assert graph.values[result.index].shape_at(7)[0] == 7  # type: ignore[union-attr]
