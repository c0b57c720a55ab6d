"""Every op that writes, against the pure op that replaces it.

Faults planted here by hand, each seen to fail a test: a viewed tensor that counts as old after a write through its view · a
view that is not taken anew · a permutation undone by itself instead of by its inverse.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from squall.model.capture import capture
from squall.model.twins import is_in_place, pure_twin

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "more"),
    [
        (aten.add_.Tensor, (torch.ones(3),)),
        (aten.mul_.Scalar, (3,)),
        (aten.relu_.default, ()),
        (aten.clamp_.default, (0.1, 0.5)),
        (aten.masked_fill_.Scalar, (torch.tensor([True, False, True]), 7.0)),
        (aten.index_put_.default, ([torch.tensor([0, 2])], torch.tensor([5.0, 6.0]))),
        (aten.copy_.default, (torch.tensor([1.0, 2.0, 3.0]),)),
        (aten.fill_.Scalar, (2.0,)),
        (aten.zero_.default, ()),
        (aten.addcmul_.default, (torch.ones(3), torch.ones(3))),
        (aten.lerp_.Scalar, (torch.zeros(3), 0.25)),
        (aten.uniform_.default, (0.0, 1.0)),
        (aten.normal_.default, (0.0, 1.0)),
        (aten.bernoulli_.float, (0.5,)),
        (aten.exponential_.default, (2.0,)),
        (aten.dropout_.default, (0.5, True)),
        (aten.alpha_dropout_.default, (0.5, True)),
        (aten.index_add_.default, (0, torch.tensor([0, 0]), torch.ones(2))),
        (aten.scatter_.src, (0, torch.tensor([2, 1]), torch.ones(2))),
        (aten.cumsum_.default, (0,)),
        (aten.tril_.default, ()),
        (aten.neg_.default, ()),
        (aten.sigmoid_.default, ()),
        (aten.leaky_relu_.default, (0.2,)),
        (aten.hardtanh_.default, (-0.5, 0.5)),
        (aten.elu_.default, ()),
    ],
    ids=str,
)
def test_a_twin_gives_what_its_op_writes_and_writes_nothing(op: Any, more: tuple[Any, ...]) -> None:
    x = torch.linspace(-1, 1, 9).view(3, 3) if "tril" in str(op) else torch.linspace(-1, 1, 3)
    written = x.clone()
    torch.manual_seed(1)
    op(written, *more)
    kept = x.clone()

    twin = pure_twin(op, (kept, *more), {})
    assert twin is not None
    pure, args, kwargs, target = twin
    torch.manual_seed(1)
    made = pure(*args, **kwargs)

    assert target is kept
    assert not is_in_place(pure)
    assert torch.equal(kept, x)
    assert torch.equal(made, written)


def test_an_op_that_changes_memory_itself_has_no_twin() -> None:
    x = torch.zeros(3)
    assert pure_twin(aten.set_.source_Tensor, (x, x), {}) is None
    assert pure_twin(aten.resize_.default, (x, [2]), {}) is None


class Writes(nn.Module):
    """Writes through one view after another, then reads everything."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.which = which

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        view = {
            "select": lambda: y[:, 2],
            "slice": lambda: y[:, 1:5:2],
            "transposed": lambda: y.t()[1:3],
            "permuted": lambda: y.view(-1, 2, 3).permute(2, 0, 1)[1],
            "reshaped": lambda: y.reshape(-1, 3, 2)[:, 1],
            "unsqueezed": lambda: y.unsqueeze(1)[:, :, 0],
            "squeezed": lambda: y.select(1, 4).unsqueeze(0).squeeze(0),
            "diagonal": lambda: y.view(-1, 2, 3).diagonal(0, 1, 2),
            "flattened": lambda: y.flatten()[0:6],
            "viewed twice": lambda: y.view(-1, 2, 3)[:, 0].view(-1, 3, 1)[:, 1:],
        }[self.which]()
        other = y[:, :3]
        view.mul_(2.0)
        other += 1
        y.add_(x)
        return y * 1, view * 3, other * 5


@pytest.mark.parametrize(
    "which",
    [
        "select",
        "slice",
        "transposed",
        "permuted",
        "reshaped",
        "unsqueezed",
        "squeezed",
        "diagonal",
        "flattened",
        "viewed twice",
    ],
)
def test_writes_through_views_reach_all_that_shares_their_memory(which: str) -> None:
    torch.manual_seed(0)
    model = Writes(which)
    captured = capture(model, (torch.randn(3, 6),))
    bound = captured.bind(model)
    for batch in (3, 5):
        x = torch.randn(batch, 6)
        got, wanted = bound(x), model(x)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        gradients = [
            torch.autograd.grad(sum(t.square().sum() for t in out), model.linear.weight)[0]
            for out in (got, wanted)
        ]
        torch.testing.assert_close(*gradients)
    assert not captured.graph.notes
    assert not any(is_in_place_named(node.target) for node in captured.graph.nodes)


def is_in_place_named(target: str) -> bool:
    return target.split(".")[1].endswith("_")
