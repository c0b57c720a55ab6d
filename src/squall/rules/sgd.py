"""Stochastic gradient descent, with torch.optim's parameters, defaults and arithmetic."""

from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from squall.keywords import named
from squall.rules.rule import LearningRate, Rule


@named
@final
@dataclass(frozen=True, kw_only=True)
class Sgd(Rule):
    """Stochastic gradient descent: ``params -= learning_rate * (grad + weight_decay * params)``.

    Attributes:
        learning_rate: see `Rule`.
        weight_decay: factor of the L2 penalty's gradient, at least 0.
    Raises:
        ConfigError: a setting is out of its range.
    Source: torch.optim.SGD without momentum; `Momentum` has it.

    >>> params = torch.tensor([1.0, 2.0])
    >>> Sgd(learning_rate=0.5).update_(params, torch.ones(2), (), learning_rate=0.5, step=1)
    >>> params
    tensor([0.5000, 1.5000])
    """

    learning_rate: LearningRate = 1e-3
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect_at_least_zero("weight_decay")

    def init_slot(self, name: str, params: Tensor) -> Tensor:
        raise KeyError(f"Sgd keeps no slot {name!r}")

    def update_(
        self, params: Tensor, grad: Tensor, slots: tuple[Tensor, ...], *, learning_rate: float, step: int
    ) -> None:
        if self.weight_decay == 0:
            params.add_(grad, alpha=-learning_rate)
        elif _has_fused(params.dtype, params.device):
            _fused(params, grad, learning_rate, self.weight_decay)
        else:
            _plain(params, grad, learning_rate, self.weight_decay)


def _plain(params: Tensor, grad: Tensor, learning_rate: float, weight_decay: float) -> None:
    params.add_(grad.add(params, alpha=weight_decay), alpha=-learning_rate)


def _fused(params: Tensor, grad: Tensor, learning_rate: float, weight_decay: float) -> None:
    # One pass over memory, where the plain formula makes two and a temporary. The op belongs to torch's
    # own optimizers and is private; `_has_fused` is the guard.
    torch._fused_sgd_(
        [params],
        [grad],
        [],
        weight_decay=weight_decay,
        momentum=0.0,
        lr=learning_rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


@cache
def _has_fused(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has the private op for such tensors, tried on one element."""
    one = torch.ones(1, dtype=dtype, device=device)
    try:
        _fused(one, torch.ones_like(one), 0.5, 0.5)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return one.item() == 0.25
