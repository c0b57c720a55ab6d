"""Batch normalisation in training as capture writes it: the moved running statistics are outputs, nothing is written.

``_native_batch_norm_legit_functional`` gives the normalised value (output 0), and the new running mean and variance
(outputs 3 and 4). The value does not need the old ones. All three share their first stage: sums over examples and space.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from squall.partition.call import Call, Ref
from squall.partition.masks import Draw
from squall.partition.regions import AnyRegion, Region, nothing
from squall.partition.rules.base import ExactRule, Kernel, Rule
from squall.partition.rules.normalisation import Normalisation
from squall.partition.stages import Stage, Stages

VALUE, MEAN, VARIANCE = 0, 3, 4


class TrainingBatchNorm(ExactRule):
    """Output 0 is `batch_norm` without running statistics; outputs 3 and 4 are statistics of their own features."""

    def applies(self, call: Call) -> bool:
        return bool(call.arguments()["training"]) and call.output in (VALUE, MEAN, VARIANCE)

    def needs(self, call: Call, out: Region) -> tuple[AnyRegion, ...]:
        found = [nothing(spec.shape) for spec in call.inputs]
        if call.output == VALUE:
            plain = without_memory(call)
            found[: len(plain.inputs)] = _NORM.needs(plain, out)
        else:
            found[0] = Region.whole(call.inputs[0].shape).replace(1, out.axes[0])
            found[_old(call)] = out
        return tuple(found)

    def kernel(self, call: Call, out: Region) -> Kernel:
        if call.output == VALUE:
            plain = without_memory(call)
            run, count = _NORM.kernel(plain, out), len(plain.inputs)
            return lambda tensors, draw: run(tensors[:count], draw)
        reduced, old, momentum = _reduced(call), _old(call), call.arguments()["momentum"]

        def moved(tensors: list[Tensor], draw: Draw) -> Tensor:
            value = tensors[0].detach()
            now = value.mean(reduced) if call.output == MEAN else value.var(reduced, unbiased=True)
            return tensors[old].lerp(now.to(tensors[old].dtype), momentum)

        return moved

    def stages(self, call: Call) -> Stages | None:
        plan = _NORM.stages(without_memory(call))
        assert plan is not None
        sums, finish = plan.stages
        spare = [nothing(spec.shape) for spec in call.inputs[len(without_memory(call).inputs) :]]
        first = replace(sums, needs=lambda share: (*sums.needs(share), *spare))
        if call.output == VALUE:
            return Stages((first, replace(finish, needs=lambda share: (*finish.needs(share), *spare))))
        return Stages((first, _moved(call, sums)))


_NORM = Normalisation()


def without_memory(call: Call) -> Call:
    """The same normalisation as plain `batch_norm`, of the value, weight and bias alone."""
    named = call.arguments()
    memory = min(named["running_mean"].index, named["running_var"].index)
    args = (
        named["input"],
        named["weight"],
        named["bias"],
        None,
        None,
        True,
        named["momentum"],
        named["eps"],
        False,
    )
    return replace(
        call,
        target="aten.batch_norm.default",
        args=args,
        kwargs={},
        inputs=call.inputs[:memory],
        outputs=(call.inputs[0].shape,),
        output=0,
    )


def _old(call: Call) -> int:
    """Which input is the running statistic that this output is the next value of."""
    found: Ref = call.arguments()["running_mean" if call.output == MEAN else "running_var"]
    return found.index


def _reduced(call: Call) -> list[int]:
    return [0, *range(2, len(call.inputs[0].shape))]


def _moved(call: Call, sums: Stage) -> Stage:
    """The last stage of a running statistic: from the sums of its features to its next value."""
    old, momentum = _old(call), call.arguments()["momentum"]
    count = torch.Size(call.inputs[0].shape).numel() // call.shape[0]

    def needs(share: Region) -> tuple[AnyRegion, ...]:
        return tuple(share if at == old else nothing(spec.shape) for at, spec in enumerate(call.inputs))

    def reads(share: Region) -> tuple[AnyRegion, ...]:
        return (Region.whole(sums.shape).replace(1, share.axes[0]),)

    def run(share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
        mean, square = combined[0].detach() / count
        now = mean if call.output == MEAN else (square - mean * mean) * (count / (count - 1))
        return inputs[old].lerp(now.to(inputs[old].dtype), momentum)

    return Stage(
        space=call.shape, needs=needs, reads=reads, gives=lambda share: share, run=run, shape=call.shape
    )


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    return {"_native_batch_norm_legit_functional": TrainingBatchNorm()}
