"""Stochastic gradient descent with momentum, with torch.optim's parameters, defaults and arithmetic."""

from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from squall.errors import ConfigError
from squall.keywords import named
from squall.rules.rule import LearningRate, Rule


@named
@final
@dataclass(frozen=True, kw_only=True)
class Momentum(Rule):
    """Stochastic gradient descent along a decaying sum of the gradients.

    ::

        grad            += weight_decay * params
        momentum_buffer  = grad at a tensor's first update, and later
                           momentum * momentum_buffer + (1 - dampening) * grad
        params          -= learning_rate * momentum_buffer, or with nesterov
                           learning_rate * (grad + momentum * momentum_buffer)

    Without momentum (0.0) it keeps no slot, and dampening does nothing, as in torch.

    Attributes:
        learning_rate: see `Rule`.
        momentum: what remains of the sum from one update of a tensor to the next, at least 0.
        dampening: how much of a gradient is left out of the sum from a tensor's second update on, at least 0.
        nesterov: look ahead along the sum; needs momentum, and dampening 0.
        weight_decay: factor of the L2 penalty's gradient, at least 0.
    Raises:
        ConfigError: a setting is out of its range, or nesterov without momentum or with dampening.
    Source: torch.optim.SGD, whose momentum is 0 unless given; Sutskever et al., "On the importance of
        initialization and momentum in deep learning", 2013, has the same up to where the rate stands.

    >>> rule = Momentum(learning_rate=0.5, momentum=0.5)
    >>> params = torch.tensor([1.0])
    >>> slots = (rule.init_slot("momentum_buffer", params),)
    >>> for step in (1, 2):
    ...     rule.update_(params, torch.tensor([2.0]), slots, learning_rate=0.5, step=step)
    >>> params, slots[0]
    (tensor([-1.5000]), tensor([3.]))
    """

    learning_rate: LearningRate = 1e-3
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("momentum", "dampening", "weight_decay"):
            self._expect_at_least_zero(name)
        self._expect_bool("nesterov")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ConfigError(
                subject="Momentum(nesterov=True)",
                expected="momentum above 0 and dampening 0",
                got=f"momentum={self.momentum}, dampening={self.dampening}",
                remedy="Leave dampening out, or nesterov.",
            )

    @property
    def slot_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def init_slot(self, name: str, params: Tensor) -> Tensor:
        if name not in self.slot_names:
            raise KeyError(f"{self} keeps no slot {name!r}")
        return torch.zeros_like(params)

    def update_(
        self, params: Tensor, grad: Tensor, slots: tuple[Tensor, ...], *, learning_rate: float, step: int
    ) -> None:
        update_ = _fused if _has_fused(params.dtype, params.device) else _plain
        update_(self, params, grad, slots, learning_rate, step == 1)


def _plain(
    rule: Momentum,
    params: Tensor,
    grad: Tensor,
    buffers: tuple[Tensor, ...],
    learning_rate: float,
    is_first: bool,
) -> None:
    if rule.weight_decay:
        grad = grad.add(params, alpha=rule.weight_decay)
    for buffer in buffers:  # one, or none without momentum
        if is_first:
            buffer.copy_(grad)
        else:
            buffer.mul_(rule.momentum).add_(grad, alpha=1 - rule.dampening)
        grad = grad.add(buffer, alpha=rule.momentum) if rule.nesterov else buffer
    params.add_(grad, alpha=-learning_rate)


def _fused(
    rule: Momentum,
    params: Tensor,
    grad: Tensor,
    buffers: tuple[Tensor, ...],
    learning_rate: float,
    is_first: bool,
) -> None:
    # One pass over memory. The op belongs to torch's own optimizers and is private; `_has_fused` is the guard.
    torch._fused_sgd_(
        [params],
        [grad],
        list(buffers),
        weight_decay=rule.weight_decay,
        momentum=rule.momentum,
        lr=learning_rate,
        dampening=rule.dampening,
        nesterov=rule.nesterov,
        maximize=False,
        is_first_step=is_first,
    )


@cache
def _has_fused(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has the private op for such tensors, tried with two updates of one element."""
    rule = Momentum(momentum=0.5, dampening=0.5, weight_decay=0.5)
    one, buffer = torch.ones(1, dtype=dtype, device=device), torch.zeros(1, dtype=dtype, device=device)
    try:
        _fused(rule, one, torch.ones_like(one), (buffer,), 0.5, True)  # one 0.25, buffer 1.5
        _fused(rule, one, torch.ones_like(one), (buffer,), 0.5, False)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return one.item() == -0.40625 and buffer.item() == 1.3125
