"""Ops that reduce axes: sums and means (which may be cut), other reductions, and softmax."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from squall.partition.call import Call
from squall.partition.indices import Indices
from squall.partition.masks import Draw
from squall.partition.regions import AnyRegion, Region, nothing
from squall.partition.rules.base import Kernel, Rule, Words, caller, positive
from squall.partition.stages import Combine, Stage, Stages
from squall.partition.words import All, Same

NAMES = [
    "amax",
    "amin",
    "all",
    "any",
    "argmax",
    "argmin",
    "logsumexp",
    "norm",
    "linalg_vector_norm",
    "prod",
    "std",
    "var",
    "max",
    "min",
    "median",
]
SUMS = ("sum", "mean")


class Reduction(Rule):
    """Reduced axes are read as a whole, kept ones as asked."""

    def applies(self, call: Call) -> bool:
        return call.output == 0 and len(call.inputs) == 1

    def words(self, call: Call) -> tuple[Words, ...]:
        reduced, rank = reduced_axes(call), len(call.inputs[0].shape)
        keeps = len(call.shape) == rank
        words: list[All | Same] = []
        for at in range(rank):
            place = at if keeps else at - sum(axis < at for axis in reduced)
            words.append(All() if at in reduced else Same(place))
        return (tuple(words),)

    def kernel(self, call: Call, out: Region) -> Kernel:
        run = caller(call)

        def first(tensors: list[Tensor], draw: Draw) -> Tensor:
            result = run(tensors)
            return result if isinstance(result, Tensor) else result[0]

        return first


class Sum(Reduction):
    """``sum`` and ``mean``: cut over a reduced axis they are partial sums, one add, and a division."""

    def stages(self, call: Call) -> Stages | None:
        (spec,) = call.inputs
        reduced, keeps = reduced_axes(call), len(call.shape) == len(spec.shape)
        count = prod(spec.shape[at] for at in reduced) if call.name == "mean" else 1
        dtype = call.arguments().get("dtype")

        def gives(share: Region) -> AnyRegion:
            if keeps:
                kept = [Indices.span(0, 1) if at in reduced else axis for at, axis in enumerate(share.axes)]
            else:
                kept = [axis for at, axis in enumerate(share.axes) if at not in reduced]
            return Region(call.shape, tuple(kept))

        def partial(share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
            return inputs[0].sum(sorted(reduced), keepdim=keeps, dtype=dtype)

        first = Stage(
            space=spec.shape,
            needs=lambda share: (share,),
            gives=gives,
            run=partial,
            shape=call.shape,
            combine=Combine.ADD,
        )
        last = Stage(
            space=call.shape,
            needs=lambda share: (nothing(spec.shape),),
            reads=lambda share: (share,),
            gives=lambda share: share,
            run=lambda share, inputs, combined: combined[0] / count if count != 1 else combined[0],
            shape=call.shape,
        )
        return Stages((first, last))


def reduced_axes(call: Call) -> frozenset[int]:
    rank = len(call.inputs[0].shape)
    dim = call.arguments().get("dim")
    if dim is None or dim in ((), []):
        return frozenset(range(rank))
    return frozenset(positive(at, rank) for at in ((dim,) if isinstance(dim, int) else dim))


class Softmax(Rule):
    """``softmax`` and ``log_softmax``. Cut over their own axis: a maximum, a sum of exponentials, a finish."""

    def words(self, call: Call) -> tuple[Words, ...]:
        dim = self._dim(call)
        return (tuple(All() if at == dim else Same(at) for at in range(len(call.shape))),)

    def kernel(self, call: Call, out: Region) -> Kernel:
        run, dim = caller(call), self._dim(call)
        if not call.shape or out.axes[dim].size == call.shape[dim]:
            return lambda tensors, draw: run(tensors)
        asked = torch.tensor(list(out.axes[dim]))
        return lambda tensors, draw: run(tensors).index_select(dim, asked)

    def stages(self, call: Call) -> Stages | None:
        if not call.shape:
            return None
        dim, dtype = self._dim(call), call.arguments().get("dtype")
        narrow = (*call.shape[:dim], 1, *call.shape[dim + 1 :])

        def gives(share: Region) -> AnyRegion:
            return Region(narrow, (*share.axes[:dim], Indices.span(0, 1), *share.axes[dim + 1 :]))

        def value(inputs: Sequence[Tensor]) -> Tensor:
            return inputs[0] if dtype is None else inputs[0].to(dtype)

        def largest(share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
            return value(inputs).detach().amax(dim, keepdim=True)

        def total(share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
            return (value(inputs) - combined[0]).exp().sum(dim, keepdim=True)

        def finish(share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
            shifted = value(inputs) - combined[0]
            return shifted - combined[1].log() if "log" in call.name else shifted.exp() / combined[1]

        def stage(run: object, reads: int, combine: Combine | None) -> Stage:
            return Stage(
                space=call.shape,
                needs=lambda share: (share,),
                reads=lambda share: (gives(share),) * reads,
                gives=gives if combine else lambda share: share,
                run=run,  # type: ignore[arg-type]
                shape=narrow if combine else call.shape,
                combine=combine,
            )

        return Stages((stage(largest, 0, Combine.MAX), stage(total, 1, Combine.ADD), stage(finish, 2, None)))

    def _dim(self, call: Call) -> int:
        return positive(call.arguments()["dim"], len(call.shape))


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    reduction, total, softmax = Reduction(), Sum(), Softmax()
    return {
        **{name: reduction for name in NAMES},
        **{name: total for name in SUMS},
        **{name: softmax for name in ("softmax", "log_softmax", "_softmax", "_log_softmax")},
    }
