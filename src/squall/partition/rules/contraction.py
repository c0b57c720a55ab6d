"""Products summed over an axis: linear layers, matrix products, and the lookup of an embedding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from squall.partition.call import Call, TensorSpec
from squall.partition.indices import Indices
from squall.partition.regions import AnyRegion, Region, Shape, nothing
from squall.partition.rules.base import Rule, Words, add_bias, caller, positive
from squall.partition.rules.elementwise import broadcast
from squall.partition.stages import Combine, Stage, Stages
from squall.partition.words import All, Same, Word


class _Product(Rule):
    """Two factors whose common axis is summed. Cut over it (see `stages`), it is P products and one add."""

    def summed(self, call: Call) -> tuple[int, int]:
        """The summed axis in each factor."""
        raise NotImplementedError

    def stages(self, call: Call) -> Stages | None:
        return Stages((over_the_sum(self, call), add_bias(call, self, -1)))


def over_the_sum(rule: _Product, call: Call) -> Stage:
    """Partial products. The cut space has the output's axes and, last, the summed one."""
    axes = rule.summed(call)
    count = call.inputs[0].shape[axes[0]]
    bias = {"bias": None} if "bias" in call.arguments() else {}
    multiply = caller(call, **bias)

    def output(share: Region) -> Region:
        return Region(call.shape, share.axes[:-1])

    def needs(share: Region) -> tuple[AnyRegion, ...]:
        found = [each.bounding() for each in rule.needs(call, output(share))]
        for at, axis in enumerate(axes):
            found[at] = found[at].replace(axis, share.axes[-1])
        return *found[:2], *(each.replace(0, Indices()) for each in found[2:])

    def run(share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
        result: Tensor = multiply(inputs)
        return result

    return Stage(
        space=(*call.shape, count), needs=needs, gives=output, run=run, shape=call.shape, combine=Combine.ADD
    )


class Linear(_Product):
    """``linear(value, weight[out, in], bias)``."""

    def applies(self, call: Call) -> bool:
        return len(call.inputs[1].shape) == 2

    def words(self, call: Call) -> tuple[Words, ...]:
        last = len(call.shape) - 1
        value = (*(Same(at) for at in range(last)), All())
        return (value, (Same(last), All()), (Same(last),))[: len(call.inputs)]

    def summed(self, call: Call) -> tuple[int, int]:
        return len(call.shape) - 1, 1


class MatMul(_Product):
    """``matmul``, ``mm``, ``bmm``, ``mv`` and ``dot``, batch axes broadcast as torch does."""

    def words(self, call: Call) -> tuple[Words, ...]:
        left, right = call.inputs
        return _factor_words(left, call.shape, right, is_left=True), _factor_words(
            right, call.shape, left, is_left=False
        )

    def summed(self, call: Call) -> tuple[int, int]:
        left, right = call.inputs
        return len(left.shape) - 1, max(len(right.shape) - 2, 0)


def _factor_words(spec: TensorSpec, out: Shape, other: TensorSpec, *, is_left: bool) -> Words:
    """Batch axes as broadcast, the summed axis as a whole, the other one as the output's row or column."""
    if len(spec.shape) == 1:
        return (All(),)
    kept = 1 if len(other.shape) == 1 else 2  # trailing axes of the output that are no batch axes
    if is_left:
        matrix: tuple[Word, ...] = (Same(len(out) - kept), All())
    else:
        matrix = (All(), Same(len(out) - 1))
    batch = broadcast(TensorSpec(spec.shape[:-2]), out[: len(out) - kept])
    return *batch, *matrix


class AddMatMul(Rule):
    """``addmm`` and ``baddbmm``: a product, and a term that broadcasts to it."""

    def words(self, call: Call) -> tuple[Words, ...]:
        term, left, right = call.inputs
        return (
            broadcast(term, call.shape),
            _factor_words(left, call.shape, right, is_left=True),
            _factor_words(right, call.shape, left, is_left=False),
        )


class Embedding(Rule):
    """Rows of a table. Which ones is not known beforehand, so a cut over rows (see `stages`) adds P partial lookups."""

    def applies(self, call: Call) -> bool:
        named = call.arguments()
        return not named["scale_grad_by_freq"] and not named["sparse"]

    def words(self, call: Call) -> tuple[Words, ...]:
        last = len(call.shape) - 1
        return (All(), Same(last)), tuple(Same(at) for at in range(last))

    def stages(self, call: Call) -> Stages | None:
        rows = call.inputs[0].shape[0]
        skipped = positive_row(call.arguments()["padding_idx"], rows)

        def output(share: Region) -> Region:
            return Region(call.shape, share.axes[:-1])

        def needs(share: Region) -> tuple[AnyRegion, ...]:
            table, index = self.needs(call, output(share))
            return table.bounding().replace(0, share.axes[-1]), index

        def run(share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
            table, index = inputs
            place = torch.full((rows,), -1)
            place[torch.tensor(list(share.axes[-1]), dtype=torch.long)] = torch.arange(share.axes[-1].size)
            here = place[index]
            found = torch.nn.functional.embedding(here.clamp_min(0), table)
            if skipped is not None:  # looked up like the others, without a gradient
                found = torch.where((index == skipped).unsqueeze(-1), found.detach(), found)
            return found * (here >= 0).unsqueeze(-1).to(found.dtype)

        first = Stage(
            space=(*call.shape, rows),
            needs=needs,
            gives=output,
            run=run,
            shape=call.shape,
            combine=Combine.ADD,
        )
        return Stages((first, as_it_is(call)))


def positive_row(index: int, rows: int) -> int | None:
    """The row that gets no gradient; torch's op says -1 for none."""
    return index if 0 <= index < rows else None


def as_it_is(call: Call) -> Stage:
    """A last stage that hands on the combined value."""
    return Stage(
        space=call.shape,
        needs=lambda share: tuple(nothing(each.shape) for each in call.inputs),
        reads=lambda share: (share,),
        gives=lambda share: share,
        run=lambda share, inputs, combined: combined[0],
        shape=call.shape,
    )


class IndexSelect(Rule):
    """Rows of a value by an index tensor: any row may be asked for."""

    def words(self, call: Call) -> tuple[Words, ...]:
        dim = positive(call.arguments()["dim"], len(call.shape))
        value = tuple(All() if at == dim else Same(at) for at in range(len(call.shape)))
        return value, (Same(dim),)


def rules() -> dict[str, Rule]:
    """The rules of this file, by the op's name."""
    product, sum_of_both = MatMul(), AddMatMul()
    return {
        "linear": Linear(),
        **{name: product for name in ("matmul", "mm", "bmm", "mv", "dot")},
        "addmm": sum_of_both,
        "baddbmm": sum_of_both,
        "embedding": Embedding(),
        "index_select": IndexSelect(),
    }
