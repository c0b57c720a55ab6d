"""Ops that compute each element from the same element of each input, with broadcasting; and dropout."""

from typing import Any

import torch
from torch import Tensor

from squall.partition.call import Call, TensorSpec
from squall.partition.masks import Draw, keep_mask
from squall.partition.regions import AnyRegion, FlatRegion, Region, Shape, nothing
from squall.partition.rules.base import ExactRule, Kernel, Rule, Words, caller, dtype_of, listed
from squall.partition.words import All, Same

# Activations, arithmetic, comparisons, casts and copies. All overloads of each name.
NAMES = listed("""
    abs acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
    bitwise_xor ceil celu clamp clamp_max clamp_min clone contiguous copysign cos cosh deg2rad detach digamma div
    divide elu eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin fmod frac ge gelu greater
    greater_equal gt hardshrink hardsigmoid hardswish hardtanh hypot isfinite isinf isnan le leaky_relu lerp less
    less_equal lgamma lift_fresh_copy log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not
    logical_or logical_xor logit lt masked_fill maximum minimum mish mul multiply ne neg negative not_equal pow
    rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh softplus
    softshrink special_erf special_expit sqrt square sub subtract tan tanh threshold to true_divide trunc type_as
    where xlogy _to_copy
""")
LIKE = ("zeros_like", "ones_like", "full_like", "empty_like")
CREATED = ("zeros", "ones", "full", "arange", "eye", "scalar_tensor", "linspace", "empty")


def broadcast(spec: TensorSpec, shape: Shape) -> Words:
    """How an input that broadcasts to `shape` is read: aligned at the last axis, axes of size 1 as a whole."""
    ahead = len(shape) - len(spec.shape)
    return tuple(
        Same(at + ahead) if size == shape[at + ahead] else All() for at, size in enumerate(spec.shape)
    )


class Elementwise(ExactRule):
    """Every input has the output's shape, or broadcasts to it."""

    takes_flat = True

    def applies(self, call: Call) -> bool:
        return len(call.outputs) == 1 and all(_broadcasts(spec.shape, call.shape) for spec in call.inputs)

    def words(self, call: Call) -> tuple[Words, ...]:
        return tuple(broadcast(spec, call.shape) for spec in call.inputs)

    def needs(self, call: Call, out: AnyRegion) -> tuple[AnyRegion, ...]:
        if isinstance(out, FlatRegion):
            return tuple(_flat_need(spec, out) for spec in call.inputs)
        return super().needs(call, out)

    def kernel(self, call: Call, out: AnyRegion) -> Kernel:
        run = caller(call)
        if isinstance(out, Region):
            return lambda tensors, draw: run(tensors)
        spread = [_flat_spread(spec, out) for spec in call.inputs]
        return lambda tensors, draw: run([each(t) for each, t in zip(spread, tensors, strict=True)])


def _broadcasts(shape: Shape, out: Shape) -> bool:
    aligned = zip(reversed(shape), reversed(out), strict=False)
    return len(shape) <= len(out) and all(mine in (1, theirs) for mine, theirs in aligned)


def _flat_need(spec: TensorSpec, out: FlatRegion) -> AnyRegion:
    if spec.shape == out.shape:
        return out
    bounds = out.bounding()
    words = broadcast(spec, out.shape)
    return Region(
        spec.shape, tuple(word.reads(bounds, size) for word, size in zip(words, spec.shape, strict=True))
    )


def _flat_spread(spec: TensorSpec, out: FlatRegion) -> Any:
    """From the compact tensor of what a flat region needs to one value for each of its elements."""
    if spec.shape == out.shape:
        return lambda tensor: tensor
    bounds = out.bounding()
    index = torch.tensor(list(out.indices.positions_in(bounds.flat())), dtype=torch.long)
    return lambda tensor: tensor.expand(bounds.sizes).reshape(-1).index_select(0, index)


