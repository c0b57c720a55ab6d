"""A recipe in a file of your own: two noisy rings, told apart by a small network.

Train it with::

    squall train examples/my_recipe.py:rings --set strategy.n_push=2
"""

import torch
from torch import Tensor, nn

import squall

NUM_EXAMPLES = 2_000


def rings() -> squall.Job:
    """What is computed, on what, by how many; `squall train` takes the job from here."""
    x, y = points()
    cut = NUM_EXAMPLES // 10
    return squall.Job(
        network,
        (x[cut:], y[cut:]),
        test=(x[:cut], y[:cut]),
        strategy=squall.Downpour(warm_start=16, rule=squall.Adagrad(learning_rate=0.05)),
        replicas=2,
        batch_size=20,
        epochs=4,
        threads=1,
    )


def points() -> tuple[Tensor, Tensor]:
    """Points in the plane, shape (n, 2), and which ring each lies on, shape (n,)."""
    generator = torch.Generator().manual_seed(0)
    ring = torch.randint(2, (NUM_EXAMPLES,), generator=generator)
    radius = 1.0 + ring + 0.2 * torch.randn(NUM_EXAMPLES, generator=generator)
    angle = 2 * torch.pi * torch.rand(NUM_EXAMPLES, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), ring


def network() -> nn.Module:
    """A function, not a network: Squall calls it under the job's seed."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
