"""Ops that move elements and compute nothing: reshape, permute, expand, join, split, pad, and any other permutation."""

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from squall.partition.call import Call, Ref, operator
from squall.partition.indices import Indices
from squall.partition.pieces import Frame
from squall.partition.regions import AnyRegion, FlatRegion, Region, Shape, flat_of, nothing, product_of
from squall.partition.rules.base import ExactRule, Kernel, Rule, Words, listed, positive
from squall.partition.rules.elementwise import broadcast
from squall.partition.words import Fixed, Same, Window, Word

RESHAPES = listed("view reshape flatten unflatten squeeze unsqueeze _unsafe_view view_copy")
PERMUTES = listed("transpose permute movedim moveaxis swapaxes swapdims t mT mH numpy_T")
GATHERS = listed("""
    flip roll repeat tile diagonal unfold pixel_shuffle pixel_unshuffle channel_shuffle rot90 im2col
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
""")


class Reshape(ExactRule):
    """The row-major order stays. Axes that are merged or split are worked out by their flat numbers."""

    takes_flat = True

    def applies(self, call: Call) -> bool:
        return len(call.inputs) == 1 and call.target != "aten.view.dtype"

    def needs(self, call: Call, out: AnyRegion) -> tuple[AnyRegion, ...]:
        return (reshaped(out, call.inputs[0].shape),)

    def kernel(self, call: Call, out: AnyRegion) -> Kernel:
        sizes = out.sizes
        return lambda tensors, draw: tensors[0].reshape(sizes)


def reshaped(region: AnyRegion, shape: Shape) -> AnyRegion:
    """The same elements in another shape: a product where it stays one, else flat.

    >>> reshaped(Region.of((2, 6), (0, 2), (2, 4)), (2, 3, 2))
    Region[0:2, 1:2, 0:2] of (2, 3, 2)
    >>> reshaped(Region.of((2, 6), (0, 2), (2, 5)), (2, 3, 2))
    FlatRegion(shape=(2, 3, 2), indices=Indices[2:5, 8:11])
    """
    if region.is_empty:
        return nothing(shape)
    if isinstance(region, FlatRegion):
        axes = product_of(region.indices, shape)
        return FlatRegion(shape, region.indices) if axes is None else Region(shape, axes)
    found: list[Indices] = []
    for mine, theirs in _aligned(region.shape, shape):
        numbers = flat_of(region.axes[mine.start : mine.stop], region.shape[mine.start : mine.stop])
        axes = product_of(numbers, shape[theirs.start : theirs.stop])
        if axes is None:
            return FlatRegion(shape, region.flat())
        found += axes
    return Region(shape, tuple(found))


def _aligned(one: Shape, other: Shape) -> list[tuple[range, range]]:
    """The smallest runs of axes with the same number of elements in both shapes."""
    runs: list[tuple[range, range]] = []
    i = j = 0
    while i < len(one) or j < len(other):
        first, second = i, j
        i, j = min(i + 1, len(one)), min(j + 1, len(other))
        while (a := prod(one[first:i])) != (b := prod(other[second:j])):
            if (a < b and i < len(one)) or j == len(other):
                i += 1
            else:
                j += 1
        if i == first or j == second:  # only axes of size 1 are left on one side
            runs[-1:] = (
                [(range(runs[-1][0].start, i), range(runs[-1][1].start, j))]
                if runs
                else [(range(first, i), range(second, j))]
            )
        else:
            runs.append((range(first, i), range(second, j)))
    return runs


class Permute(Rule):
    """Axes in another order."""

    def words(self, call: Call) -> tuple[Words, ...]:
        order = permutation(call)
        return (tuple(Same(order.index(at)) for at in range(len(order))),)

    def kernel(self, call: Call, out: Region) -> Kernel:
        order = permutation(call)
        return lambda tensors, draw: tensors[0].permute(order)


def permutation(call: Call) -> tuple[int, ...]:
    """For each output axis, the input's."""
    named, rank = call.arguments(), len(call.shape)
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    arguments = [value for name, value in named.items() if not isinstance(value, Ref)]
    shape = operator(call.target)(probe, *arguments).shape
    return tuple(size - 2 for size in shape)