class Prelu(Rule):
    """A slope for each index of axis 1, or one for all."""

    def applies(self, call: Call) -> bool:
        return len(call.shape) > 1

    def words(self, call: Call) -> tuple[Words, ...]:
        value, slope = call.inputs
        per_channel = tuple(Same(1) if size == call.shape[1] and size > 1 else All() for size in slope.shape)
        return broadcast(value, call.shape), per_channel


class Like(ExactRule):
    """A constant of an input's shape: none of its values is needed."""

    def needs(self, call: Call, out: Region) -> tuple[AnyRegion, ...]:
        return tuple(nothing(spec.shape) for spec in call.inputs)

    def kernel(self, call: Call, out: Region) -> Kernel:
        run = caller(call)
        dtype = dtype_of(call)
        return lambda tensors, draw: run([torch.empty(out.sizes, dtype=dtype)])


class Created(Rule):
    """A constant without inputs: made whole, and cut."""

    def applies(self, call: Call) -> bool:
        return not call.inputs

    def words(self, call: Call) -> tuple[Words, ...]:
        return ()

    def kernel(self, call: Call, out: Region) -> Kernel:
        run = caller(call)
        slices = tuple(torch.tensor(list(axis), dtype=torch.long) for axis in out.axes)

        def made(tensors: list[Tensor], draw: Draw) -> Tensor:
            result: Tensor = run([])
            for at, index in enumerate(slices):
                result = result.index_select(at, index)
            return result

        return made


class Dropout(ExactRule):
    """Zeros elements with probability `p`, by a mask that does not depend on the cut (so it differs from torch's)."""

    takes_flat = True

    def words(self, call: Call) -> tuple[Words, ...]:
        return (broadcast(call.inputs[0], call.shape),)

    def needs(self, call: Call, out: AnyRegion) -> tuple[AnyRegion, ...]:
        return (out,)

    def kernel(self, call: Call, out: AnyRegion) -> Kernel:
        named = call.arguments()
        probability = float(named["p"])
        if not named["train"] or probability == 0:
            return lambda tensors, draw: tensors[0]
        masked = self.masked(out)
        return lambda tensors, draw: dropped(tensors[0], masked, probability, draw, call)

    def masked(self, out: AnyRegion) -> AnyRegion:
        """What has a random number of its own."""
        return out


class FeatureDropout(Dropout):
    """Zeros whole feature maps: one number for each index of the first two axes."""

    takes_flat = False

    def masked(self, out: AnyRegion) -> AnyRegion:
        maps = out.bounding()
        return Region(maps.shape[:2], maps.axes[:2])


def dropped(value: Tensor, region: AnyRegion, probability: float, draw: Draw, call: Call) -> Tensor:
    """A piece of a call's output after dropout; what is kept is scaled by ``1 / (1 - probability)``."""
    if probability >= 1:
        return value * 0
    keep = keep_mask(region, 1 - probability, draw, call.site, call.example_axis)
    keep = keep.reshape(keep.shape + (1,) * (value.dim() - keep.dim()))
    return value * keep.to(value.dtype).mul_(1 / (1 - probability))


class Triangle(Rule):
    """`tril` and `triu`: the element's own place decides whether it is kept."""

    def words(self, call: Call) -> tuple[Words, ...]:
        return (broadcast(call.inputs[0], call.shape),)

    def kernel(self, call: Call, out: Region) -> Kernel:
        rows, columns = (torch.tensor(list(axis)) for axis in out.axes[-2:])
        distance = columns - rows[:, None] - int(call.arguments()["diagonal"])
        keep = distance <= 0 if call.name == "tril" else distance >= 0
        return lambda tensors, draw: tensors[0] * keep.to(tensors[0].dtype)


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    elementwise = Elementwise()
    return {
        **{name: elementwise for name in NAMES},
        **{name: Like() for name in LIKE},
        **{name: Created() for name in CREATED},
        "max.other": elementwise,
        "min.other": elementwise,
        "prelu": Prelu(),
        "dropout": Dropout(),
        "feature_dropout": FeatureDropout(),
        "tril": Triangle(),
        "triu": Triangle(),
    }
