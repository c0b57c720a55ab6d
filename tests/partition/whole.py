"""Whole models with a loss, captured once for all tests, and plain PyTorch beside a cut copy."""

import copy
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from squall.model.capture import capture
from squall.model.captured import Captured
from squall.model.graph import Graph, Ref
from squall.model.layers import L2Pool2d, LocalContrastNorm2d, LocallyConnected2d
from squall.partition.plan import Plan
from squall.partition.together import Together
from tests.models import EXAMPLES

EXAMPLES_HERE = 4
RATE = 0.1


class Objective(nn.Module):
    """A model and its loss as one module: the first result is the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(x)
        return functional.cross_entropy(out.flatten(0, -2), target.flatten()), out


class Squares(nn.Module):
    """A model with the mean of squared differences as its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(x)
        return functional.mse_loss(out, target), out


def local_net() -> nn.Module:
    """Unshared filters, L2 pooling, local contrast normalisation, and a linear layer on top."""
    return nn.Sequential(
        LocallyConnected2d(2, 4, size=(9, 8), kernel=3, padding=1),
        L2Pool2d(2, 1),
        LocalContrastNorm2d(3),
        LocallyConnected2d(4, 3, size=(8, 7), kernel=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(3 * 7 * 6, 5),
    )


class Recurrent(nn.Module):
    """A recurrent layer, which capture keeps whole, between layers that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 8), nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.middle(torch.tanh(self.first(x)))
        return self.last(found)  # type: ignore[no-any-return]


def dense(units: int, layers: int) -> nn.Module:
    """Layers of so many units, with tanh after each."""
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(units, units), nn.Tanh())])


@cache
def case(name: str, dropout: float = 0.0) -> tuple[Captured, nn.Module, tuple[Tensor, Tensor]]:
    """A captured model with its loss, the module itself (never changed), and a minibatch, in float64."""
    torch.manual_seed(11)
    if name == "local":
        model, x = local_net(), torch.randn(EXAMPLES_HERE, 2, 9, 8)
    elif name == "recurrent":
        model, x = Recurrent(), torch.randn(EXAMPLES_HERE, 4, 3)
    elif name == "dense":
        model, x = dense(24, 3), torch.randn(EXAMPLES_HERE, 24)
    else:
        model, (x,) = EXAMPLES[name].model(), EXAMPLES[name].inputs(EXAMPLES_HERE)[0]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        like = copy.deepcopy(model.double())(x)
    target = torch.randint(0, like.shape[-1], like.shape[:-1])
    whole: nn.Module = Objective(model)
    if name == "dense":
        whole, target = Squares(model), torch.randn_like(like)
    return capture(whole.train(), (x, target)), whole, (x, target)


def loss_of(graph: Graph) -> int:
    first = graph.outputs[0]
    assert isinstance(first, Ref)
    return first.index


def descend(together: Together) -> None:
    """One step of plain SGD, each worker on its own parameters."""
    for worker in together.workers:
        for value, gradient in worker.gradients.items():
            worker.values[value] = worker.values[value] - RATE * gradient


def largest_difference(name: str, plan: Plan, *, steps: int = 3, seed: int = 0) -> float:
    """Train beside plain PyTorch; the largest difference in any output, gradient, parameter or buffer."""
    captured, model, (x, target) = case(name)
    plain, worst = copy.deepcopy(model), 0.0
    together = Together(captured, model, plan, seed=seed)
    for _ in range(steps):
        plain.zero_grad()
        loss, out = plain(x, target)
        loss.backward()
        together.step((x, target))
        gradients = together.gradients()
        pairs = list(zip(together.outputs(), (loss, out), strict=True))
        for key, parameter in plain.named_parameters():
            if parameter.grad is None:
                assert key not in gradients
                continue
            pairs.append((gradients.get(key, torch.zeros_like(parameter)), parameter.grad))
            with torch.no_grad():
                parameter -= RATE * parameter.grad
        descend(together)
        state = together.state()
        pairs += [(state[key], buffer) for key, buffer in plain.named_buffers()]
        pairs += [(state[key], parameter) for key, parameter in plain.named_parameters()]
        for mine, theirs in pairs:
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            worst = max(worst, float((mine.double() - theirs.detach().double()).abs().max()))
    return worst
