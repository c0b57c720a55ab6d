"""Who owns what of a cut model: for each value of its graph, the region of each partition.

A `Share` says it without the batch size: for each axis a set of indices, or None for all of it. Axes that count examples
are never cut; that is what replicas are for. Constants and inputs may be everywhere: each partition is handed what
it needs of them, and nobody sends any.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from squall.errors import ConfigError
from squall.model.graph import Graph, Source
from squall.partition.calls import bound
from squall.partition.indices import Indices
from squall.partition.regions import AnyRegion, Region, Shape, nothing, tiles
from squall.partition.rules import is_opaque, stages

Share = tuple[Indices | None, ...]
"""For each axis which indices; None for all of them, whatever the batch size."""
Holding = tuple[Share | None, ...]
"""For each partition its share of one value; None for nothing."""
EVERYWHERE: Holding = ()
"""Of an input or a constant: each partition is handed what it needs."""

_BATCHES = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """How one stage of an op is divided, but the last, which follows the output.

    Attributes:
        shares: of the stage's space, for each partition.
        combined: who adds up which part of the combined value.
    """

    shares: Holding
    combined: Holding


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cut of one graph over partitions.

    Attributes:
        partitions: how many there are.
        schema_hash: of the graph that it was made for.
        holdings: for each value of the graph, in order, who owns what.
        staged: number of a node -> how each of its stages but the last is divided. Other nodes are computed by each
            owner of their output from all that it needs.

    Raises:
        ConfigError: by `check`: a value is not covered exactly once, or an op is cut that has no rule.
    """

    partitions: int
    schema_hash: str
    holdings: tuple[Holding, ...]
    staged: Mapping[int, tuple[StageCut, ...]] = field(default_factory=dict)

    def regions(self, value: int, shape: Shape) -> tuple[AnyRegion, ...]:
        """What each partition owns of a value that has this shape at the batch size at hand."""
        return regions_of(self.holdings[value] or (None,) * self.partitions, shape)

    def is_everywhere(self, value: int) -> bool:
        return self.holdings[value] == EVERYWHERE

    def check(self, graph: Graph) -> None:
        """Refuse a plan that does not fit the graph, or under which some op cannot be computed."""
        if self.schema_hash != graph.schema_hash:
            raise _wrong("a plan", f"a graph with hash {self.schema_hash[:12]}", graph.schema_hash[:12])
        for index, value in enumerate(graph.values):
            for batch in _BATCHES:
                self._check_value(graph, index, value.shape_at(batch))
        for at in range(len(graph.nodes)):
            self._check_node(graph, at)

    def _check_value(self, graph: Graph, index: int, shape: Shape) -> None:
        value = graph.values[index]
        if self.is_everywhere(index):
            if value.source not in (Source.INPUT, Source.CONSTANT):
                raise _wrong(f"value {value.name!r}", "an owner for each element", "it everywhere")
            return
        if value.source is Source.CONSTANT:
            raise _wrong(f"constant {value.name!r}", "it everywhere", "owners")
        self._check_tiles(f"value {value.name!r}", self.holdings[index], shape)

    def _check_tiles(self, subject: str, holding: Holding, shape: Shape) -> None:
        if len(holding) != self.partitions or any(
            share is not None and len(share) != len(shape) for share in holding
        ):
            raise _wrong(subject, f"{self.partitions} shares of shape {shape}", str(holding))
        regions = regions_of(holding, shape)
        if not tiles(regions, Region.whole(shape)):
            raise _wrong(subject, f"disjoint shares that cover shape {shape}", str(regions))

    def _check_node(self, graph: Graph, at: int) -> None:
        for batch in _BATCHES:
            here = bound(graph, at, batch)
            outputs = [(k, index) for k, index in enumerate(here.outputs) if index is not None]
            plans = [stages(here.call.picking(k)) for k, _ in outputs]
            if at in self.staged:
                if not plans or plans[0] is None or plans[0].rounds != len(self.staged[at]):
                    raise _wrong(f"node {graph.nodes[at].name!r}", "an op with these stages", "none")
                for stage, cut in zip(plans[0].stages, self.staged[at], strict=False):
                    subject = f"a stage of node {graph.nodes[at].name!r}"
                    self._check_tiles(subject, cut.shares, stage.space)
                    self._check_tiles(subject, cut.combined, stage.shape)
            elif any(is_opaque(here.call.picking(k)) for k, _ in outputs):
                owners = {self._owner(index, graph.values[index].shape_at(batch)) for _, index in outputs}
                if len(owners) != 1 or None in owners:
                    node = graph.nodes[at]
                    raise _wrong(
                        f"node {node.name!r} ({node.line or node.module or node.target})",
                        "it whole on one partition, since no rule says how to cut it",
                        "it cut",
                    )

    def _owner(self, value: int, shape: Shape) -> int | None:
        """The partition that owns all of a value, if one does."""
        whole = [p for p, region in enumerate(self.regions(value, shape)) if region.is_whole]
        return whole[0] if whole else None

    def to_json(self) -> dict[str, Any]:
        """A description that `json.dumps` takes."""
        return {
            "partitions": self.partitions,
            "schema_hash": self.schema_hash,
            "holdings": [holding_to_json(holding) for holding in self.holdings],
            "staged": {
                str(at): [[holding_to_json(cut.shares), holding_to_json(cut.combined)] for cut in cuts]
                for at, cuts in self.staged.items()
            },
        }

    @classmethod
    def from_json(cls, described: str | Mapping[str, Any]) -> "Plan":
        """The plan of such a description, or of its text."""
        data = json.loads(described) if isinstance(described, str) else described
        staged = {
            int(at): tuple(
                StageCut(shares=holding_from_json(shares), combined=holding_from_json(combined))
                for shares, combined in cuts
            )
            for at, cuts in data["staged"].items()
        }
        return cls(
            partitions=int(data["partitions"]),
            schema_hash=str(data["schema_hash"]),
            holdings=tuple(holding_from_json(holding) for holding in data["holdings"]),
            staged=staged,
        )


