"""The clipping factor, against torch.nn.utils.clip_grad_norm_.

Planted faults, each seen to fail a test here: no bound of 1; the 1e-6 left out; `min` with 1 first, which makes a
norm that is no number 1; norm and bound exchanged; 0 for a short gradient.
"""

import math

import pytest
import torch

from squall.rules.clip import clip_factor


@pytest.mark.parametrize("clip_norm", [0.0, 1e-7, 0.5, 1.0, 7.0, 1e9])
@pytest.mark.parametrize("scale", [0.0, 1e-8, 0.1, 1.0, 1e6])
def test_a_gradient_times_the_factor_is_torchs_clipped_gradient(scale: float, clip_norm: float) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 50, 1)]
    grads = [scale * torch.randn_like(parameter) for parameter in parameters]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()

    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)

    factor = clip_factor(norm.item(), clip_norm)
    for parameter, grad in zip(parameters, grads, strict=True):
        torch.testing.assert_close(grad * factor, parameter.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_leaves_a_gradient_that_is_not(norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([norm])
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)

    assert math.isnan(norm * clip_factor(norm, 1.0))
    assert math.isnan(parameter.grad.item())


def test_a_norm_that_is_no_number_gives_a_factor_that_is_none() -> None:
    assert math.isnan(clip_factor(math.nan, 1.0))
    assert clip_factor(math.inf, 1.0) == 0


def test_a_gradient_that_is_short_enough_is_left_as_it_is() -> None:
    assert clip_factor(1.0, 2.0) == 1
    assert clip_factor(0.0, 1.0) == 1
