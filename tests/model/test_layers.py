"""Layers against plain loops, convolution and the formulas; and that capture sees their ops.

Faults planted by hand, each seen to fail: filters taken of the transposed place · stride of rows for columns · bias of
the whole map · not cast under autocast · squares not summed but averaged in L2 pooling · the deviation not floored · mean over one channel only.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from squall.errors import ModelError
from squall.model import layers
from squall.model.layers import L2Pool2d, LocalContrastNorm2d, LocallyConnected2d


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_locally_connected_layer_is_a_loop_over_places_with_filters_of_their_own() -> None:
    layer = LocallyConnected2d(2, 3, size=(7, 9), kernel=(3, 2), stride=(2, 3), padding=(1, 0)).double()
    value = drawn(4, 2, 7, 9)
    padded = functional.pad(value, (0, 0, 1, 1))
    expected = torch.zeros(4, 3, 4, 3, dtype=torch.float64)
    for row in range(4):
        for column in range(3):
            patch = padded[:, :, 2 * row : 2 * row + 3, 3 * column : 3 * column + 2].flatten(1)
            expected[:, :, row, column] = patch @ layer.weight[row, column].t() + layer.bias[row, column]
    torch.testing.assert_close(layer(value), expected)


def test_with_equal_filters_everywhere_it_is_a_convolution_forward_and_backward() -> None:
    layer, twin = (
        LocallyConnected2d(3, 4, size=(8, 8), kernel=3, bias=False).double(),
        nn.Conv2d(3, 4, 3, bias=False),
    )
    twin.double()
    with torch.no_grad():
        layer.weight.copy_(twin.weight.flatten(1).expand(6, 6, -1, -1))
    value = drawn(2, 3, 8, 8)
    mine, theirs = layer(value), twin(value)
    torch.testing.assert_close(mine, theirs)
    mine.square().sum().backward()
    theirs.square().sum().backward()
    summed = layer.weight.grad.sum((0, 1)).reshape(4, 3, 3, 3)
    torch.testing.assert_close(summed, twin.weight.grad)


@pytest.mark.parametrize("patch_bytes", [0, 3 * 12 * 3 * 8, 1 << 18])
def test_its_gradients_are_right_however_many_places_are_gathered_at_a_time(
    patch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "PATCH_BYTES", patch_bytes)
    layer = LocallyConnected2d(2, 2, size=(5, 9), kernel=(3, 2), stride=(2, 1)).double()
    value = drawn(3, 2, 5, 9)
    lengths = {0: [1] * 8, 3 * 12 * 3 * 8: [3, 3, 2], 1 << 18: [8]}[patch_bytes]
    runs = layers._Runs(torch.zeros(2, 5, 9, 3, dtype=torch.float64), layer.weight, (3, 2), (2, 1))

    assert [len(patches) for patches in runs.patches] == lengths * 2
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: torch.ops.squall.locally_connected2d(x, weight, bias, (3, 2), (2, 1)),
        (value.requires_grad_(), layer.weight, layer.bias),
    )
    assert torch.autograd.gradcheck(
        lambda weight: torch.ops.squall.locally_connected2d(value.detach(), weight, None, (3, 2), (2, 1)),
        (layer.weight,),
    )


@pytest.mark.parametrize("bias", [True, False])
def test_under_autocast_it_computes_in_lower_precision_as_a_convolution_does(bias: bool) -> None:
    layer = LocallyConnected2d(2, 3, size=(6, 6), kernel=3, bias=bias)
    value = drawn(4, 2, 6, 6).float()
    expected = layer(value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = layer(value.bfloat16())
    made.float().sum().backward()

    assert made.dtype is torch.bfloat16
    torch.testing.assert_close(made.float(), expected, rtol=0.05, atol=0.05)
    assert layer.weight.grad.dtype is torch.float32


def test_a_second_derivative_is_refused_by_name() -> None:
    value = drawn(1, 2, 6, 6).requires_grad_()
    made = LocallyConnected2d(2, 3, size=(6, 6), kernel=3).double()(value).square().sum()
    with pytest.raises(ModelError, match=r"LocallyConnected2d.*create_graph=True"):
        torch.autograd.grad(made, value, create_graph=True)


def test_it_has_filters_for_every_place() -> None:
    layer = LocallyConnected2d(2, 7, size=(6, 6), kernel=3)
    assert sum(each.numel() for each in layer.parameters()) == 7 * 16 * (3 * 3 * 2 + 1)


def test_an_input_of_another_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(ModelError, match=r"expected inputs of shape \(B, 2, 6, 6\), but got \(1, 2, 6, 7\)"):
        LocallyConnected2d(2, 7, size=(6, 6), kernel=3)(torch.zeros(1, 2, 6, 7))


def test_l2_pooling_is_the_root_of_a_sum_of_squares() -> None:
    value = drawn(2, 3, 6, 6)
    expected = (value.unfold(2, 3, 2).unfold(3, 3, 2).square().sum((-1, -2)) + 1e-6).sqrt()
    torch.testing.assert_close(L2Pool2d(3, 2)(value), expected)


def test_local_contrast_is_the_formula_place_by_place() -> None:
    layer, value = LocalContrastNorm2d(3, floor=0.3).double(), drawn(2, 2, 5, 5)

    def mean(plane: torch.Tensor) -> torch.Tensor:
        padded, found = functional.pad(plane, (1, 1, 1, 1)), torch.zeros(2, 1, 5, 5, dtype=torch.float64)
        for row in range(5):
            for column in range(5):
                window = padded[:, :, row : row + 3, column : column + 3] * layer.window[0, 0]
                found[:, 0, row, column] = window.sum((1, 2, 3)) / 2
        return found

    centred = value - mean(value)
    expected = centred / mean(centred**2).sqrt().clamp_min(0.3)
    torch.testing.assert_close(layer(value), expected)
    assert abs(float(layer.window.sum()) - 1) < 1e-6


def test_capture_sees_the_locally_connected_product_as_one_op() -> None:
    model = nn.Sequential(
        LocallyConnected2d(2, 3, size=(6, 6), kernel=3, padding=1), L2Pool2d(2), LocalContrastNorm2d(3)
    )
    graph = torch.export.export(model, (torch.randn(2, 2, 6, 6),), strict=False).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called[:2] == ["aten.pad.default", "squall.locally_connected2d.default"]
    assert {"aten.avg_pool2d.default", "aten.conv2d.default"} <= set(called)