class Expand(Rule):
    """Axes of size 1, and new ones, are repeated. Of a second tensor, as in `expand_as`, only the shape matters."""

    def words(self, call: Call) -> tuple[Words, ...]:
        index = call.output if call.name == "broadcast_tensors" else 0
        return tuple(
            broadcast(spec, call.shape) if at == index else tuple(Fixed(Indices()) for _ in spec.shape)
            for at, spec in enumerate(call.inputs)
        )

    def needs(self, call: Call, out: Region) -> tuple[AnyRegion, ...]:
        index = call.output if call.name == "broadcast_tensors" else 0
        found = super().needs(call, out)
        return tuple(need if at == index else nothing(need.shape) for at, need in enumerate(found))

    def kernel(self, call: Call, out: Region) -> Kernel:
        index = call.output if call.name == "broadcast_tensors" else 0
        sizes = out.sizes
        return lambda tensors, draw: tensors[index].expand(sizes)


class Concatenate(ExactRule):
    """Each input holds a range of the joined axis."""

    def applies(self, call: Call) -> bool:
        return all(len(spec.shape) == len(call.shape) for spec in call.inputs)

    def words(self, call: Call) -> tuple[Words, ...]:
        dim = positive(call.arguments()["dim"], len(call.shape))
        words: list[Words] = []
        offset = 0
        for spec in call.inputs:
            joined = Window(dim, padding=offset)
            offset += spec.shape[dim]
            words.append(tuple(joined if at == dim else Same(at) for at in range(len(spec.shape))))
        return tuple(words)

    def kernel(self, call: Call, out: Region) -> Kernel:
        dim = positive(call.arguments()["dim"], len(call.shape))
        asked = [at for at, need in enumerate(self.needs(call, out)) if not need.is_empty]
        if len(asked) == 1:
            return lambda tensors, draw: tensors[asked[0]]
        return lambda tensors, draw: torch.cat([tensors[at] for at in asked], dim)


class Stack(ExactRule):
    """Each input is one index of the new axis."""

    def needs(self, call: Call, out: Region) -> tuple[AnyRegion, ...]:
        dim = positive(call.arguments()["dim"], len(call.shape))
        kept = (*out.axes[:dim], *out.axes[dim + 1 :])
        asked = set(out.axes[dim])
        return tuple(
            Region(spec.shape, kept) if at in asked else nothing(spec.shape)
            for at, spec in enumerate(call.inputs)
        )

    def kernel(self, call: Call, out: Region) -> Kernel:
        dim = positive(call.arguments()["dim"], len(call.shape))
        asked = list(out.axes[dim])
        return lambda tensors, draw: torch.stack([tensors[at] for at in asked], dim)


class Slice(ExactRule):
    """``slice``, ``narrow``, ``select``, ``split``, ``chunk`` and ``unbind``: evenly spaced indices of one axis."""

    def applies(self, call: Call) -> bool:
        return len(call.inputs) == 1

    def words(self, call: Call) -> tuple[Words, ...]:
        dim, start, step, drops = self._place(call)
        words: list[Word] = []
        for at in range(len(call.inputs[0].shape)):
            if at == dim:
                words.append(
                    Fixed(Indices.span(start, start + 1))
                    if drops
                    else Window(dim, stride=step, padding=-start)
                )
            else:
                words.append(Same(at - (drops and at > dim)))
        return (tuple(words),)

    def kernel(self, call: Call, out: Region) -> Kernel:
        dim, _, _, drops = self._place(call)
        return lambda tensors, draw: tensors[0].squeeze(dim) if drops else tensors[0]

    def _place(self, call: Call) -> tuple[int, int, int, bool]:
        """The axis, the first index taken of it, the step, and whether the axis vanishes."""
        named, shape = call.arguments(), call.inputs[0].shape
        dim = positive(named["dim"], len(shape))
        size = shape[dim]
        if call.name == "slice":
            start = named["start"] or 0
            return dim, min(start + size * (start < 0), size) if start > -size else 0, named["step"], False
        if call.name == "narrow":
            return dim, named["start"] % size if size else 0, 1, False
        if call.name == "select":
            return dim, named["index"] % size, 1, True
        if call.name == "unbind":
            return dim, call.output, 1, True
        return dim, sum(each[dim] for each in call.outputs[: call.output]), 1, False


