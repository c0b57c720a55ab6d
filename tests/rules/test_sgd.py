"""Sgd, against torch.optim.SGD in a plain loop.

Planted faults, each seen to fail a test here: ascent instead of descent; decay of the wrong sign; decay applied
after the step; decay left out; the gradient changed in place; the guard that ignores what the private op computed.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from squall.rules import sgd
from squall.rules.sgd import Sgd

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(params=["fused", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with torch's private op and without it."""
    if request.param == "plain":
        monkeypatch.setattr(sgd, "_has_fused", lambda dtype, device: False)
    return str(request.param)


def plain_loop(start: Tensor, grads: list[Tensor], **settings: Any) -> Tensor:
    params = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([params], **settings)
    for grad in grads:
        params.grad = grad.clone()
        optimizer.step()
    return params.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 5, 1003])
def test_sgd_is_torchs_sgd(kernel: str, dtype: torch.dtype, weight_decay: float, size: int) -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(size, dtype=dtype), [torch.randn(size, dtype=dtype) for _ in range(20)]
    rule = Sgd(learning_rate=0.1, weight_decay=weight_decay)

    params = start.clone()
    for step, grad in enumerate(grads, start=1):
        rule.update_(params, grad, (), learning_rate=rule.rate_at(0), step=step)

    expected = plain_loop(start, grads, lr=0.1, weight_decay=weight_decay)
    torch.testing.assert_close(params, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_gradient_is_only_read(kernel: str, weight_decay: float) -> None:
    grad = torch.tensor([1.0, -2.0, 3.0])

    Sgd(weight_decay=weight_decay).update_(torch.ones(3), grad, (), learning_rate=0.1, step=1)

    assert grad.tolist() == [1, -2, 3]


def test_defaults_are_torchs() -> None:
    theirs = inspect.signature(torch.optim.SGD).parameters

    assert Sgd().learning_rate == theirs["lr"].default
    assert Sgd().weight_decay == theirs["weight_decay"].default


def test_an_op_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sgd._has_fused.cache_clear()
    monkeypatch.setattr(torch, "_fused_sgd_", lambda params, *args, **settings: params[0].zero_())
    params = torch.ones(2)

    Sgd(weight_decay=1.0).update_(params, torch.ones(2), (), learning_rate=0.25, step=1)

    sgd._has_fused.cache_clear()
    assert params.tolist() == [0.5, 0.5]


def test_an_op_that_is_missing_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    sgd._has_fused.cache_clear()
    monkeypatch.delattr(torch, "_fused_sgd_")
    params = torch.ones(2)

    Sgd(weight_decay=1.0).update_(params, torch.ones(2), (), learning_rate=0.25, step=1)

    sgd._has_fused.cache_clear()
    assert params.tolist() == [0.5, 0.5]


def test_this_torch_has_the_fused_op() -> None:
    assert sgd._has_fused(torch.float32, torch.device("cpu"))
    assert sgd._has_fused(torch.float64, torch.device("cpu"))


def test_sgd_keeps_no_slots() -> None:
    assert Sgd().slot_names == ()
    with pytest.raises(KeyError, match="momentum"):
        Sgd().init_slot("momentum", torch.zeros(1))
