"""Adagrad, against torch.optim.Adagrad in a plain loop.

Planted faults, each seen to fail a test here: eps inside the root; the sum updated after the step; decay left out
of the sum; the rate's decay counted from step 0; the slot started at zero; the gradient changed in place; the
decay given to the fused op twice; the guard that ignores what the private op computed.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from squall.rules import adagrad
from squall.rules.adagrad import Adagrad

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(params=["fused", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with torch's private op and without it."""
    if request.param == "plain":
        monkeypatch.setattr(adagrad, "_has_fused", lambda dtype, device: False)
    return str(request.param)


def plain_loop(start: Tensor, grads: list[Tensor], **settings: Any) -> tuple[Tensor, Tensor]:
    params = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adagrad([params], **settings)
    for grad in grads:
        params.grad = grad.clone()
        optimizer.step()
    return params.detach(), optimizer.state[params]["sum"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr_decay": 0.3},
        {"weight_decay": 0.1},
        {"initial_accumulator_value": 0.5, "eps": 0.01},
        {"lr_decay": 0.1, "weight_decay": 0.2, "initial_accumulator_value": 0.1, "eps": 1e-3},
    ],
)
@pytest.mark.parametrize("size", [1, 5, 1003])
def test_adagrad_is_torchs_adagrad(
    kernel: str, dtype: torch.dtype, settings: dict[str, float], size: int
) -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(size, dtype=dtype), [torch.randn(size, dtype=dtype) for _ in range(20)]
    rule = Adagrad(learning_rate=0.1, **settings)

    params, slots = start.clone(), (rule.init_slot("sum", start),)
    for step, grad in enumerate(grads, start=1):
        rule.update_(params, grad, slots, learning_rate=rule.rate_at(0), step=step)

    expected, sums = plain_loop(start, grads, lr=0.1, **settings)
    torch.testing.assert_close(params, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(slots[0], sums, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_gradient_is_only_read(kernel: str, weight_decay: float) -> None:
    grad = torch.tensor([1.0, -2.0, 3.0])

    Adagrad(weight_decay=weight_decay).update_(
        torch.ones(3), grad, (torch.zeros(3),), learning_rate=0.1, step=1
    )

    assert grad.tolist() == [1, -2, 3]


def test_defaults_are_torchs() -> None:
    theirs = inspect.signature(torch.optim.Adagrad).parameters
    mine = Adagrad()

    assert mine.learning_rate == theirs["lr"].default
    for name in ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
        assert getattr(mine, name) == theirs[name].default


def test_an_op_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    adagrad._has_fused.cache_clear()
    monkeypatch.setattr(torch, "_fused_adagrad_", lambda params, *args, **settings: params[0].zero_())
    params = torch.ones(2)

    Adagrad().update_(params, torch.ones(2), (torch.zeros(2),), learning_rate=0.25, step=1)

    adagrad._has_fused.cache_clear()
    assert params.tolist() == [0.75, 0.75]


def test_an_op_that_is_missing_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    adagrad._has_fused.cache_clear()
    monkeypatch.delattr(torch, "_fused_adagrad_")
    params = torch.ones(2)

    Adagrad().update_(params, torch.ones(2), (torch.zeros(2),), learning_rate=0.25, step=1)

    adagrad._has_fused.cache_clear()
    assert params.tolist() == [0.75, 0.75]


def test_this_torch_has_the_fused_op() -> None:
    assert adagrad._has_fused(torch.float32, torch.device("cpu"))
    assert adagrad._has_fused(torch.float64, torch.device("cpu"))


def test_adagrad_keeps_one_slot() -> None:
    with pytest.raises(KeyError, match="momentum"):
        Adagrad().init_slot("momentum", torch.zeros(1))
