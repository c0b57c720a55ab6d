"""Contributions to a stage that cover a part of the combined value each: what stands elsewhere must not count.

Fault planted by hand and seen to fail: zero instead of minus infinity beyond a contribution to a maximum.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from squall.model.capture import capture
from squall.partition import planner
from squall.partition.indices import Indices
from squall.partition.plan import StageCut, along, on_one
from squall.partition.together import Together


class FarBelowZero(nn.Module):
    """A softmax of numbers whose exponentials are zero unless the largest is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.log_softmax(self.linear(x) - 1000.0, -1).square().mean()


def test_the_largest_of_numbers_far_below_zero_is_found_from_contributions_to_parts_of_it() -> None:
    torch.manual_seed(2)
    model, x = FarBelowZero().double(), torch.randn(3, 5, 4, dtype=torch.float64)
    captured = capture(model, (x,))
    graph = captured.graph
    (at,) = [at for at, node in enumerate(graph.nodes) if "log_softmax" in node.target]
    rows = along(1, {0: Indices.span(0, 2), 1: Indices.span(2, 5)}, 2, 3)
    cut = StageCut(shares=rows, combined=on_one(1, 2, 3))
    plan = replace(planner.horizontal(graph, 2), staged={at: (cut, cut)})
    together = Together(captured, model, plan)
    together.step((x,))
    (loss,) = together.outputs()
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(
        together.gradients()["linear.weight"], model.linear.weight.grad, rtol=0, atol=1e-10
    )
