"""Layers that are several ops of the graph, of drawn sizes, under many random plans each: outputs and gradients as uncut.

Rules of single ops are tried in `test_rules.py`. Here, what they give together: normalisation across channels and
places, L2 pooling, unshared filters, attention with its projections, and recurrent layers, which are kept whole.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from squall.model.capture import capture
from squall.model.layers import L2Pool2d, LocalContrastNorm2d, LocallyConnected2d
from squall.partition import planner
from squall.partition.together import Together

EXAMPLES_HERE = 3
DAILY_LAYERS, DAILY_PLANS = 2, 15
NIGHTLY_LAYERS, NIGHTLY_PLANS = 25, 200
Drawn = tuple[nn.Module, tuple[int, ...]]
"""A layer, and the shape of one example."""


def response_norm(rng: random.Random) -> Drawn:
    channels = rng.randint(2, 7)
    layer = nn.LocalResponseNorm(
        rng.randint(1, 6), alpha=rng.choice([1e-2, 0.5]), beta=0.75, k=rng.choice([1.0, 2.0])
    )
    return layer, (channels, *[rng.randint(1, 5) for _ in range(rng.randint(1, 2))])


def contrast_norm(rng: random.Random) -> Drawn:
    return LocalContrastNorm2d(rng.choice([1, 3, 5])), (
        rng.randint(1, 3),
        rng.randint(2, 8),
        rng.randint(2, 8),
    )


def l2_pool(rng: random.Random) -> Drawn:
    kernel = rng.randint(1, 4)
    layer = L2Pool2d(kernel, rng.randint(1, 3), padding=rng.randint(0, kernel // 2))
    return layer, (rng.randint(1, 4), kernel + rng.randint(0, 5), kernel + rng.randint(0, 5))


def unshared(rng: random.Random) -> Drawn:
    kernel, size = rng.randint(1, 4), (rng.randint(4, 8), rng.randint(4, 8))
    channels = rng.randint(1, 3)
    layer = LocallyConnected2d(
        channels,
        rng.randint(1, 4),
        size=size,
        kernel=kernel,
        stride=rng.randint(1, 2),
        padding=rng.randint(0, 2),
    )
    return layer, (channels, *size)


class SelfAttention(nn.Module):
    def __init__(self, heads: int, each: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, width = heads, causal, heads * each
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return found


def attention(rng: random.Random) -> Drawn:
    heads, each = rng.randint(1, 4), rng.randint(1, 4)
    return SelfAttention(heads, each, rng.random() < 0.5), (rng.randint(1, 5), heads * each)


class First(nn.Module):
    """The output of a recurrent layer, without its state."""

    def __init__(self, layer: nn.Module, inputs: int, size: int) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(inputs, inputs), layer, nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.after(self.layer(torch.tanh(self.before(x)))[0])
        return found


def recurrent(kind: type[nn.Module]) -> Callable[[random.Random], Drawn]:
    def make(rng: random.Random) -> Drawn:
        inputs, size = rng.randint(1, 4), rng.randint(1, 4)
        layer = kind(inputs, size, num_layers=rng.randint(1, 2), batch_first=True)
        return First(layer, inputs, size), (rng.randint(1, 4), inputs)

    return make


LAYERS: dict[str, Callable[[random.Random], Drawn]] = {
    "local_response_norm": response_norm,
    "local_contrast_norm": contrast_norm,
    "l2_pool": l2_pool,
    "locally_connected": unshared,
    "attention_by_head": attention,
    "lstm": recurrent(nn.LSTM),
    "gru": recurrent(nn.GRU),
}


class Weighed(nn.Module):
    """A layer between a scale, so that its input has a gradient, and a weighted sum, so that no output's is like another's."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.rand(shape) + 0.5), layer
        with torch.no_grad():
            like = layer(torch.zeros(1, *shape))
        self.register_buffer("weights", torch.randn(like.shape[1:]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x * self.scale)
        return (out * self.weights).mean(), out


def try_plans(name: str, seed: int, plans: int) -> None:
    """One drawn layer, captured once, under so many random plans over 2 to 5 partitions."""
    rng = random.Random(f"{name} {seed}")
    torch.manual_seed(rng.randrange(2**31))
    layer, shape = LAYERS[name](rng)
    whole = Weighed(layer, shape).double()
    x = torch.randn(EXAMPLES_HERE, *shape, dtype=torch.float64)
    captured = capture(whole, (x,))
    loss, out = whole(x)
    loss.backward()
    for at in range(plans):
        plan = planner.random(captured.graph, rng.choice([2, 3, 4, 5]), rng.randrange(2**31))
        together = Together(captured, whole, plan, seed=at)
        together.step((x,))
        gradients = together.gradients()
        pairs = list(zip(together.outputs(), (loss, out), strict=True))
        pairs += [(gradients[key], parameter.grad) for key, parameter in whole.named_parameters()]
        for mine, theirs in pairs:
            scale = max(1.0, float(theirs.detach().abs().max()))
            torch.testing.assert_close(
                mine,
                theirs.detach(),
                rtol=0,
                atol=1e-10 * scale,
                msg=lambda m, at=at: f"{name}, {seed}, plan {at}: {m}",
            )


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_several_ops_gives_the_uncut_layers_output_and_gradients(name: str) -> None:
    for seed in range(DAILY_LAYERS):
        try_plans(name, seed, DAILY_PLANS)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_several_ops_gives_the_same_in_thousands_of_cases(name: str) -> None:
    for seed in range(DAILY_LAYERS, DAILY_LAYERS + NIGHTLY_LAYERS):
        try_plans(name, seed, NIGHTLY_PLANS)