def regions_of(holding: Holding, shape: Shape) -> tuple[AnyRegion, ...]:
    """The regions of shares, at the batch size that gives the value this shape.

    >>> regions_of(((None, Indices.span(0, 2)), (None, Indices.span(2, 3))), (8, 3))
    (Region[0:8, 0:2] of (8, 3), Region[0:8, 2:3] of (8, 3))
    """
    return tuple(nothing(shape) if share is None else _region(share, shape) for share in holding)


def _region(share: Share, shape: Shape) -> Region:
    axes = zip(share, shape, strict=True)
    return Region(shape, tuple(Indices.span(0, size) if axis is None else axis for axis, size in axes))


def on_one(partition: int, partitions: int, rank: int) -> Holding:
    """All of a value of so many axes on one partition.

    >>> on_one(1, 2, 2)
    (None, (None, None))
    """
    return tuple((None,) * rank if p == partition else None for p in range(partitions))


def along(axis: int, parts: Mapping[int, Indices], partitions: int, rank: int) -> Holding:
    """A value cut along one axis: partition -> its indices."""
    found: list[Share | None] = []
    for p in range(partitions):
        mine = parts.get(p, Indices())
        found.append(tuple(mine if at == axis else None for at in range(rank)) if mine.size else None)
    return tuple(found)


def holding_to_json(holding: Holding) -> Any:
    return [
        None if share is None else [None if axis is None else list(map(list, axis.pairs())) for axis in share]
        for share in holding
    ]


def holding_from_json(described: Any) -> Holding:
    return tuple(
        None
        if share is None
        else tuple(None if axis is None else Indices.of((a, b) for a, b in axis) for axis in share)
        for share in described
    )


def _wrong(subject: str, expected: str, got: str) -> ConfigError:
    return ConfigError(
        subject=subject, expected=expected, got=got, remedy="Change the plan, or let it be made."
    )
