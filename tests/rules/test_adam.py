"""Adam and AdamW, against torch.optim in a plain loop.

Planted faults, each seen to fail a test here: bias correction left out, of either average; both averages with one
beta; eps inside the root; eps before the correction; the maximum taken after the step; the maximum forgotten;
AdamW's decay in the gradient and Adam's off the parameter; AdamW's decay without the rate; the step counted from
0; the guard that ignores what the private op computed.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from squall.errors import ConfigError
from squall.rules import adam
from squall.rules.adam import Adam, AdamW

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
PAIRS = [
    pytest.param(Adam, torch.optim.Adam, id="Adam"),
    pytest.param(AdamW, torch.optim.AdamW, id="AdamW"),
]
Kind = type[Adam] | type[AdamW]


@pytest.fixture(params=["fused", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with torch's private ops and without them."""
    if request.param == "plain":
        monkeypatch.setattr(adam, "_has_fused", lambda dtype, device: False)
    return str(request.param)


def plain_loop(
    optimizer_of: Callable[..., torch.optim.Optimizer], start: Tensor, grads: list[Tensor], **settings: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    params = torch.nn.Parameter(start.clone())
    optimizer = optimizer_of([params], lr=0.05, **settings)
    for grad in grads:
        params.grad = grad.clone()
        optimizer.step()
    return params.detach(), optimizer.state[params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.0},
        {"weight_decay": 0.3},
        {"betas": (0.5, 0.8), "eps": 0.01},
        {"betas": (0.0, 0.9), "eps": 0.01},
        {"amsgrad": True, "betas": (0.9, 0.5)},
        {"amsgrad": True, "betas": (0.7, 0.6), "eps": 0.1, "weight_decay": 0.2},
    ],
)
@pytest.mark.parametrize("size", [1, 5, 1003])
@pytest.mark.parametrize(("kind", "optimizer_of"), PAIRS)
def test_the_rule_is_torchs(
    kernel: str,
    kind: Kind,
    optimizer_of: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype,
    settings: dict[str, Any],
    size: int,
) -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(size, dtype=dtype), [torch.randn(size, dtype=dtype) for _ in range(20)]
    rule = kind(learning_rate=0.05, **settings)

    params, slots = start.clone(), tuple(rule.init_slot(name, start) for name in rule.slot_names)
    for step, grad in enumerate(grads, start=1):
        rule.update_(params, grad, slots, learning_rate=rule.rate_at(0), step=step)

    expected, state = plain_loop(optimizer_of, start, grads, **settings)
    torch.testing.assert_close(params, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert state.keys() - {"step"} == set(rule.slot_names)
    for name, slot in zip(rule.slot_names, slots, strict=True):
        torch.testing.assert_close(slot, state[name], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_the_gradient_is_only_read(kernel: str, kind: Kind, weight_decay: float) -> None:
    grad, slots = torch.tensor([1.0, -2.0, 3.0]), tuple(torch.zeros(3) for _ in range(3))

    kind(weight_decay=weight_decay, amsgrad=True).update_(
        torch.ones(3), grad, slots, learning_rate=0.1, step=1
    )

    assert grad.tolist() == [1, -2, 3]


@pytest.mark.parametrize(("kind", "optimizer_of"), PAIRS)
def test_defaults_are_torchs(kind: Kind, optimizer_of: Callable[..., torch.optim.Optimizer]) -> None:
    theirs = inspect.signature(optimizer_of).parameters
    mine = kind()

    assert mine.learning_rate == theirs["lr"].default
    for name in ("betas", "eps", "weight_decay", "amsgrad"):
        assert getattr(mine, name) == theirs[name].default


@pytest.mark.parametrize(
    "betas", [(0.9, 1.0), (-0.1, 0.9), (0.9,), [0.9, 0.99], 0.9, (True, 0.9), ("a", 0.9)]
)
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_betas_that_are_no_two_factors_are_refused(kind: Kind, betas: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.betas: expected a tuple of two numbers"):
        kind(betas=betas)


@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_"])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_an_op_that_computes_something_else_is_not_used(
    kind: Kind, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adam._has_fused.cache_clear()
    monkeypatch.setattr(torch, name, lambda params, *args, **settings: params[0].zero_())
    params = torch.ones(2)

    kind(eps=0.0, weight_decay=0.0).update_(
        params, torch.ones(2), (torch.zeros(2), torch.zeros(2)), learning_rate=0.25, step=1
    )

    adam._has_fused.cache_clear()
    torch.testing.assert_close(params, torch.full((2,), 0.75))


@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_"])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_an_op_that_is_missing_is_not_missed(kind: Kind, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adam._has_fused.cache_clear()
    monkeypatch.delattr(torch, name)
    params = torch.ones(2)

    kind(eps=0.0, weight_decay=0.0).update_(
        params, torch.ones(2), (torch.zeros(2), torch.zeros(2)), learning_rate=0.25, step=1
    )

    adam._has_fused.cache_clear()
    torch.testing.assert_close(params, torch.full((2,), 0.75))


def test_this_torch_has_the_fused_ops() -> None:
    assert adam._has_fused(torch.float32, torch.device("cpu"))
    assert adam._has_fused(torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_the_third_slot_is_kept_only_with_amsgrad(kind: Kind) -> None:
    assert kind().slot_names == ("exp_avg", "exp_avg_sq")
    assert kind(amsgrad=True).slot_names == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        kind().init_slot("max_exp_avg_sq", torch.zeros(1))
