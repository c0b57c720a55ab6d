"""Batch, layer, RMS, group and instance normalisation: statistics over some axes, then elementwise.

Uncut on the axes that they reduce, the op runs as it is. Cut there, `needs` asks for all of those axes; or, in
`stages`, partitions add up sums and sums of squares and each finishes its own part. These are summed in float64
unless the values are float64 already, so that a large mean does not eat the variance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from squall.partition.call import Call, Ref
from squall.partition.indices import Indices
from squall.partition.masks import Draw
from squall.partition.regions import AnyRegion, Region, nothing
from squall.partition.rules.base import Kernel, Rule, Words, caller
from squall.partition.stages import Combine, Stage, Stages
from squall.partition.words import All, Groups, Same, Word

RUNNING = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a normalisation does.

    Attributes:
        coupled: the axes over which statistics are taken; empty if running ones are used.
        affine: the axes along which weight and bias lie.
        groups: of axis 1, each with statistics of its own; None if axis 1 is not grouped.
        centred: whether the mean is subtracted.
    """

    coupled: tuple[int, ...]
    affine: tuple[int, ...]
    groups: int | None = None
    centred: bool = True


def form(call: Call) -> Form:
    named, rank = call.arguments(), len(call.shape)
    if call.name in ("layer_norm", "rms_norm"):
        last = tuple(range(rank - len(named["normalized_shape"]), rank))
        return Form(coupled=last, affine=last, centred=call.name == "layer_norm")
    space = tuple(range(2, rank))
    if call.name == "group_norm":
        return Form(coupled=space, affine=(1,), groups=named["num_groups"])
    if call.name == "instance_norm":
        return Form(coupled=space, affine=(1,))
    return Form(coupled=(0, *space) if named["training"] else (), affine=(1,))


