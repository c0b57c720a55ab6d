"""One rule for each op: what a region of its output needs, and how it is computed from pieces.

`needs` and `prepare` take any op; one without a rule is opaque: it needs all of its inputs and runs whole.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from squall.partition.call import Call
from squall.partition.masks import Draw
from squall.partition.pieces import Assembly, Frame, Piece, cutter
from squall.partition.regions import AnyRegion, FlatRegion, Region, nothing
from squall.partition.rules import (
    attention,
    batch,
    contraction,
    convolution,
    elementwise,
    losses,
    normalisation,
    pooling,
    reduction,
    shape,
)
from squall.partition.rules import local as local_layers
from squall.partition.rules.base import Kernel, Rule, Words, caller, dtype_of
from squall.partition.stages import Stage, Stages
from squall.partition.words import All

Held = Sequence[Sequence[AnyRegion]]
Local = Callable[[Sequence[Sequence[Tensor]], Draw], Tensor]


class Opaque(Rule):
    """An op that runs whole on one partition."""

    def words(self, call: Call) -> tuple[Words, ...]:
        return tuple(tuple(All() for _ in spec.shape) for spec in call.inputs)

    def kernel(self, call: Call, out: Region) -> Kernel:
        run = caller(call)

        def picked(tensors: list[Tensor], draw: Draw) -> Tensor:
            result = run(tensors)
            value: Tensor = result[call.output] if isinstance(result, (tuple, list)) else result
            return cutter(Region.whole(call.shape), out)(value)

        return picked


OPAQUE = Opaque()
_PARTS = (
    elementwise,
    convolution,
    pooling,
    normalisation,
    batch,
    contraction,
    reduction,
    attention,
    losses,
    shape,
)
RULES: dict[str, Rule] = {
    **{f"aten.{name}": rule for part in _PARTS for name, rule in part.rules().items()},
    **{f"squall.{name}": rule for name, rule in local_layers.rules().items()},
}


def rule_of(call: Call) -> Rule:
    """The rule of an op; `OPAQUE` if there is none, or if it cannot cut these arguments."""
    library, name, overload = call.target.split(".")
    rule = RULES.get(f"{library}.{name}.{overload}") or RULES.get(f"{library}.{name}", OPAQUE)
    return rule if rule.applies(call) else OPAQUE


def is_opaque(call: Call) -> bool:
    """Whether the op must run whole on one partition."""
    return rule_of(call) is OPAQUE


def needs(call: Call, out: AnyRegion) -> tuple[AnyRegion, ...]:
    """What of each tensor input a region of the output is computed from: within its bounds, and no more than that.

    >>> from squall.partition.call import Ref, TensorSpec
    >>> call = Call(
    ...     target="aten.conv1d.default",
    ...     args=(Ref(0), Ref(1), None, [1], [1]),
    ...     inputs=(TensorSpec((2, 4, 10)), TensorSpec((6, 4, 3))),
    ...     outputs=((2, 6, 10),),
    ... )
    >>> needs(call, Region.of((2, 6, 10), (0, 2), (0, 3), (0, 5)))
    (Region[0:2, 0:4, 0:6] of (2, 4, 10), Region[0:3, 0:4, 0:3] of (6, 4, 3))
    """
    if out.is_empty:
        return tuple(nothing(spec.shape) for spec in call.inputs)
    rule = rule_of(call)
    return rule.needs(call, out if rule.takes_flat else out.bounding())


def stages(call: Call) -> Stages | None:
    """How the op is computed when an axis that it reduces is cut; None if it reduces none or cannot be cut there."""
    return rule_of(call).stages(call)


def prepare(call: Call, out: AnyRegion, held: Held) -> Local:
    """Make the function that computes a piece of an op's output from pieces of its inputs.

    All arithmetic on regions happens here, once; the function concatenates what was received and calls the op.
    Gradients flow through it by autograd, to the pieces that were handed in; whoever owns a value adds them up.

    Args:
        call: the op on whole tensors.
        out: the region of its output.
        held: for each tensor input, the regions of the pieces that will be handed in: disjoint, and together
            covering what `needs` says; they may hold more.

    Returns:
        A function of the pieces' tensors, ``[[tensor of each piece] of each input]``, and of the minibatch's `Draw`.
    """
    if out.is_empty:
        dtype = dtype_of(call) if call.inputs else torch.float32
        return lambda tensors, draw: torch.empty(out.sizes, dtype=dtype)
    rule = rule_of(call)
    if isinstance(out, FlatRegion) and not rule.takes_flat:
        bounds = out.bounding()
        whole, cut = prepare(call, bounds, held), cutter(bounds, out)
        return lambda tensors, draw: cut(whole(tensors, draw))
    boxes = out.boxes(rule.windows(call)) if isinstance(out, Region) else []
    if isinstance(out, FlatRegion) or len(boxes) == 1:
        return _one_box(rule, call, out, held)
    parts = [_one_box(rule, call, box, held) for box in boxes]
    return lambda tensors, draw: _joined(out, boxes, [part(tensors, draw) for part in parts])


def _one_box(rule: Rule, call: Call, out: AnyRegion, held: Held) -> Local:
    read = zip(rule.frames(call, out), rule.needs(call, out), held, strict=True)
    assemblies = [
        Assembly(frame, need, regions, dtype_of(call, at)) for at, (frame, need, regions) in enumerate(read)
    ]
    kernel = rule.kernel(call, out)
    if all(make.hands_on for make in assemblies):
        return lambda tensors, draw: kernel([each[0] for each in tensors], draw)

    def run(tensors: Sequence[Sequence[Tensor]], draw: Draw) -> Tensor:
        return kernel([make(each) for make, each in zip(assemblies, tensors, strict=True)], draw)

    return run


def _joined(out: Region, boxes: Sequence[AnyRegion], tensors: list[Tensor]) -> Tensor:
    return Assembly(Frame.bare(out), out, boxes, tensors[0].dtype)(tensors)


def local(call: Call, out: AnyRegion, pieces: Sequence[Sequence[Piece]], draw: Draw | None = None) -> Tensor:
    """Compute one piece of an op's output, once; `prepare` is for many.

    >>> from squall.partition.call import Ref, TensorSpec
    >>> spec = TensorSpec((4,))
    >>> call = Call(target="aten.neg.default", args=(Ref(0),), inputs=(spec,), outputs=((4,),))
    >>> whole = Piece(Region.whole((4,)), torch.arange(4.0))
    >>> local(call, Region.of((4,), (1, 3)), [[whole]])
    tensor([-1., -2.])
    """
    run = prepare(call, out, [[piece.region for piece in each] for each in pieces])
    return run([[piece.tensor for piece in each] for each in pieces], draw or Draw())


def prepare_stage(
    call: Call, stage: Stage, share: Region, held: Held, combined: Held, dtype: torch.dtype = torch.float32
) -> Callable[[Sequence[Sequence[Tensor]], Sequence[Sequence[Tensor]]], Tensor]:
    """Make the function that computes one share of a stage, as `prepare` does for an op.

    Args:
        held: for each input of the call, the regions of the pieces that will be handed in.
        combined: the same for each earlier stage's combined value.
        dtype: of combined values of which nothing is read.
    """
    wanted = stage.needs(share)
    frames = [Frame.bare(need) for need in wanted] if stage.frames is None else stage.frames(share)
    makes = [
        Assembly(frame, need, regions, dtype_of(call, at))
        for at, (frame, need, regions) in enumerate(zip(frames, wanted, held, strict=True))
    ]
    earlier = [
        Assembly(Frame.bare(need), need, regions, dtype)
        for need, regions in zip(stage.reads(share), combined, strict=False)
    ]

    def run(tensors: Sequence[Sequence[Tensor]], before: Sequence[Sequence[Tensor]]) -> Tensor:
        inputs = [make(each) for make, each in zip(makes, tensors, strict=True)]
        return stage.run(share, inputs, [make(each) for make, each in zip(earlier, before, strict=False)])

    return run
