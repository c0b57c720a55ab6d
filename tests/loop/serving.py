"""What tests of users' own loops share: servers forked from a warm process, and a small task."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import squall
from squall.cluster.local import Local
from squall.cluster.servers import Servers
from squall.loop.optimizer import DownpourOptimizer

USUAL = {
    "shards": 2,
    "rule": squall.Sgd(learning_rate=0.1),
    "bind": "127.0.0.1:0",
    "advertise": None,
    "token": None,
    "out": None,
}


def serving(local: Local, model: nn.Module, **settings: Any) -> Servers:
    """As `squall.serve`, from a process that is warm already."""
    local.warm_up()
    return Servers(model, **(USUAL | settings), zygote=local._zygote)


def network(dtype: torch.dtype = torch.float64, *, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 2)).to(dtype)


def batches(num: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num * 20, 10, generator=generator, dtype=dtype)
    return list(zip(x.split(20), (x[:, :5].sum(dim=1) > 0).long().split(20), strict=True))


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num: int, *, per_step: int = 1) -> None:
    """The loop that everyone writes; `per_step` minibatches' gradients are summed for each step."""
    dtype = next(model.parameters()).dtype
    for number, batch in enumerate(batches(num, dtype), start=1):
        backward(model, batch)
        if number % per_step == 0:
            optimizer.step()
            optimizer.zero_grad()


def join(servers: Servers, model: nn.Module, **settings: Any) -> DownpourOptimizer:
    return DownpourOptimizer(model, servers.address, token=servers.token, **settings)


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def plain(
    make: Callable[..., torch.optim.Optimizer], num: int, dtype: torch.dtype = torch.float64, **settings: Any
) -> nn.Module:
    """What the loop makes of `network()` with an optimizer of torch."""
    model = network(dtype)
    train(model, make(model.parameters()), num, **settings)
    return model
