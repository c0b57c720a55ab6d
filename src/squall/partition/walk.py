"""One walk over a graph that gives each value its owners: the cut for which least travels, within the node's team."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from random import Random

from squall.model.graph import Extent, Graph, Source
from squall.partition.call import Call
from squall.partition.calls import Bound, bound
from squall.partition.indices import Indices
from squall.partition.plan import EVERYWHERE, Holding, Plan, StageCut, along, on_one, regions_of
from squall.partition.regions import AnyRegion, Region, Shape, uncovered
from squall.partition.rules import is_opaque, losses, needs, stages
from squall.partition.stages import Stages

BATCH = 4
"""The batch size at which cuts are compared."""
_NORMS = ("layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax")
_SUMS = (*losses.ELEMENTWISE, "sum", "mean")


class Walk:
    """Holdings node by node; a value from outside belongs where it is read first."""

    def __init__(
        self,
        graph: Graph,
        partitions: int,
        team_of: Mapping[int, tuple[int, ...]],
        tiles: tuple[str, ...],
        speeds: tuple[float, ...],
        weights: Mapping[int, Mapping[int, float]] | None = None,
    ) -> None:
        self._graph, self._partitions, self._team_of, self._tiles = graph, partitions, team_of, tiles
        self._speeds = dict(enumerate(speeds))
        self._weights = dict(weights or {})
        self._holdings: dict[int, Holding] = {}
        self._staged: dict[int, tuple[StageCut, ...]] = {}

    def plan(
        self,
        given: Mapping[int, Holding] | None = None,
        staged: Mapping[int, tuple[StageCut, ...]] | None = None,
    ) -> Plan:
        graph = self._graph
        self._holdings.update(given or {})
        self._staged.update(staged or {})
        for index in graph.from_outside(Source.INPUT, Source.CONSTANT):
            self._holdings.setdefault(index, EVERYWHERE)
        for at, node in enumerate(graph.nodes):
            here = bound(graph, at, BATCH)
            if given and all(index in self._holdings for index in node.outputs if index is not None):
                self._adopt_all(here)
            else:
                self._place(at, here)
        for index, value in enumerate(graph.values):
            if index not in self._holdings:  # nobody reads it
                self._holdings[index] = on_one(0, self._partitions, len(value.shape))
        plan = Plan(
            partitions=self._partitions,
            schema_hash=graph.schema_hash,
            holdings=tuple(self._holdings[index] for index in range(len(graph.values))),
            staged=self._staged,
        )
        plan.check(graph)
        return plan

    def _place(self, at: int, here: Bound) -> None:
        team = self._team_of.get(at) or self._where_inputs_are(here)
        outputs = [(k, index) for k, index in enumerate(here.outputs) if index is not None]
        is_whole = any(is_opaque(here.call.picking(k)) for k, _ in outputs)
        for k, index in outputs:
            call = here.call.picking(k)
            rank = len(call.shape)
            choices = [] if is_whole or len(team) == 1 else self._choices(call, here, index, team)
            best = min(choices, key=lambda holding: self._traffic(call, here, holding), default=None)
            self._holdings[index] = best or on_one(team[0], self._partitions, rank)
        if len(team) > 1 and not is_whole:
            self._stage(at, here, team)
        self._adopt_all(here)

    def _where_inputs_are(self, here: Bound) -> tuple[int, ...]:
        """The partitions that hold some of what a node reads; the first one if nobody does."""
        held = [self._holdings.get(value, EVERYWHERE) for value in here.values]
        found = {p for holding in held for p, share in enumerate(holding) if share is not None}
        return tuple(sorted(found)) or (0,)

    def _adopt_all(self, here: Bound) -> None:
        for k, index in enumerate(here.outputs):
            if index is not None:
                self._adopt(here.call.picking(k), here, self._holdings[index])

    def _choices(self, call: Call, here: Bound, index: int, team: tuple[int, ...]) -> list[Holding]:
        """The cuts of one output that come into question."""
        shape = self._graph.values[index].shape
        axes = [at for at in self._axes(call) if not isinstance(shape[at], Extent) and call.shape[at] > 1]
        found = [
            along(
                at,
                _even(call.shape[at], team, self._weights.get(call.site, self._speeds)),
                self._partitions,
                len(shape),
            )
            for at in axes
        ]
        for value in here.values:
            found += [
                along(at, parts, self._partitions, len(shape))
                for source, parts in self._cuts(value, team)
                for at in axes
                if call.shape[at] == source
            ]
            found += self._reshaped(call, value, shape, team)
        return found

    def _axes(self, call: Call) -> list[int]:
        """The axes that may be cut: feature maps of windowed ops, unless they are to be cut in space."""
        every = list(range(len(call.shape)))
        if call.name in self._tiles:
            return [at for at in every if at >= 2]
        if "conv" in call.name or "pool" in call.name:
            return [at for at in every if at == len(call.shape) - _space(call) - 1]
        return every

    def _cuts(self, value: int, team: tuple[int, ...]) -> list[tuple[int, dict[int, Indices]]]:
        """How a value is cut already: the size of the axis, and each partition's indices."""
        holding, shape = self._holdings.get(value, ()), self._graph.values[value].shape_at(BATCH)
        if any(share is not None and p not in team for p, share in enumerate(holding)):
            return []
        found = []
        for at, size in enumerate(shape):
            parts = {p: share[at] for p, share in enumerate(holding) if share is not None}
            if parts and all(axis is not None for axis in parts.values()):
                found.append((size, {p: axis for p, axis in parts.items() if axis is not None}))
        return found

    def _reshaped(
        self, call: Call, value: int, shape: Sequence[object], team: tuple[int, ...]
    ) -> list[Holding]:
        """Where axes are merged or split: the same elements stay where they are."""
        holding, source = self._holdings.get(value, ()), self._graph.values[value].shape_at(BATCH)
        if prod(source) != prod(call.shape) or source == call.shape or len(holding) == 0:
            return []
        found = []
        for at in range(len(call.shape)):
            if isinstance(shape[at], Extent):
                continue
            inner, parts = prod(call.shape[at + 1 :]), {}
            for p, region in enumerate(regions_of(holding, source)):
                if not region.is_empty:
                    parts[p] = Indices.each(number // inner % call.shape[at] for number in region.flat())
            sizes = sum(axis.size for axis in parts.values())
            if sizes == call.shape[at] and set(parts) <= set(team):
                found.append(along(at, parts, self._partitions, len(call.shape)))
        return found

    def _traffic(self, call: Call, here: Bound, holding: Holding) -> tuple[float, float]:
        """What travels under a cut, activations and parameters alike; then how uneven it is."""
        total, largest = 0, 0
        for p, out in enumerate(regions_of(holding, call.shape)):
            if out.is_empty:
                continue
            largest = max(largest, out.size)
            for value, need in zip(here.values, needs(call, out), strict=True):
                total += self._missing(value, need, p)
        replicated = self._replicated(call, here, holding)
        return total + replicated, largest

    def _missing(self, value: int, need: AnyRegion, partition: int) -> int:
        """How many elements of a need the partition would have to be sent."""
        holding = self._holdings.get(value, EVERYWHERE)
        if holding == EVERYWHERE or need.is_empty:
            return 0
        own = regions_of(holding, self._graph.values[value].shape_at(BATCH))[partition]
        return need.size - (need & own).size

    def _replicated(self, call: Call, here: Bound, holding: Holding) -> int:
        """How many elements of parameters that nobody owns yet more than one partition would read."""
        found = 0
        for at, value in enumerate(here.values):
            if value not in self._holdings:
                wanted = [needs(call, out)[at] for out in regions_of(holding, call.shape) if not out.is_empty]
                whole = self._graph.values[value].shape_at(BATCH)
                found += max(sum(need.size for need in wanted) - prod(whole), 0)
        return found

    def _adopt(self, call: Call, here: Bound, holding: Holding) -> None:
        """Give each parameter and buffer that nobody owns yet to those who read it first."""
        for at, value in enumerate(here.values):
            if value in self._holdings:
                continue
            shape = self._graph.values[value].shape_at(BATCH)
            if any(not needs(call, out)[at].is_empty for out in regions_of(holding, call.shape)):
                self._holdings[value] = self._read_first(call, at, holding, shape)

    def _read_first(self, call: Call, at: int, holding: Holding, shape: Shape) -> Holding:
        found: list[Region | None] = []
        taken: list[AnyRegion] = []
        for out in regions_of(holding, call.shape):
            need = needs(call, out)[at]
            left = [each for each in uncovered(need, taken) if isinstance(each, Region)]
            found.append(left[0] if left and len(left) == 1 else None)
            taken += [left[0]] if found[-1] is not None else []
        first = next((p for p, out in enumerate(regions_of(holding, call.shape)) if not out.is_empty), 0)
        if uncovered(Region.whole(shape), taken):
            return on_one(first, self._partitions, len(shape))
        return tuple(None if region is None or region.is_empty else region.axes for region in found)

    def _stage(self, at: int, here: Bound, team: tuple[int, ...]) -> None:
        """Cut a normalisation or a sum over the axis that it reduces, if its input is cut there."""
        outputs = [(k, index) for k, index in enumerate(here.outputs) if index is not None]
        call, shape = here.call.picking(outputs[0][0]), here.call.inputs[0].shape if here.values else ()
        if call.name not in _NORMS + _SUMS or len(outputs) != 1:
            return
        plan, holding = stages(call), self._holdings[here.values[0]]
        inputs = regions_of(holding, shape) if holding else ()
        if plan is None or plan.stages[0].space != shape or sum(not each.is_empty for each in inputs) < 2:
            return
        index = outputs[0][1]
        if self._traffic(call, here, self._holdings[index] if call.name in _SUMS else holding)[0] == 0:
            return
        if call.name in _NORMS:
            self._holdings[index] = holding
        self._staged[at] = tuple(
            StageCut(shares=holding, combined=on_one(team[0], self._partitions, len(stage.shape)))
            for stage in plan.stages[:-1]
        )


def _even(size: int, team: Sequence[int], weights: Mapping[int, float]) -> dict[int, Indices]:
    """An axis in spans, one for each partition of a team, in proportion to their weights.

    >>> _even(5, (0, 2), {0: 1.0, 2: 1.0})
    {0: Indices[0:2], 2: Indices[2:5]}
    >>> _even(8, (0, 1), {0: 3.0, 1: 1.0})
    {0: Indices[0:6], 1: Indices[6:8]}
    """
    ends = [0, *accumulate(weights[p] for p in team)]
    # Rounded down, but for what sums of weights lose.
    cuts = [int(size * end / ends[-1] + 1e-9) for end in ends]
    return {p: Indices.span(a, b) for p, (a, b) in zip(team, pairwise(cuts), strict=True)}


def _space(call: Call) -> int:
    """How many axes of space a convolution or pooling has."""
    digits = [letter for letter in call.name if letter.isdigit()]
    return int(digits[0]) if digits else max(len(call.shape) - 2, 1)


class RandomWalk(Walk):
    """Every value cut at random."""

    def __init__(self, graph: Graph, partitions: int, rng: Random) -> None:
        super().__init__(graph, partitions, {}, (), (1.0,) * partitions)
        self._rng = rng

    def plan(
        self,
        given: Mapping[int, Holding] | None = None,
        staged: Mapping[int, tuple[StageCut, ...]] | None = None,
    ) -> Plan:
        for index in self._graph.from_outside(Source.PARAMETER, Source.BUFFER, Source.INPUT):
            value = self._graph.values[index]
            is_everywhere = value.source is Source.INPUT and self._rng.random() < 0.5
            self._holdings[index] = EVERYWHERE if is_everywhere else self._any(value.shape)
        self._team_of = {at: () for at in range(len(self._graph.nodes))}
        return super().plan(given, staged)

    def _place(self, at: int, here: Bound) -> None:
        outputs = [(k, index) for k, index in enumerate(here.outputs) if index is not None]
        calls = [here.call.picking(k) for k, _ in outputs]
        if any(is_opaque(call) for call in calls):
            p = self._rng.randrange(self._partitions)
            for (_, index), call in zip(outputs, calls, strict=True):
                self._holdings[index] = on_one(p, self._partitions, len(call.shape))
            return
        for _, index in outputs:
            self._holdings[index] = self._any(self._graph.values[index].shape)
        plan, other = stages(calls[0]), stages(bound(self._graph, at, BATCH + 1).call.picking(outputs[0][0]))
        if plan is not None and other is not None and self._rng.random() < 0.6:
            self._staged[at] = self._any_stages(plan, other)

    def _any_stages(self, plan: Stages, other: Stages) -> tuple[StageCut, ...]:
        """`other` is the same at another batch size: axes that differ count examples."""
        return tuple(
            StageCut(
                shares=self._any(
                    [a if a == b else Extent() for a, b in zip(one.space, two.space, strict=True)]
                ),
                combined=self._any(
                    [a if a == b else Extent() for a, b in zip(one.shape, two.shape, strict=True)]
                ),
            )
            for one, two in zip(plan.stages[:-1], other.stages[:-1], strict=True)
        )

    def _any(self, shape: Sequence[int | Extent]) -> Holding:
        axes = [at for at, size in enumerate(shape) if not isinstance(size, Extent) and size > 1]
        if not axes or self._rng.random() < 0.15:
            return on_one(self._rng.randrange(self._partitions), self._partitions, len(shape))
        at = self._rng.choice(axes)
        size = shape[at]
        assert isinstance(size, int)
        return along(at, self._parts(size), self._partitions, len(shape))

    def _parts(self, size: int) -> dict[int, Indices]:
        count = self._partitions
        if self._rng.random() < 0.25:
            owner = [self._rng.randrange(count) for _ in range(size)]
            return {p: Indices.each(at for at in range(size) if owner[at] == p) for p in range(count)}
        ends = sorted(self._rng.randint(0, size) for _ in range(count - 1))
        order = self._rng.sample(range(count), count)
        return {p: Indices.span(a, b) for p, (a, b) in zip(order, pairwise([0, *ends, size]), strict=True)}
