"""Convolution, transposed convolution, and the locally connected layer: windows over space, channels or groups across."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from squall.partition.call import Call
from squall.partition.indices import Indices
from squall.partition.masks import Draw
from squall.partition.pieces import Frame
from squall.partition.regions import AnyRegion, Region, nothing
from squall.partition.rules.base import Kernel, Rule, Words, add_bias, per_axis
from squall.partition.stages import Combine, Stage, Stages
from squall.partition.words import All, Groups, Modulo, Same, Spread, Window, Word

Convolve = Callable[..., Tensor]
CONVOLVE: dict[int, Convolve] = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
TRANSPOSE: dict[int, Convolve] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A convolution's arguments, one number for each spatial axis.

    `channel` is the axis of channels: 1, or 0 without a batch axis. `padding` is what stands before the input.
    """

    channel: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def axes(self) -> range:
        """The spatial axes."""
        return range(self.channel + 1, self.channel + 1 + len(self.kernel))

    def windows(self) -> Words:
        word = Spread if self.transposed else Window
        sized = zip(self.axes, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple(word(*one) for one in sized)


def geometry(call: Call) -> Geometry:
    named, kernel = call.arguments(), call.inputs[1].shape[2:]
    count = len(kernel)
    dilation, padding = per_axis(named["dilation"], count), named["padding"]
    if padding == "valid":
        padding = 0
    if padding == "same":  # torch puts the odd one after the input
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    return Geometry(
        channel=len(call.inputs[0].shape) - count - 1,
        kernel=kernel,
        stride=per_axis(named["stride"], count),
        padding=per_axis(padding, count),
        dilation=dilation,
        groups=named["groups"],
        transposed=named.get("transposed", "transpose" in call.target),
    )


class Convolution(Rule):
    """``conv1d`` to ``conv3d``, ``conv_transpose1d`` to ``3d`` and ``convolution``; inputs: value, weight, perhaps bias.

    Cut over output channels, space or batch it needs a halo and the filters of its own channels. Cut over input
    channels (see `stages`) it is P convolutions and one add.
    """

    def words(self, call: Call) -> tuple[Words, ...]:
        shape = geometry(call)
        per_out, per_in = _per_group(call, shape)
        channels: Word = All() if shape.groups == 1 else Groups(shape.channel, per_out, per_in)
        value = (*(Same(0) for _ in range(shape.channel)), channels, *shape.windows())
        mine: Word = Same(shape.channel)
        rest = [All() for _ in shape.kernel]
        if shape.transposed:
            inner: Word = mine if shape.groups == 1 else Modulo(shape.channel, per_out)
            weight = (channels, inner, *rest)
        else:
            weight = (mine, All(), *rest)
        return (value, weight, (mine,))[: len(call.inputs)]

    def frames(self, call: Call, out: Region) -> tuple[Frame, ...]:
        value, *others = super().frames(call, out)
        own = own_padding(value)
        before = tuple(a - b for a, b in zip(value.before, own, strict=True))
        after = tuple(a - b for a, b in zip(value.after, own, strict=True))
        return Frame(value.region, before, after, value.fill), *others

    def kernel(self, call: Call, out: Region) -> Kernel:
        shape = geometry(call)
        value = super().frames(call, out)[0]
        if shape.transposed:
            return _transposed(call, shape, out, value.region.bounding())
        own = own_padding(value)[shape.channel + 1 :]
        convolve = CONVOLVE[len(shape.kernel)]
        blocks = group_blocks(out.axes[shape.channel], _per_group(call, shape)[0])

        def run(tensors: list[Tensor], draw: Draw) -> Tensor:
            x, weight, *bias = tensors
            return convolve(x, weight, *(bias or (None,)), shape.stride, own, shape.dilation, len(blocks))

        if len({block.size for block in blocks}) == 1:
            return run

        def run_uneven(tensors: list[Tensor], draw: Draw) -> Tensor:
            x, weight, *bias = tensors
            inputs = x.chunk(len(blocks), shape.channel)
            sizes = [block.size for block in blocks]
            weights = torch.split(weight, sizes)
            biases = torch.split(bias[0], sizes) if bias else (None,) * len(blocks)
            each = zip(inputs, weights, biases, strict=True)
            return torch.cat(
                [convolve(*one, shape.stride, own, shape.dilation) for one in each], shape.channel
            )

        return run_uneven

    def stages(self, call: Call) -> Stages | None:
        shape = geometry(call)
        return None if shape.groups > 1 or shape.transposed else over_input_channels(self, call, shape)


def _per_group(call: Call, shape: Geometry) -> tuple[int, int]:
    """Output and input channels in a group."""
    return call.shape[shape.channel] // shape.groups, call.inputs[0].shape[shape.channel] // shape.groups


def group_blocks(channels: Indices, per_out: int) -> list[Indices]:
    """The output channels, split by the group that they belong to."""
    groups = Groups(0, per_out, 1).touched(channels)
    return [channels & Indices.span(group * per_out, (group + 1) * per_out) for group in groups]


def own_padding(frame: Frame) -> tuple[int, ...]:
    """Where a frame hangs over both edges alike, the op pads itself: nothing is copied for an axis that is not cut."""
    return tuple(a if a == b else 0 for a, b in zip(frame.before, frame.after, strict=True))


def _transposed(call: Call, shape: Geometry, out: Region, read: Region) -> Kernel:
    """Convolve what is read, cut what reaches beyond the output piece, fill what nothing reaches."""
    convolve = TRANSPOSE[len(shape.kernel)]
    per_out, _ = _per_group(call, shape)
    blocks = group_blocks(out.axes[shape.channel], per_out)
    local = [Indices.each(index % per_out for index in block) for block in blocks]
    columns = Modulo(shape.channel, per_out).reads(out, per_out)
    picks = [torch.tensor(list(each.positions_in(columns))) for each in local]
    crop = _crop(shape, out, read)
    alike = len({tuple(each) for each in local}) == 1
    unreached = any(read.axes[at].size == 0 for at in shape.axes)

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        arguments = (None, shape.stride, 0, 0)
        if alike:
            return convolve(x, weight, *arguments, len(blocks), shape.dilation)
        pairs = zip(x.chunk(len(blocks), shape.channel), weight.chunk(len(blocks)), picks, strict=True)
        each = [convolve(x, w.index_select(1, pick), *arguments, 1, shape.dilation) for x, w, pick in pairs]
        return torch.cat(each, shape.channel)

    def run(tensors: list[Tensor], draw: Draw) -> Tensor:
        x, weight, *bias = tensors
        y = x.new_zeros(out.sizes) if unreached else functional.pad(convolved(x, weight), crop)
        return y + bias[0].reshape(-1, *[1] * len(shape.kernel)) if bias else y

    return run


def _crop(shape: Geometry, out: Region, read: Region) -> list[int]:
    """How far the output piece reaches beyond what the op gives, last axis first, before and after; cuts are negative."""
    crop: list[int] = []
    sized = zip(shape.axes, shape.kernel, shape.stride, shape.padding, shape.dilation, strict=True)
    for at, kernel, stride, padding, dilation in sized:
        inside, wanted = read.axes[at], out.axes[at]
        first = inside.start * stride - padding
        last = (inside.stop - 1) * stride - padding + (kernel - 1) * dilation
        crop = [first - wanted.start, wanted.stop - 1 - last, *crop]
    return crop


def over_input_channels(rule: Convolution, call: Call, shape: Geometry) -> Stages:
    """P convolutions, each over its own input channels, and one add.

    The cut space has the output's axes and, last, the input channels; a share is one range on each spatial axis.
    """
    convolve = CONVOLVE[len(shape.kernel)]

    def output(share: Region) -> Region:
        return Region(call.shape, share.axes[:-1])

    def needs(share: Region) -> tuple[AnyRegion, ...]:
        value, weight, *bias = rule.needs(call, output(share))
        value, weight = value.bounding(), weight.bounding()
        channels = share.axes[-1]
        return (
            value.replace(shape.channel, channels),
            weight.replace(1, channels),
            *(nothing(each.shape) for each in bias),
        )

    def frames(share: Region) -> tuple[Frame, ...]:
        value = rule.frames(call, output(share))[0]
        region = value.region.bounding().replace(shape.channel, share.axes[-1])
        return replace(value, region=region), *(Frame.bare(need) for need in needs(share)[1:])

    def partial(share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
        own = own_padding(Rule.frames(rule, call, output(share))[0])[shape.channel + 1 :]
        return convolve(inputs[0], inputs[1], None, shape.stride, own, shape.dilation)

    first = Stage(
        space=(*call.shape, call.inputs[0].shape[shape.channel]),
        needs=needs,
        frames=frames,
        gives=output,
        run=partial,
        shape=call.shape,
        combine=Combine.ADD,
        windows=frozenset(shape.axes),
    )
    return Stages((first, add_bias(call, rule, shape.channel)))


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    rule = Convolution()
    names = [f"conv{n}d" for n in (1, 2, 3)] + [f"conv_transpose{n}d" for n in (1, 2, 3)]
    return {**{name: rule for name in names}, "convolution": rule}
