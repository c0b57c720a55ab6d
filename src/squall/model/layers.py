"""Layers of the networks that DistBelief trained and torch lacks: unshared filters, L2 pooling, local contrast.

Each is an ordinary `nn.Module` that trains anywhere. Local response normalisation is torch's own
`nn.LocalResponseNorm`; all of these capture as aten ops with halos of their own, but for the locally connected product,
which is the op `squall::locally_connected2d`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from squall.errors import ModelError

LOCALLY_CONNECTED = "locally_connected2d"
_LIBRARY = torch.library.Library("squall", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "locally_connected2d(Tensor input, Tensor weight, Tensor? bias, int[2] kernel, int[2] stride) -> Tensor"
)


PATCH_BYTES = 1 << 18
"""Patches gathered at a time, so that they are still in a core's cache when they are multiplied."""


class _Runs:
    """The places of a locally connected layer in runs, a few neighbours of one row at a time, and memory for a run's windows.

    All is kept with the examples last, where they lie side by side: gathering then copies whole rows of examples, and
    the product of each place has them all.

    Args:
        input: shape (C, H, W, B).
        weight: shape (rows, columns, outs, width).
    """

    def __init__(self, input: Tensor, weight: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> None:
        self._rows, self._columns, _, width = weight.shape
        self._kernel, self._stride = kernel, stride
        fitting = PATCH_BYTES // max(1, width * input.shape[3] * input.element_size())
        num_runs = -(-self._columns // max(1, min(self._columns, fitting)))
        longest = -(-self._columns // max(1, num_runs))  # so that the last run is not a short one
        self._lengths = [min(longest, self._columns - at) for at in range(0, self._columns, max(1, longest))]
        memory = input.new_empty(longest, input.shape[0], *kernel, input.shape[3])
        # Of each run the same memory, as (places, C, kernel height, kernel width, B).
        self.patches = [memory[:length] for length in self._lengths] * self._rows

    def of(self, values: Tensor) -> list[Tensor]:
        """Each run's part of what has (rows, columns, ...)."""
        return [part for row in values.unbind() for part in torch.split(row, self._lengths)]

    def windows(self, input: Tensor) -> list[Tensor]:
        """Each run's view of an input of (C, H, W, B): what its places see, of the shape of its patches."""
        (high, wide), (down, right) = self._kernel, self._stride
        seen = input.unfold(1, high, down).unfold(2, wide, right)
        return self.of(seen.permute(1, 2, 0, 4, 5, 3)[: self._rows, : self._columns])


@torch.library.impl(_LIBRARY, LOCALLY_CONNECTED, "CompositeExplicitAutograd")
def locally_connected2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, kernel: list[int], stride: list[int]
) -> Tensor:
    """A convolution whose filters differ from place to place.

    Args:
        input: shape (B, C, H, W), padded already.
        weight: shape (rows, columns, outs, C * kernel[0] * kernel[1]).
        bias: shape (rows, columns, outs), or None.

    Returns:
        Shape (B, outs, rows, columns).
    """
    last, (rows, columns, outs, _) = _examples_last(input), weight.shape
    result = input.new_empty(rows, columns, outs, input.shape[0])
    runs = _Runs(last, weight, kernel, stride)
    biases = [None] * len(runs.patches) if bias is None else runs.of(bias.unsqueeze(3))
    for patches, seen, filters, shift, made in zip(
        runs.patches, runs.windows(last), runs.of(weight), biases, runs.of(result), strict=True
    ):
        patches.copy_(seen)
        if shift is None:
            torch.bmm(filters, patches.flatten(1, 3), out=made)
        else:
            torch.baddbmm(shift, filters, patches.flatten(1, 3), out=made)
    return _examples_first(result.permute(2, 0, 1, 3).contiguous())


@torch.library.register_fake(f"squall::{LOCALLY_CONNECTED}", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, kernel: list[int], stride: list[int]) -> Tensor:
    rows, columns, outs, _ = weight.shape
    return input.new_empty(input.shape[0], outs, rows, columns)


def _examples_last(value: Tensor) -> Tensor:
    """(B, C, H, W) to (C, H, W, B), in order; torch turns a matrix several times faster than anything else."""
    return value.flatten(1).t().contiguous().view(*value.shape[1:], value.shape[0])


def _examples_first(value: Tensor) -> Tensor:
    """(C, H, W, B) to (B, C, H, W), in order."""
    return value.flatten(0, 2).t().contiguous().view(value.shape[3], *value.shape[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, ctx.kernel, ctx.stride = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(input, weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    if torch.is_grad_enabled():
        raise ModelError(
            subject="LocallyConnected2d",
            expected="to be differentiated once",
            got="create_graph=True",
            remedy="Leave it out of what is differentiated twice, as a penalty on gradients is.",
        )
    input, weight = ctx.saved_tensors
    of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
    above = _examples_last(gradient).permute(1, 2, 0, 3).contiguous()  # (rows, columns, outs, B)
    last = _examples_last(input)
    runs = _Runs(last, weight, ctx.kernel, ctx.stride)
    to_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else None
    if to_weight is not None:
        for patches, seen, errors, made in zip(
            runs.patches, runs.windows(last), runs.of(above), runs.of(to_weight), strict=True
        ):
            patches.copy_(seen)
            torch.bmm(errors, patches.flatten(1, 3).transpose(1, 2), out=made)
    to_input = torch.zeros_like(last) if of_input else None
    if to_input is not None:
        for patches, errors, filters, target in zip(
            runs.patches, runs.of(above), runs.of(weight), runs.windows(to_input), strict=True
        ):
            torch.bmm(filters.transpose(1, 2), errors, out=patches.flatten(1, 3))
            # Windows overlap, but not where all have the same column of the kernel.
            for column, part in zip(target.unbind(3), patches.unbind(3), strict=True):
                column.add_(part)
    return (
        None if to_input is None else _examples_first(to_input),
        to_weight,
        above.sum(3) if ctx.has_bias and of_bias else None,
        None,
        None,
    )


torch.library.register_autograd(f"squall::{LOCALLY_CONNECTED}", _backward, setup_context=_keep, lib=_LIBRARY)


class LocallyConnected2d(nn.Module):
    """A convolution without weight sharing: each place has filters of its own.

    Args:
        channels, outs: feature maps in and out.
        size: height and width of the input.
        kernel, stride, padding: one number, or one for each of the two axes.

    Shapes: (B, channels, *size) to (B, outs, rows, columns), as `nn.Conv2d` would give.

    >>> layer = LocallyConnected2d(3, 8, size=(9, 9), kernel=5, stride=2)
    >>> layer(torch.zeros(2, 3, 9, 9)).shape, layer.weight.shape
    (torch.Size([2, 8, 3, 3]), torch.Size([3, 3, 8, 75]))

    Raises:
        ModelError: an input of another size than the layer was made for.

    Source: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 5 (locally connected layers).
    """

    def __init__(
        self,
        channels: int,
        outs: int,
        *,
        size: tuple[int, int],
        kernel: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.channels, self.size = channels, tuple(size)
        self.kernel, self.stride, self.padding = _pair(kernel), _pair(stride), _pair(padding)
        rows, columns = (
            (n + 2 * p - k) // s + 1
            for n, p, k, s in zip(size, self.padding, self.kernel, self.stride, strict=True)
        )
        width = channels * self.kernel[0] * self.kernel[1]
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(rows, columns, outs, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(rows, columns, outs).uniform_(-bound, bound)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        if tuple(input.shape[1:]) != (self.channels, *self.size):
            raise ModelError(
                subject="LocallyConnected2d",
                expected=f"inputs of shape (B, {self.channels}, {self.size[0]}, {self.size[1]})",
                got=str(tuple(input.shape)),
                remedy="Its filters belong to places: set size to the input's height and width.",
            )
        high, wide = self.padding
        if high or wide:
            input = functional.pad(input, (wide, wide, high, high))
        tensors: list[Tensor | None] = [input, self.weight, self.bias]
        if torch.is_autocast_enabled(input.device.type):  # which knows torch's own products only
            dtype = torch.get_autocast_dtype(input.device.type)
            tensors = [None if each is None else each.to(dtype) for each in tensors]
        result: Tensor = torch.ops.squall.locally_connected2d(*tensors, self.kernel, self.stride)
        return result


class L2Pool2d(nn.Module):
    """The root of the sum of squares over a window: ``sqrt(eps + sum x^2)``.

    >>> round(L2Pool2d(2)(torch.full((1, 1, 2, 2), 2.0)).item(), 3)
    4.0

    Source: Le et al., Building high-level features using large scale unsupervised learning, ICML 2012.
    """

    def __init__(self, kernel: int, stride: int | None = None, padding: int = 0, eps: float = 1e-6) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding, self.eps = kernel, stride or kernel, padding, eps

    def forward(self, input: Tensor) -> Tensor:
        mean = functional.avg_pool2d(input * input, self.kernel, self.stride, self.padding)
        return (mean * self.kernel**2 + self.eps).sqrt()


class LocalContrastNorm2d(nn.Module):
    """Subtract the weighted mean around each place, then divide by the weighted deviation, where it is above `floor`.

    Means run over all channels and a square Gaussian window whose weights sum to one; beyond the edges stand zeros.

    Args:
        kernel: side of the window, odd.
        floor: the smallest divisor.
        deviation: of the Gaussian, in places; a quarter of `kernel` by default.

    >>> bool(LocalContrastNorm2d(3)(torch.ones(1, 2, 5, 5))[0, 0, 2, 2].abs() < 1e-4)
    True

    Source: Jarrett et al., What is the best multi-stage architecture for object recognition?, ICCV 2009; there the
    floor is the mean deviation of the example.
    """

    window: Tensor

    def __init__(self, kernel: int = 9, floor: float = 1e-2, deviation: float | None = None) -> None:
        super().__init__()
        self.kernel, self.floor = kernel, floor
        places = torch.arange(kernel) - (kernel - 1) / 2
        line = torch.exp(-0.5 * (places / (deviation or kernel / 4)) ** 2)
        plane = line[:, None] * line
        self.register_buffer("window", (plane / plane.sum())[None, None], persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        centred = input - self._mean(input)
        deviation = self._mean(centred * centred).clamp_min(self.floor**2).sqrt()
        return centred / deviation

    def _mean(self, input: Tensor) -> Tensor:
        return functional.conv2d(input.mean(1, keepdim=True), self.window, padding=self.kernel // 2)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value
