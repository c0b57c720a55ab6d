"""Losses over an output that may be cut: partial sums over shares, added, then divided.

Uncut, the op runs as it is and needs all of its inputs; without reduction an elementwise loss is elementwise.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from squall.partition.call import Call
from squall.partition.indices import Indices
from squall.partition.regions import AnyRegion, Region, nothing
from squall.partition.rules.base import Rule, Words, caller
from squall.partition.rules.elementwise import Elementwise
from squall.partition.rules.normalisation import given
from squall.partition.stages import Combine, Stage, Stages
from squall.partition.words import All

ELEMENTWISE = [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy",
]
NONE, MEAN = 0, 1


class ElementwiseLoss(Elementwise):
    """``mse_loss`` and its kind. Inputs other than the first may broadcast (weights)."""

    def applies(self, call: Call) -> bool:
        return True

    def reduces(self, call: Call) -> bool:
        return bool(call.arguments()["reduction"] != NONE)

    def words(self, call: Call) -> tuple[Words, ...]:
        if not self.reduces(call):
            return super().words(call)
        return tuple(tuple(All() for _ in spec.shape) for spec in call.inputs)

    def needs(self, call: Call, out: AnyRegion) -> tuple[AnyRegion, ...]:
        if not self.reduces(call):
            return super().needs(call, out)
        return tuple(Region.whole(spec.shape) for spec in call.inputs)

    def stages(self, call: Call) -> Stages | None:
        if not self.reduces(call):
            return None
        space = call.inputs[0].shape
        count = torch.Size(space).numel() if call.arguments()["reduction"] == MEAN else 1
        run = caller(call, reduction=2)
        single = Call(target="aten.add.Tensor", inputs=call.inputs, outputs=(space,))
        first = Stage(
            space=space,
            needs=lambda share: Elementwise().needs(single, share),
            gives=lambda share: Region((), ()),
            run=lambda share, inputs, combined: run(inputs),
            shape=(),
            combine=Combine.ADD,
        )
        return Stages((first, _divided(call, lambda combined: combined[0] / count)))


def _divided(call: Call, finish: Callable[[Sequence[Tensor]], Tensor]) -> Stage:
    """A last stage on the sums alone."""

    def reads(share: Region) -> tuple[AnyRegion, ...]:
        return (Region.whole(()),)

    return Stage(
        space=(),
        needs=lambda share: tuple(nothing(each.shape) for each in call.inputs),
        reads=reads,
        gives=lambda share: share,
        run=lambda share, inputs, combined: finish(combined),
        shape=(),
    )


class CrossEntropy(Rule):
    """``cross_entropy_loss`` and ``nll_loss_nd`` with class numbers as targets.

    Cut over classes: the largest logit, then for each example the sum of exponentials, the target's logit and the
    sum of logits (for label smoothing), each added; then each example's loss; then one number.
    """

    def applies(self, call: Call) -> bool:
        return not call.inputs[1].dtype.startswith(("float", "bfloat"))

    def words(self, call: Call) -> tuple[Words, ...]:
        return tuple(tuple(All() for _ in spec.shape) for spec in call.inputs)

    def stages(self, call: Call) -> Stages | None:
        named = call.arguments()
        if named["reduction"] == NONE or len(call.inputs[0].shape) < 2:
            return None
        return _ClassStages(call).stages()


class _ClassStages:
    """The stages of a loss over classes, axis 1 of the logits. Examples are all other axes."""

    def __init__(self, call: Call) -> None:
        named = call.arguments()
        self._call, self._logits = call, call.inputs[0].shape
        self._examples = call.inputs[1].shape
        self._ignored = named["ignore_index"]
        self._smoothing = named.get("label_smoothing", 0.0)
        self._normalises = call.name == "cross_entropy_loss"
        self._mean = named["reduction"] == MEAN

    def stages(self) -> Stages:
        call, examples = self._call, self._examples
        none = [nothing(each.shape) for each in call.inputs]
        parts = (3, *examples)
        largest = Stage(
            space=self._logits,
            needs=lambda share: (share, *none[1:]),
            gives=self._per_example,
            run=lambda share, inputs, combined: inputs[0].detach().amax(1),
            shape=examples,
            combine=Combine.MAX,
        )
        sums = Stage(
            space=self._logits,
            needs=self._share_needs,
            reads=lambda share: (self._per_example(share),),
            gives=lambda share: _with_parts(parts, self._per_example(share)),
            run=self._sums,
            shape=parts,
            combine=Combine.ADD,
        )
        total = Stage(
            space=examples,
            needs=lambda share: (none[0], share, *(Region.whole(each.shape) for each in call.inputs[2:])),
            reads=lambda share: (share, _with_parts(parts, share)),
            gives=lambda share: Region.whole((2,)),
            run=self._total,
            shape=(2,),
            combine=Combine.ADD,
        )
        last = Stage(
            space=(),
            needs=lambda share: tuple(none),
            reads=lambda share: (nothing(examples), nothing(parts), Region.whole((2,))),
            gives=lambda share: share,
            run=lambda share, inputs, combined: combined[2][0] / (combined[2][1] if self._mean else 1),
            shape=(),
        )
        return Stages((largest, sums, total, last))

    def _per_example(self, share: Region) -> Region:
        return Region(self._examples, (share.axes[0], *share.axes[2:]))

    def _share_needs(self, share: Region) -> tuple[AnyRegion, ...]:
        weights = [Region(each.shape, (share.axes[1],)) for each in self._call.inputs[2:]]
        return share, self._per_example(share), *weights

    def _weights(self, inputs: Sequence[Tensor]) -> Tensor | None:
        return given(self._call, "weight", inputs)

    def _sums(self, share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
        """Of a share's classes: exponentials, the target's logit, and weighted logits (smoothing)."""
        logits, target = inputs[:2]
        shifted = logits - combined[0].unsqueeze(1)
        classes = torch.tensor(list(share.axes[1])).reshape(-1, *[1] * (logits.dim() - 2))
        here = (classes == target.unsqueeze(1)).to(logits.dtype)
        weights = self._weights(inputs)
        weighted = shifted if weights is None else shifted * weights.reshape(classes.shape)
        return torch.stack([shifted.exp().sum(1), (shifted * here).sum(1), weighted.sum(1)])

    def _total(self, share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
        """Of a share's examples: the summed loss, and the summed weights that a mean divides by."""
        target, largest, (total, picked, weighted) = inputs[1], combined[0], combined[1]
        weights = self._weights(inputs)
        counted = (target != self._ignored).to(total.dtype)
        own = counted if weights is None else counted * weights[target.where(counted > 0, 0)]
        shift = total.log() if self._normalises else -largest
        loss = own * (shift - picked)
        if self._smoothing:
            classes = self._logits[1]
            scale = classes if weights is None else weights.sum()
            smooth = counted * (scale * shift - weighted) / classes
            loss = loss * (1 - self._smoothing) + smooth * self._smoothing
        return torch.stack([loss.sum(), own.sum()])


def _with_parts(shape: tuple[int, ...], examples: AnyRegion) -> Region:
    assert isinstance(examples, Region)
    return Region(shape, (Indices.span(0, shape[0]), *examples.axes))


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    elementwise, classes = ElementwiseLoss(), CrossEntropy()
    return {
        **{name: elementwise for name in ELEMENTWISE},
        "cross_entropy_loss": classes,
        "nll_loss_nd": classes,
    }