class Pad(Rule):
    """A constant around; negative amounts cut. Other modes are a `Gather`."""

    def words(self, call: Call) -> tuple[Words, ...]:
        before = pads_before(call)
        return (tuple(Window(at, padding=amount) for at, amount in enumerate(before)),)

    def fill(self, call: Call, index: int) -> float:
        value = call.arguments()["value"]
        return 0.0 if value is None else float(value)

    def kernel(self, call: Call, out: Region) -> Kernel:
        return lambda tensors, draw: tensors[0]


def pads_before(call: Call) -> tuple[int, ...]:
    """By how much each axis is padded at its front; the op lists the last axis first."""
    pads = call.arguments()["pad"]
    amounts = [0] * len(call.shape)
    for place in range(len(pads) // 2):
        amounts[len(amounts) - 1 - place] = pads[2 * place]
    return tuple(amounts)


class Gather(ExactRule):
    """Any op of one value whose output elements are copies of input elements.

    Which ones is found by running the op on the input's own numbers, so nothing about it needs to be known; the price
    is a table as large as the output, made when the plan is. An op that fills in zeros does not apply.
    """

    def applies(self, call: Call) -> bool:
        return len(call.inputs) == 1 and bool((_sources(call, Region.whole(call.shape)) >= 0).all())

    def needs(self, call: Call, out: Region) -> tuple[AnyRegion, ...]:
        found = Indices.each(_sources(call, out).tolist())
        shape = call.inputs[0].shape
        axes = product_of(found, shape)
        return (FlatRegion(shape, found) if axes is None else Region(shape, axes),)

    def kernel(self, call: Call, out: Region) -> Kernel:
        sources = _sources(call, out)
        (need,) = self.needs(call, out)
        held = torch.tensor(list(need.flat()))
        places, sizes = torch.searchsorted(held, sources), out.sizes
        return lambda tensors, draw: tensors[0].reshape(-1).index_select(0, places).reshape(sizes)


@lru_cache(maxsize=8)
def _table(target: str, args: tuple[object, ...], shape: Shape) -> Tensor:
    numbers = torch.arange(1, prod(shape) + 1, dtype=torch.float64).reshape(shape)
    return operator(target)(numbers, *args).long() - 1  # type: ignore[no-any-return]


def _sources(call: Call, out: Region) -> Tensor:
    """The numbers of the input elements that the output elements of a region are copies of, in order."""
    args = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in call.args[1:])
    table = _table(call.target, args, call.inputs[0].shape)
    for at, axis in enumerate(out.axes):
        table = table.index_select(at, torch.tensor(list(axis)))
    return table.reshape(-1)


class AnyPad(Rule):
    """Constant padding has edges; reflecting, replicating and circular padding copy elements."""

    def __init__(self) -> None:
        self._constant, self._copies = Pad(), Gather()

    def applies(self, call: Call) -> bool:
        return self._rule(call).applies(call)

    def _rule(self, call: Call) -> Rule:
        return self._constant if call.arguments().get("mode", "constant") == "constant" else self._copies

    def needs(self, call: Call, out: Region) -> tuple[AnyRegion, ...]:
        return self._rule(call).needs(call, out)

    def windows(self, call: Call) -> set[int]:
        return self._rule(call).windows(call)

    def frames(self, call: Call, out: Region) -> tuple[Frame, ...]:
        return self._rule(call).frames(call, out)

    def kernel(self, call: Call, out: Region) -> Kernel:
        return self._rule(call).kernel(call, out)


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    reshape, permute, expand, cut, gather = Reshape(), Permute(), Expand(), Slice(), Gather()
    return {
        **{name: reshape for name in RESHAPES},
        **{name: permute for name in PERMUTES},
        **{name: gather for name in GATHERS},
        **{name: expand for name in ("expand", "expand_as", "broadcast_to", "broadcast_tensors")},
        **{
            name: cut
            for name in ("slice", "narrow", "select", "split", "split_with_sizes", "chunk", "unbind")
        },
        "repeat_interleave.self_int": gather,
        "cat": Concatenate(),
        "concat": Concatenate(),
        "stack": Stack(),
        "pad": AnyPad(),
        "constant_pad_nd": Pad(),
    }
