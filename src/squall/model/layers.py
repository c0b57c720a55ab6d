"""Layers of the networks that DistBelief trained and torch lacks: unshared filters, L2 pooling, local contrast.

Each is an ordinary `nn.Module` that trains anywhere. Local response normalisation is torch's own
`nn.LocalResponseNorm`; all of these capture as aten ops with halos of their own, but for the locally connected product,
which is the op `squall::locally_connected2d`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from squall.errors import ModelError

LOCALLY_CONNECTED = "locally_connected2d"
_LIBRARY = torch.library.Library("squall", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "locally_connected2d(Tensor input, Tensor weight, Tensor? bias, int[2] kernel, int[2] stride) -> Tensor"
)


@torch.library.impl(_LIBRARY, "locally_connected2d", "CompositeImplicitAutograd")
def locally_connected2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, kernel: list[int], stride: list[int]
) -> Tensor:
    """A convolution whose filters differ from place to place, as one batched product over places.

    Args:
        input: shape (B, C, H, W), padded already.
        weight: shape (rows, columns, C * kernel[0] * kernel[1], outs).
        bias: shape (rows, columns, outs), or None.

    Returns:
        Shape (B, outs, rows, columns).
    """
    rows, columns, width, outs = weight.shape
    patches = input.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
    patches = patches.permute(2, 3, 0, 1, 4, 5).reshape(rows * columns, -1, width)
    made = patches.bmm(weight.reshape(rows * columns, width, outs)).view(rows, columns, -1, outs)
    if bias is not None:
        made = made + bias.unsqueeze(2)
    return made.permute(2, 3, 0, 1)


class LocallyConnected2d(nn.Module):
    """A convolution without weight sharing: each place has filters of its own.

    Args:
        channels, outs: feature maps in and out.
        size: height and width of the input.
        kernel, stride, padding: one number, or one for each of the two axes.

    Shapes: (B, channels, *size) to (B, outs, rows, columns), as `nn.Conv2d` would give.

    >>> layer = LocallyConnected2d(3, 8, size=(9, 9), kernel=5, stride=2)
    >>> layer(torch.zeros(2, 3, 9, 9)).shape, layer.weight.shape
    (torch.Size([2, 8, 3, 3]), torch.Size([3, 3, 75, 8]))

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
        self.weight = nn.Parameter(torch.empty(rows, columns, width, outs).uniform_(-bound, bound))
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
        result: Tensor = torch.ops.squall.locally_connected2d(
            input, self.weight, self.bias, self.kernel, self.stride
        )
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
