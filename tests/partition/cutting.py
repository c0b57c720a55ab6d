"""Random cuts of an op over partitions, run piece by piece and compared with the op uncut.

A partition gets its inputs the way it would get messages: as detached pieces, a random owner's part each. Gradients of
those pieces are added up where they came from.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from squall.partition.call import Call, TensorSpec, filled, operator
from squall.partition.indices import Indices
from squall.partition.masks import Draw
from squall.partition.pieces import Piece, take
from squall.partition.regions import AnyRegion, FlatRegion, Region, nothing
from squall.partition.rules import needs, prepare, prepare_stage, stages
from squall.partition.stages import Combine, Stages

DRAW = Draw(seed=5, epoch=2, position=3)
TOLERANCE = 1e-10
Whole = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Case:
    """One op on given tensors. `whole` computes it uncut; the op itself unless given."""

    call: Call
    tensors: list[Tensor] = field(repr=False)
    whole: Whole | None = None
    fixed: frozenset[int] = frozenset()  # inputs for which torch has no gradient

    def leaves(self) -> list[Tensor]:
        return [leaf(each, at in self.fixed) for at, each in enumerate(self.tensors)]

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        if self.whole is not None:
            return self.whole(tensors)
        result = operator(self.call.target)(
            *filled(self.call.args, list(tensors)), **filled(self.call.kwargs, list(tensors))
        )
        picked: Tensor = result[self.call.output] if isinstance(result, (tuple, list)) else result
        return picked


def case_of(target: str, args: tuple[Any, ...], tensors: list[Tensor], output: int = 0, **more: Any) -> Case:
    """A case with the shapes filled in by running the op."""
    whole, fixed = more.pop("whole", None), frozenset(more.pop("fixed", ()))
    call = Call(target=target, args=args, kwargs=more.pop("kwargs", {}), inputs=specs(tensors), site=7)
    result = operator(target)(*filled(call.args, tensors), **filled(call.kwargs, tensors))
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    shapes = tuple(tuple(each.shape) for each in results)
    return Case(replace(call, outputs=shapes, output=output), tensors, whole, fixed)


def specs(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in tensors)


def random_cut(shape: tuple[int, ...], parts: int, rng: random.Random) -> list[AnyRegion]:
    """Disjoint regions that cover a tensor, one for each partition; uneven, gappy, in grids, flat, some empty."""
    if shape and 0 not in shape and rng.random() < 0.06:
        return _flat_cut(shape, parts, rng)
    return list(random_products(shape, parts, rng))


def random_products(shape: tuple[int, ...], parts: int, rng: random.Random) -> list[AnyRegion]:
    """The same, without flat ones."""
    if not shape or 0 in shape:
        return [Region.whole(shape), *[nothing(shape)] * (parts - 1)]
    kind = rng.random()
    first = rng.randrange(len(shape))
    if parts == 4 and len(shape) > 1 and kind < 0.6:
        second = rng.choice([axis for axis in range(len(shape)) if axis != first])
        halves = _axis_cut(shape[first], 2, rng), _axis_cut(shape[second], 2, rng)
        whole = Region.whole(shape)
        return [whole.replace(first, a).replace(second, b) for a in halves[0] for b in halves[1]]
    return [Region.whole(shape).replace(first, part) for part in _axis_cut(shape[first], parts, rng)]


def _axis_cut(size: int, parts: int, rng: random.Random) -> list[Indices]:
    if rng.random() < 0.25:  # any set of indices
        owner = [rng.randrange(parts) for _ in range(size)]
        return [Indices.each(at for at in range(size) if owner[at] == part) for part in range(parts)]
    ends = sorted(rng.randint(0, size) for _ in range(parts - 1))
    return [Indices.span(a, b) for a, b in zip([0, *ends], [*ends, size], strict=True)]


def _flat_cut(shape: tuple[int, ...], parts: int, rng: random.Random) -> list[AnyRegion]:
    whole = Region.whole(shape).flat().stop
    return [FlatRegion(shape, part) for part in _axis_cut(whole, parts, rng)]


def add_into(total: Tensor, region: AnyRegion, piece: Tensor) -> None:
    """Add a compact piece to the whole tensor, in place."""
    if isinstance(region, Region) and all(axis.is_span for axis in region.axes):
        total[tuple(slice(axis.start, axis.stop) for axis in region.axes)] += piece
    else:
        total.view(-1).index_add_(0, numbers(region), piece.reshape(-1))


def numbers(region: AnyRegion) -> Tensor:
    """The row-major numbers of a region's elements, counted out axis by axis."""
    if isinstance(region, FlatRegion):
        return torch.tensor(list(region.indices), dtype=torch.long)
    found = torch.zeros(1, dtype=torch.long)
    for size, axis in zip(region.shape, region.axes, strict=True):
        found = (found[:, None] * size + torch.tensor(list(axis), dtype=torch.long)).reshape(-1)
    return found


