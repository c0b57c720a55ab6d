"""Momentum, against torch.optim.SGD with momentum in a plain loop.

Planted faults, each seen to fail a test here: the sum started at zero times momentum; the first gradient dampened
too; dampening left out, of the formula and of the op's call; nesterov without the gradient itself; decay left out of
the sum; the second update taken for the first; a slot without momentum; the gradient changed in place; the guard that
ignores what the private op computed.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from squall.errors import ConfigError
from squall.rules import momentum
from squall.rules.momentum import Momentum

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(params=["fused", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with torch's private op and without it."""
    if request.param == "plain":
        monkeypatch.setattr(momentum, "_has_fused", lambda dtype, device: False)
    return str(request.param)


def plain_loop(start: Tensor, grads: list[Tensor], **settings: Any) -> tuple[Tensor, Tensor | None]:
    params = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([params], lr=0.1, **settings)
    for grad in grads:
        params.grad = grad.clone()
        optimizer.step()
    return params.detach(), optimizer.state[params].get("momentum_buffer")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 0.3, "weight_decay": 0.2},
        {"momentum": 0.0, "dampening": 0.3, "weight_decay": 0.2},
    ],
)
@pytest.mark.parametrize("size", [1, 5, 1003])
def test_momentum_is_torchs_momentum(
    kernel: str, dtype: torch.dtype, settings: dict[str, Any], size: int
) -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(size, dtype=dtype), [torch.randn(size, dtype=dtype) for _ in range(20)]
    rule = Momentum(learning_rate=0.1, **settings)

    params, slots = start.clone(), tuple(rule.init_slot(name, start) for name in rule.slot_names)
    for step, grad in enumerate(grads, start=1):
        rule.update_(params, grad, slots, learning_rate=rule.rate_at(0), step=step)

    expected, buffer = plain_loop(start, grads, **settings)
    torch.testing.assert_close(params, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if buffer is not None:
        torch.testing.assert_close(slots[0], buffer, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_what_the_slot_held_before_the_first_update_does_not_matter(kernel: str) -> None:
    params, slot = torch.zeros(1), torch.full((1,), 100.0)

    Momentum(momentum=0.5, dampening=0.5).update_(params, torch.ones(1), (slot,), learning_rate=0.5, step=1)

    assert (params.item(), slot.item()) == (-0.5, 1)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("step", [1, 2])
def test_the_gradient_is_only_read(kernel: str, weight_decay: float, nesterov: bool, step: int) -> None:
    grad = torch.tensor([1.0, -2.0, 3.0])

    Momentum(weight_decay=weight_decay, nesterov=nesterov).update_(
        torch.ones(3), grad, (torch.zeros(3),), learning_rate=0.1, step=step
    )

    assert grad.tolist() == [1, -2, 3]


def test_defaults_are_torchs_but_for_the_momentum_itself() -> None:
    theirs = inspect.signature(torch.optim.SGD).parameters
    mine = Momentum()

    assert (mine.learning_rate, mine.momentum) == (theirs["lr"].default, 0.9)
    for name in ("dampening", "nesterov", "weight_decay"):
        assert getattr(mine, name) == theirs[name].default


@pytest.mark.parametrize("settings", [{"momentum": 0.0}, {"dampening": 0.1}])
def test_nesterov_needs_momentum_without_dampening_as_in_torch(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Momentum\(nesterov=True\): expected momentum above 0"):
        Momentum(nesterov=True, **settings)
    with pytest.raises(ValueError, match="Nesterov"):
        torch.optim.SGD([torch.zeros(1)], **({"momentum": 0.9, "nesterov": True} | settings))


def test_an_op_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    momentum._has_fused.cache_clear()
    monkeypatch.setattr(torch, "_fused_sgd_", lambda params, *args, **settings: params[0].zero_())
    params = torch.ones(2)

    Momentum().update_(params, torch.ones(2), (torch.zeros(2),), learning_rate=0.25, step=1)

    momentum._has_fused.cache_clear()
    assert params.tolist() == [0.75, 0.75]


def test_an_op_that_is_missing_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    momentum._has_fused.cache_clear()
    monkeypatch.delattr(torch, "_fused_sgd_")
    params = torch.ones(2)

    Momentum().update_(params, torch.ones(2), (torch.zeros(2),), learning_rate=0.25, step=1)

    momentum._has_fused.cache_clear()
    assert params.tolist() == [0.75, 0.75]


def test_this_torch_has_the_fused_op() -> None:
    assert momentum._has_fused(torch.float32, torch.device("cpu"))
    assert momentum._has_fused(torch.float64, torch.device("cpu"))


def test_momentum_keeps_one_slot_and_none_without_momentum() -> None:
    assert Momentum().slot_names == ("momentum_buffer",)
    assert Momentum(momentum=0.0).slot_names == ()
    with pytest.raises(KeyError, match="'sum'"):
        Momentum().init_slot("sum", torch.zeros(1))
    with pytest.raises(KeyError, match="momentum_buffer"):
        Momentum(momentum=0.0).init_slot("momentum_buffer", torch.zeros(1))
