"""Adam and AdamW, with torch.optim's parameters, defaults and arithmetic."""

from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from squall.keywords import named
from squall.rules.rule import LearningRate, Rule


@dataclass(frozen=True, kw_only=True)
class _Moments(Rule):
    """What `Adam` and `AdamW` share: everything but what becomes of the weight decay."""

    learning_rate: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect_betas("betas")
        self._expect_at_least_zero("eps")
        self._expect_at_least_zero("weight_decay")
        self._expect_bool("amsgrad")

    @property
    def slot_names(self) -> tuple[str, ...]:
        averages = ("exp_avg", "exp_avg_sq")
        return (*averages, "max_exp_avg_sq") if self.amsgrad else averages

    def init_slot(self, name: str, params: Tensor) -> Tensor:
        if name not in self.slot_names:
            raise KeyError(f"{self} keeps no slot {name!r}")
        return torch.zeros_like(params)


@named
@final
@dataclass(frozen=True, kw_only=True)
class Adam(_Moments):
    """Adam: steps along the mean of the gradients, measured against the root of their mean square.

    ::

        grad           += weight_decay * params
        exp_avg         = beta1 * exp_avg + (1 - beta1) * grad
        exp_avg_sq      = beta2 * exp_avg_sq + (1 - beta2) * grad ** 2
        max_exp_avg_sq  = max(max_exp_avg_sq, exp_avg_sq)                      only with amsgrad
        params         -= learning_rate / (1 - beta1 ** step) * exp_avg
                          / (sqrt(exp_avg_sq or its maximum) / sqrt(1 - beta2 ** step) + eps)

    A step is an update of that tensor: pushes without a gradient for it do not count.

    Attributes:
        learning_rate: see `Rule`.
        betas: what remains of the two averages from one update of a tensor to the next, each from 0 to below 1.
        eps: keeps the division finite, at least 0.
        weight_decay: factor of the L2 penalty's gradient, at least 0.
        amsgrad: divide by the largest mean square so far; a third slot.
    Raises:
        ConfigError: a setting is out of its range.
    Source: Kingma, Ba, "Adam: A Method for Stochastic Optimization", 2015, Algorithm 1; amsgrad from Reddi, Kale,
        Kumar, "On the Convergence of Adam and Beyond", 2018; details as in torch.optim.Adam.

    >>> rule = Adam(learning_rate=0.5)
    >>> params = torch.tensor([1.0, 1.0])
    >>> slots = tuple(rule.init_slot(name, params) for name in rule.slot_names)
    >>> rule.update_(params, torch.tensor([3.0, -4.0]), slots, learning_rate=0.5, step=1)
    >>> params, slots[0]
    (tensor([0.5000, 1.5000]), tensor([ 0.3000, -0.4000]))
    """

    def update_(
        self, params: Tensor, grad: Tensor, slots: tuple[Tensor, ...], *, learning_rate: float, step: int
    ) -> None:
        if _has_fused(params.dtype, params.device):
            _fused(self, params, grad, slots, learning_rate, step)
            return
        if self.weight_decay:
            grad = grad.add(params, alpha=self.weight_decay)
        _plain(self, params, grad, slots, learning_rate, step)


@named
@final
@dataclass(frozen=True, kw_only=True)
class AdamW(_Moments):
    """Adam whose weight decay shrinks the parameters themselves, and does not enter the averages.

    ::

        params -= learning_rate * weight_decay * params
        and then as `Adam` without weight decay

    Attributes:
        learning_rate: see `Rule`.
        betas, eps, amsgrad: see `Adam`.
        weight_decay: what an update takes of a parameter, as a multiple of the learning rate, at least 0.
    Raises:
        ConfigError: a setting is out of its range.
    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019, Algorithm 2; details as in
        torch.optim.AdamW.

    >>> rule = AdamW(learning_rate=0.5, weight_decay=0.5)
    >>> params = torch.tensor([4.0])
    >>> slots = tuple(rule.init_slot(name, params) for name in rule.slot_names)
    >>> rule.update_(params, torch.tensor([3.0]), slots, learning_rate=0.5, step=1)
    >>> params
    tensor([2.5000])
    """

    weight_decay: float = 0.01

    def update_(
        self, params: Tensor, grad: Tensor, slots: tuple[Tensor, ...], *, learning_rate: float, step: int
    ) -> None:
        if _has_fused(params.dtype, params.device):
            _fused(self, params, grad, slots, learning_rate, step)
            return
        if self.weight_decay:
            params.mul_(1 - learning_rate * self.weight_decay)
        _plain(self, params, grad, slots, learning_rate, step)


def _plain(
    rule: _Moments, params: Tensor, grad: Tensor, slots: tuple[Tensor, ...], learning_rate: float, step: int
) -> None:
    """Adam without weight decay."""
    (beta1, beta2), (exp_avg, exp_avg_sq, *maximum) = rule.betas, slots
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    square = exp_avg_sq
    for square in maximum:  # one with amsgrad, else none
        torch.maximum(square, exp_avg_sq, out=square)
    root = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(rule.eps)
    params.addcdiv_(exp_avg, root, value=-learning_rate / (1 - beta1**step))


def _fused(
    rule: _Moments, params: Tensor, grad: Tensor, slots: tuple[Tensor, ...], learning_rate: float, step: int
) -> None:
    # One pass over memory. The ops belong to torch's own optimizers and are private; `_has_fused` is the guard.
    op = torch._fused_adamw_ if isinstance(rule, AdamW) else torch._fused_adam_
    exp_avg, exp_avg_sq, *maximum = slots
    op(
        [params],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        maximum,
        [torch.tensor(float(step), device=params.device)],
        lr=learning_rate,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        amsgrad=rule.amsgrad,
        maximize=False,
    )


@cache
def _has_fused(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has both private ops for such tensors, each tried with one update of one element."""
    # Every value on the way is exact: both see a gradient of 2 (Adam after the decay, 1 + 0.5 * 2) and go 0.5
    # down, Adam from 2 and AdamW, whose decay comes off the parameter, from 1.5.
    return _moves(Adam, 1.0, 1.5, dtype, device) and _moves(AdamW, 2.0, 1.0, dtype, device)


def _moves(
    kind: type[_Moments], grad: float, result: float, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether an update of the parameter 2 at rate 0.5 by this gradient comes to this result."""
    rule = kind(betas=(0.5, 0.75), eps=0.0, weight_decay=0.5, amsgrad=True)
    params = torch.full((1,), 2.0, dtype=dtype, device=device)
    slots = tuple(rule.init_slot(name, params) for name in rule.slot_names)
    try:
        _fused(rule, params, torch.full_like(params, grad), slots, 0.5, 1)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return params.item() == result and [slot.item() for slot in slots] == [1.0, 1.0, 1.0]
