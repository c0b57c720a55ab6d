"""Max, average and adaptive average pooling: windows with their own edge values and counts."""

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from squall.partition.call import Call
from squall.partition.indices import Indices
from squall.partition.masks import Draw
from squall.partition.pieces import Frame
from squall.partition.regions import Region
from squall.partition.rules.base import Kernel, Rule, Words, caller, dtype_of, per_axis
from squall.partition.rules.convolution import own_padding
from squall.partition.words import Adaptive, Same, Window


class _Pooling(Rule):
    """Windows over the last axes, as many as the op's name says; the axes before are untouched."""

    def words(self, call: Call) -> tuple[Words, ...]:
        ahead = len(call.shape) - dimensions(call)
        return ((*(Same(at) for at in range(ahead)), *self.windows_of(call)),)

    def windows_of(self, call: Call) -> Words:
        ahead = len(call.shape) - dimensions(call)
        kernel, stride, padding, dilation = arguments(call)
        sized = zip(kernel, stride, padding, dilation, strict=True)
        return tuple(Window(ahead + at, *one) for at, one in enumerate(sized))

    def frames(self, call: Call, out: Region) -> tuple[Frame, ...]:
        (frame,) = super().frames(call, out)
        own = own_padding(frame)
        before = tuple(a - b for a, b in zip(frame.before, own, strict=True))
        after = tuple(a - b for a, b in zip(frame.after, own, strict=True))
        return (replace(frame, before=before, after=after),)

    def own(self, call: Call, out: Region) -> tuple[int, ...]:
        """How much of the edge the op fills itself, on each window axis."""
        return own_padding(super().frames(call, out)[0])[-dimensions(call) :]


def dimensions(call: Call) -> int:
    return int(call.name.split("pool")[1][0])


def arguments(call: Call) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, padding and dilation, one number for each window axis."""
    named, count = call.arguments(), dimensions(call)
    kernel = per_axis(named["kernel_size"], count)
    stride = per_axis(named["stride"], count) if named["stride"] else kernel
    return kernel, stride, per_axis(named["padding"], count), per_axis(named.get("dilation", 1), count)


class MaxPool(_Pooling):
    """``max_pool1d`` to ``3d``, and the values of ``max_pool2d_with_indices``; beyond the edges stands minus infinity."""

    def applies(self, call: Call) -> bool:
        return call.output == 0

    def fill(self, call: Call, index: int) -> float:
        dtype = dtype_of(call)
        return float("-inf") if dtype.is_floating_point else float(torch.iinfo(dtype).min)

    def kernel(self, call: Call, out: Region) -> Kernel:
        run = caller(call, padding=list(self.own(call, out)), ceil_mode=False)
        pick = call.name.endswith("_with_indices")
        return lambda tensors, draw: run(tensors)[0] if pick else run(tensors)


class AveragePool(_Pooling):
    """``avg_pool1d`` to ``3d``: sums over windows, divided by each window's own count."""

    def kernel(self, call: Call, out: Region) -> Kernel:
        own = list(self.own(call, out))
        changes = {"padding": own, "ceil_mode": False, "count_include_pad": True}
        if "divisor_override" in call.arguments():
            changes["divisor_override"] = None
        run = caller(call, **changes)
        scale = average_scale(call, out).to(dtype_of(call))
        if bool((scale == 1).all()):
            return lambda tensors, draw: run(tensors)
        return lambda tensors, draw: run(tensors) * scale


def average_scale(call: Call, out: Region) -> Tensor:
    """Volume of the kernel over the count that the op divides by, for each output element of a region."""
    named, count = call.arguments(), dimensions(call)
    kernel, stride, padding, _ = arguments(call)
    if named.get("divisor_override"):
        return torch.full((1,) * count, prod(kernel) / named["divisor_override"], dtype=torch.float64)
    scale = torch.ones((1,) * count, dtype=torch.float64)
    for at, (k, s, p) in enumerate(zip(kernel, stride, padding, strict=True)):
        size = call.inputs[0].shape[at - count]
        low, high = (-p, size + p) if named["count_include_pad"] else (0, size)
        starts = [index * s - p for index in out.axes[at - count]]
        counts = [min(start + k, high) - max(start, low) for start in starts]
        shape = [len(counts) if axis == at else 1 for axis in range(count)]
        scale = scale * (k / torch.tensor(counts, dtype=torch.float64)).reshape(shape)
    return scale


class AdaptiveAverage(_Pooling):
    """``adaptive_avg_pool1d`` to ``3d``. Windows of different sizes overlap, so each axis is averaged by itself."""

    def windows_of(self, call: Call) -> Words:
        count = dimensions(call)
        ahead = len(call.shape) - count
        return tuple(Adaptive(ahead + at, call.shape[ahead + at]) for at in range(count))

    def kernel(self, call: Call, out: Region) -> Kernel:
        count = dimensions(call)
        (frame,) = self.frames(call, out)
        whole, read = call.inputs[0].shape[-count:], frame.region.bounding().axes[-count:]
        made = out.axes[-count:]
        outs = call.shape[-count:]
        even = [n % m == 0 for n, m in zip(whole, outs, strict=True)]
        uncut = [axis.size == m for axis, m in zip(made, outs, strict=True)]
        if all(a or b for a, b in zip(even, uncut, strict=True)):
            run = caller(call, output_size=[axis.size for axis in made])
            return lambda tensors, draw: run(tensors)
        matrices = [
            averages(Adaptive(0, m), axis, inside, n).to(dtype_of(call))
            for n, m, axis, inside in zip(whole, outs, made, read, strict=True)
        ]

        def run_by_axis(tensors: list[Tensor], draw: Draw) -> Tensor:
            value = tensors[0]
            for at, matrix in enumerate(matrices):
                value = (value.transpose(at - count, -1) @ matrix).transpose(at - count, -1)
            return value

        return run_by_axis


def averages(word: Adaptive, made: Indices, read: Indices, size: int) -> Tensor:
    """The matrix, shape (len(read), len(made)), whose columns average each output index's window."""
    matrix = torch.zeros(read.size, made.size, dtype=torch.float64)
    for column, index in enumerate(made):
        start, stop = word.window(index, size)
        matrix[start - read.start : stop - read.start, column] = 1 / (stop - start)
    return matrix


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    largest, average, adaptive = MaxPool(), AveragePool(), AdaptiveAverage()
    return {
        **{f"max_pool{n}d": largest for n in (1, 2, 3)},
        **{f"max_pool{n}d_with_indices": largest for n in (2, 3)},
        **{f"avg_pool{n}d": average for n in (1, 2, 3)},
        **{f"adaptive_avg_pool{n}d": adaptive for n in (1, 2, 3)},
        "_adaptive_avg_pool2d": adaptive,
    }