def reference(case: Case, rng: random.Random) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The op uncut: output, a random gradient of it, and what autograd makes of that for each input."""
    leaves = case.leaves()
    output = case.run(leaves)
    grad = torch.randn(output.shape, generator=generator(rng), dtype=torch.float64)
    return output.detach(), grad, gradients(output, grad, leaves)


def leaf(tensor: Tensor, fixed: bool = False) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point() and not fixed)


def gradients(output: Tensor, grad: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    wanted = [each for each in leaves if each.requires_grad]
    if not wanted or not output.requires_grad:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(output, wanted, grad.to(output.dtype), allow_unused=True))
    return [next(found) if each.requires_grad else None for each in leaves]


def generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(2**31))


def check_cut(case: Case, rng: random.Random) -> None:
    """Cut the output over 2 to 5 partitions and the inputs over others; outputs and gradients must be the op's."""
    call = case.call
    output, grad, expected = reference(case, rng)
    parts = rng.choice([2, 2, 3, 3, 4, 4, 5])
    regions = random_cut(call.shape, parts, rng)
    owners = [random_cut(spec.shape, parts, rng) if rng.random() < 0.6 else None for spec in call.inputs]
    total = torch.zeros(output.shape, dtype=output.dtype if output.dtype != torch.bool else torch.float64)
    sums = [torch.zeros(each.shape, dtype=each.dtype) for each in case.tensors]
    for part, region in enumerate(regions):
        wanted = needs(call, region)
        held = [received(need, owner, part) for need, owner in zip(wanted, owners, strict=True)]
        pieces = [
            [leaf(take(Piece(Region.whole(spec.shape), whole), each), at in case.fixed) for each in one]
            for at, (spec, whole, one) in enumerate(zip(call.inputs, case.tensors, held, strict=True))
        ]
        mine = prepare(call, region, held)(pieces, DRAW)
        assert tuple(mine.shape) == region.sizes
        assert mine.dtype == output.dtype or region.is_empty
        add_into(total, region, mine.detach().to(total.dtype))
        flat = [each for one in pieces for each in one]
        cut_grad = take(Piece(Region.whole(call.shape), grad), region)
        found = iter(gradients(mine, cut_grad, flat))
        for at, one in enumerate(held):
            for each in one:
                gradient = next(found)
                if gradient is not None:
                    add_into(sums[at], each, gradient)
    close(total, output.to(total.dtype), "output")
    for at, (mine, theirs) in enumerate(zip(sums, expected, strict=True)):
        close(mine, torch.zeros_like(mine) if theirs is None else theirs, f"gradient of input {at}")


def received(need: AnyRegion, owners: list[AnyRegion] | None, part: int) -> list[AnyRegion]:
    """All of the partition's own part, if some is needed, and of each other owner's what is needed; or one message."""
    if owners is None:
        return [need]
    sent = [owner & need for owner in owners]
    return [owners[at] if at == part else each for at, each in enumerate(sent) if not each.is_empty]


def close(mine: Tensor, theirs: Tensor, what: str) -> None:
    scale = max(1.0, float(theirs.abs().max()) if theirs.numel() and theirs.is_floating_point() else 1.0)
    if (
        mine.is_floating_point()
        and mine.shape == theirs.shape
        and bool(((mine - theirs).abs() <= TOLERANCE * scale).all())
    ):
        return
    torch.testing.assert_close(
        mine, theirs, rtol=0, atol=TOLERANCE * scale, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def check_stages(case: Case, rng: random.Random) -> None:
    """Cut each stage's space at random, combine the contributions, and compare the end with the op uncut."""
    plan = stages(case.call)
    assert plan is not None
    output, grad, expected = reference(case, rng)
    leaves = case.leaves()
    result = run_stages(case.call, plan, leaves, rng)
    close(result.detach(), output, "output")
    for at, (mine, theirs) in enumerate(zip(gradients(result, grad, leaves), expected, strict=True)):
        if theirs is not None:
            close(torch.zeros_like(theirs) if mine is None else mine, theirs, f"gradient of input {at}")


def run_stages(call: Call, plan: Stages, leaves: list[Tensor], rng: random.Random) -> Tensor:
    combined: list[Tensor] = []
    for stage in plan.stages:
        total: Tensor | None = None
        for share in random_products(stage.space, rng.choice([2, 3, 4]), rng):
            for box in share.boxes(stage.windows) if isinstance(share, Region) else []:
                if box.is_empty:
                    continue
                mine = run_share(call, stage, box, leaves, combined)
                total = merge(total, stage.gives(box), mine, stage.shape, stage.combine)
        assert total is not None
        combined.append(total)
    return combined[-1]


def run_share(call: Call, stage: Any, share: Region, leaves: list[Tensor], combined: list[Tensor]) -> Tensor:
    held = [[need] if not need.is_empty else [] for need in stage.needs(share)]
    pieces = [
        [take(Piece(Region.whole(tuple(whole.shape)), whole), each) for each in one]
        for one, whole in zip(held, leaves, strict=True)
    ]
    reads = [[need] if not need.is_empty else [] for need in stage.reads(share)]
    before = [
        [take(Piece(Region.whole(tuple(whole.shape)), whole), each) for each in one]
        for one, whole in zip(reads, combined, strict=False)
    ]
    return prepare_stage(call, stage, share, held, reads)(pieces, before)


def merge(
    total: Tensor | None, region: AnyRegion, mine: Tensor, shape: tuple[int, ...], how: Combine | None
) -> Tensor:
    """The combined value with one more contribution, differentiable."""
    assert tuple(mine.shape) == region.sizes
    start = float("-inf") if how is Combine.MAX else 0.0
    flat = mine.new_full(shape, start).reshape(-1)
    spread = flat.index_put((numbers(region),), mine.reshape(-1)).reshape(shape)
    if total is None:
        return spread
    return torch.maximum(total, spread) if how is Combine.MAX else total + spread
