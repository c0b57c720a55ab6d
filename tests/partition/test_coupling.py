"""Which models may be computed in microbatches, and why others may not."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from squall.model.capture import capture
from squall.partition.coupling import couplings
from tests.partition.whole import case, loss_of


class Odd(nn.Module):
    """A linear layer and something after it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        out = self.linear(x)
        if self.kind == "centred":
            out = out - out.mean(0)
        if self.kind == "similar":
            out = out @ out.t() @ out
        if self.kind == "cumulated":
            out = out.cumsum(0)
        if self.kind == "dropped":
            out = functional.dropout(out, 0.5)
        if self.kind == "dropped in pairs":
            out = functional.dropout(out.reshape(-1), 0.5).view(-1, 3)
        if self.kind == "noisy":
            out = out + torch.rand_like(out)
        weight = torch.ones(3) if self.kind == "weighted" else None
        reduction = "sum" if self.kind == "summed" else "mean"
        return functional.cross_entropy(out, target, weight, reduction=reduction)


@pytest.mark.parametrize("name", ["mlp", "lenet", "alexnet", "local", "decoder", "dense"])
def test_models_whose_examples_are_independent_may_be_computed_in_parts(name: str) -> None:
    graph = case(name)[0].graph
    assert couplings(graph, loss_of(graph)) == ()


def test_batch_normalisation_couples_examples_and_moves_buffers() -> None:
    graph = case("resnet")[0].graph
    found = couplings(graph, loss_of(graph))
    assert any("couples examples" in reason for reason in found)
    assert any("running_mean" in reason for reason in found)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("centred", "mean"),
        ("similar", "matmul"),
        ("cumulated", "no rule"),
        ("dropped", ""),
        ("dropped in pairs", "one mask"),
        ("noisy", "one mask"),
        ("weighted", "no plain mean"),
        ("summed", "no plain mean"),
        ("plain", ""),
    ],
)
def test_each_reason_is_named(kind: str, reason: str) -> None:
    graph = capture(Odd(kind), (torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))).graph
    found = "; ".join(couplings(graph, loss_of(graph)))
    assert (reason in found) if reason else not found
