"""One model as a run cuts it: its training graph, a plan, and how many microbatches a minibatch is computed in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from squall.model.captured import Captured
from squall.model.graph import Ref, Source
from squall.model.objective import Objective
from squall.model.parameters import ParameterSpace, TensorSpec
from squall.model.parts import Part
from squall.partition.agenda import Policy, policy_for
from squall.partition.compiler import program_of
from squall.partition.model_plan import Plan as NamedPlan
from squall.partition.plan import Plan
from squall.partition.predict import links_of
from squall.partition.program import FED, Program
from squall.partition.regions import AnyRegion, Region

PREFIX = "model."


class WithLoss(nn.Module):
    """A model and its loss as one module, which is what is captured and cut: a batch in, its mean loss out."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Any) -> Tensor:
        return self.objective.mean(self.model, batch)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """How a replica's model is computed by several workers.

    Attributes:
        captured: of a `WithLoss`; its first output is the loss.
        plan: who owns what.
        microbatches: in how many parts a minibatch is computed, where its size allows it.
    """

    captured: Captured
    plan: Plan
    microbatches: int = 1
    _programs: dict[int, Program] = field(default_factory=dict, init=False, repr=False)

    @property
    def partitions(self) -> int:
        return self.plan.partitions

    @property
    def loss(self) -> int:
        """The value that is differentiated."""
        first = self.captured.graph.outputs[0]
        assert isinstance(first, Ref)
        return first.index

    @property
    def policy(self) -> Policy:
        return policy_for(self.partitions, self.microbatches)

    def named(self) -> NamedPlan:
        """The plan by names, for the model without its loss and in any mode."""
        return NamedPlan.of(self.captured.graph, self.plan, how="as trained", prefix=PREFIX)

    def count(self, examples: int) -> int:
        """In how many microbatches a minibatch of so many examples is computed: they are of one size.

        >>> [Cut(captured=None, plan=None, microbatches=4).count(examples) for examples in (64, 63, 61)]
        [4, 3, 1]
        """
        return next(count for count in range(self.microbatches, 0, -1) if examples % count == 0)

    def program(self, examples: int) -> Program:
        """What every partition does for one of the microbatches of so many examples; made once."""
        if examples not in self._programs:
            size = examples // self.count(examples)
            self._programs[examples] = program_of(self.captured.graph, self.plan, size, self.loss)
        return self._programs[examples]

    def links(self, examples: int) -> dict[tuple[int, int], int]:
        """(sender, receiver) -> bytes that travel between partitions for a minibatch of so many examples."""
        return links_of(self.program(examples), self.count(examples))

    def name_of(self, value: int) -> str:
        """The name in the user's model of a parameter or buffer of the graph."""
        return self.captured.graph.values[value].name.removeprefix(PREFIX)

    def space(self, whole: ParameterSpace) -> ParameterSpace:
        """The parameters of a model, each in the parts that partitions own; what the graph does not read is the first's."""
        parts: list[TensorSpec] = []
        values = self.values_by_name()
        for tensor in whole.tensors:
            value = next((values[n] for n in (tensor.name, *tensor.aliases) if n in values), None)
            parts += [_spec_of(tensor, 0, None)] if value is None else self._parts(tensor, value)
        return ParameterSpace(tensors=tuple(sorted(parts, key=lambda part: (part.partition, part.name))))

    def values_by_name(self) -> Mapping[str, int]:
        """Parameters of the graph, by every name that they have in the user's model."""
        found: dict[str, int] = {}
        for index in self.captured.graph.from_outside(Source.PARAMETER):
            value = self.captured.graph.values[index]
            found |= {name.removeprefix(PREFIX): index for name in (value.name, *value.aliases)}
        return found

    def _parts(self, tensor: TensorSpec, value: int) -> list[TensorSpec]:
        regions = self.plan.regions(value, tensor.shape)
        owned = [
            _spec_of(tensor, partition, region)
            for partition, region in enumerate(regions)
            if not region.is_empty
        ]
        return owned or [_spec_of(tensor, 0, None)]

    def reads_inputs(self, program: Program, partition: int) -> bool:
        """Whether a partition is handed any of a minibatch."""
        holds = program.parts[partition].holds
        return any(
            held.sender in (FED, partition)
            for value in self.captured.graph.from_outside(Source.INPUT)
            for held in holds.get(value, ())
        )


def part_of(region: AnyRegion) -> Part:
    """What a partition owns of a parameter or buffer, as a noun of the model."""
    assert isinstance(region, Region), "plans own products of index sets"
    return Part(whole=region.shape, axes=tuple(tuple(axis.pairs()) for axis in region.axes))


def _spec_of(tensor: TensorSpec, partition: int, region: AnyRegion | None) -> TensorSpec:
    is_whole = region is None or region.is_whole
    part = None if is_whole or region is None else part_of(region)
    shape = tensor.shape if part is None else part.shape
    return TensorSpec(
        name=tensor.name,
        aliases=tensor.aliases,
        shape=shape,
        dtype=tensor.dtype,
        partition=partition,
        part=part,
    )