class Normalisation(Rule):
    """All of them; inputs: the value, then those of weight, bias, running mean and variance that are given."""

    def applies(self, call: Call) -> bool:
        named = call.arguments()
        if call.name == "instance_norm":
            return bool(named["use_input_stats"]) and named["running_mean"] is None
        return True

    def words(self, call: Call) -> tuple[Words, ...]:
        shape = form(call)
        value: list[Word] = [All() if at in shape.coupled else Same(at) for at in range(len(call.shape))]
        if shape.groups is not None:
            per_group = call.shape[1] // shape.groups
            value[1] = Groups(1, per_group, per_group)
        affine = tuple(Same(at) for at in shape.affine)
        return (tuple(value), *(affine for _ in call.inputs[1:]))

    def kernel(self, call: Call, out: Region) -> Kernel:
        shape = form(call)
        read = self.needs(call, out)[0].bounding()
        changes = (
            {} if shape.groups is None else {"num_groups": shape.groups * read.axes[1].size // call.shape[1]}
        )
        if read == out:
            run = caller(call, **changes)
            return lambda tensors, draw: run(tensors)
        run = caller(call, **changes, weight=None, bias=None)
        places = [
            (at, torch.tensor(list(axis.positions_in(read.axes[at]))))
            for at, axis in enumerate(out.axes)
            if axis != read.axes[at]
        ]

        def run_and_cut(tensors: list[Tensor], draw: Draw) -> Tensor:
            value: Tensor = run(tensors)
            for at, index in places:
                value = value.index_select(at, index)
            return scaled(value, call, shape, tensors)

        return run_and_cut

    def stages(self, call: Call) -> Stages | None:
        shape = form(call)
        return _Statistics(self, call, shape).stages() if shape.coupled or shape.groups else None


def given(call: Call, name: str, tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor argument of this name, if there is one."""
    found = call.arguments().get(name)
    return tensors[found.index] if isinstance(found, Ref) else None


def scaled(value: Tensor, call: Call, shape: Form, tensors: Sequence[Tensor]) -> Tensor:
    """Times weight, plus bias, of the piece's own indices."""
    weight, bias = (given(call, name, tensors) for name in ("weight", "bias"))
    trailing = (1,) * (value.dim() - 1 - shape.affine[-1])
    if weight is not None:
        value = value * weight.reshape(*weight.shape, *trailing)
    return value if bias is None else value + bias.reshape(*bias.shape, *trailing)


class _Statistics:
    """Sums and sums of squares over shares, and the finish, as stages of one call.

    The combined value has shape (2, *kept axes), or (1, *kept) when only squares are needed; for groups the kept
    axes are examples and groups.
    """

    def __init__(self, rule: Rule, call: Call, shape: Form) -> None:
        self._rule, self._call, self._form = rule, call, shape
        self._count = prod(call.shape[at] for at in shape.coupled)
        kept = [at for at in range(len(call.shape)) if at not in shape.coupled]
        sizes = [call.shape[at] for at in kept]
        if shape.groups is not None:
            self._count *= call.shape[1] // shape.groups
            sizes[1] = shape.groups
        self._kept = kept
        self._shape = (2 if shape.centred else 1, *sizes)

    def stages(self) -> Stages:
        call = self._call
        none = [nothing(each.shape) for each in call.inputs[1:]]
        first = Stage(
            space=call.shape,
            needs=lambda share: (share, *none),
            gives=self._region,
            run=self._sums,
            shape=self._shape,
            combine=Combine.ADD,
            dtype="float64",
        )
        last = Stage(
            space=call.shape,
            needs=lambda share: (share, *self._rule.needs(call, share)[1:]),
            reads=lambda share: (self._region(share),),
            gives=lambda share: share,
            run=self._finish,
            shape=call.shape,
        )
        return Stages((first, last))

    def _region(self, share: Region) -> AnyRegion:
        axes = [share.axes[at] for at in self._kept]
        if self._form.groups is not None:
            axes[1] = self._per_group().touched(axes[1])
        return Region(self._shape, (Indices.span(0, self._shape[0]), *axes))

    def _per_group(self) -> Groups:
        return Groups(1, self._call.shape[1] // (self._form.groups or 1), 1)

    def _group_of_each(self, channels: Indices) -> Tensor:
        """For each channel of a share, the place of its group among those that the share touches."""
        word = self._per_group()
        touched = {group: place for place, group in enumerate(word.touched(channels))}
        return torch.tensor([touched[index // word.per_out] for index in channels])

    def _sums(self, share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
        value = inputs[0].double()
        summands = [value, value * value] if self._form.centred else [value * value]
        if self._form.coupled:
            summands = [each.sum(self._form.coupled) for each in summands]
        stacked = torch.stack(summands)
        if self._form.groups is None:
            return stacked
        index = self._group_of_each(share.axes[1])
        shape = (*stacked.shape[:2], int(index.max()) + 1)
        return stacked.new_zeros(shape).index_add(2, index, stacked)

    def _finish(self, share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
        call, value = self._call, inputs[0]
        means = combined[0] / self._count
        mean = means[0] if self._form.centred else torch.zeros_like(means[0])
        variance = means[-1] - mean * mean
        self._remember(inputs, mean, variance)
        epsilon = call.arguments()["eps"]
        epsilon = torch.finfo(value.dtype).eps if epsilon is None else epsilon
        mean, scale = (self._spread(each, share) for each in (mean, (variance + epsilon).rsqrt()))
        return scaled(((value - mean) * scale).to(value.dtype), call, self._form, inputs)

    def _spread(self, statistic: Tensor, share: Region) -> Tensor:
        """One number for each index of the share's kept axes, shaped to broadcast."""
        if self._form.groups is not None:
            statistic = statistic.index_select(1, self._group_of_each(share.axes[1]))
        for at in self._form.coupled:
            statistic = statistic.unsqueeze(at)
        return statistic

    def _remember(self, inputs: Sequence[Tensor], mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics, in the memory of the pieces that were handed in."""
        running = [given(self._call, name, inputs) for name in RUNNING]
        if running[0] is None or running[1] is None:
            return
        momentum = self._call.arguments()["momentum"]
        unbiased = variance * (self._count / (self._count - 1))
        with torch.no_grad():
            for statistic, now in zip(running, (mean, unbiased), strict=True):
                assert statistic is not None
                statistic.lerp_(now.to(statistic.dtype), momentum)


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    rule = Normalisation()
    return {name: rule for name in ("batch_norm", "layer_norm", "rms_norm", "group_norm", "instance_norm")}
