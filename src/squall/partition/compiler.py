"""From a graph and a plan to a `Program`: tasks node by node, then what travels, then pieces."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from squall.errors import ConfigError
from squall.model.graph import Graph, Source, refs_in
from squall.partition.call import Call
from squall.partition.calls import Bound, bound
from squall.partition.plan import Plan, StageCut, regions_of
from squall.partition.program import (
    FED,
    Cut,
    Datum,
    FusedPiece,
    Held,
    Merge,
    Part,
    Program,
    Share,
    Task,
    Whole,
    Work,
)
from squall.partition.regions import AnyRegion, Region, nothing
from squall.partition.rules import is_opaque, needs, stages
from squall.partition.stages import Combine, Stage, Stages
from squall.partition.traffic import Transfers, transfers, united

_LASTING = (Source.PARAMETER, Source.BUFFER)
_MASKED = ("dropout", "feature_dropout", "scaled_dot_product_attention")


def program_of(graph: Graph, plan: Plan, batch: int, loss: int | None = None) -> Program:
    """What each partition does with a batch of so many examples.

    Args:
        plan: checked against this graph.
        loss: the value to differentiate, a number; None for a forward pass alone.

    Raises:
        ConfigError: the loss is no single number.
    """
    if loss is not None and graph.values[loss].shape_at(batch) != ():
        raise ConfigError(
            subject=f"loss {graph.values[loss].name!r}",
            expected="a single number",
            got=f"shape {graph.values[loss].shape_at(batch)}",
            remedy="Sum it or take the mean.",
        )
    lowering = _Lowering(graph, plan, batch, loss)
    for at in range(len(graph.nodes)):
        lowering.lower(at)
    return lowering.program()


class _Lowering:
    """Tasks and data, as they are made."""

    def __init__(self, graph: Graph, plan: Plan, batch: int, loss: int | None) -> None:
        self._graph, self._plan, self._batch, self._loss = graph, plan, batch, loss
        self._reached = _reaching(graph, loss)
        self.data = [self._datum(index) for index in range(len(graph.values))]
        self.tasks: list[Task] = []

    def _datum(self, index: int) -> Datum:
        value, shape = self._graph.values[index], self._graph.values[index].shape_at(self._batch)
        return Datum(
            name=value.name,
            shape=shape,
            dtype=value.dtype,
            owners=self._plan.regions(index, shape),
            lasts=value.source in _LASTING or (value.source is Source.CONSTANT),
            has_gradient=value.requires_grad and index in self._reached,
        )

    def lower(self, at: int) -> None:
        here = bound(self._graph, at, self._batch)
        if at in self._plan.staged:
            self._lower_stages(at, here, self._plan.staged[at])
            return
        owner = self._whole_owner(here)
        if owner is not None:
            self._add(
                owner, at, Whole(node=at), self._whole_reads(here), [i for i in here.outputs if i is not None]
            )
            return
        for k, index in enumerate(here.outputs):
            for p, out in enumerate(self.data[index].owners if index is not None else ()):
                if not out.is_empty:
                    call = here.call.picking(k)
                    self._add(
                        p,
                        at,
                        Cut(call=call, out=out),
                        zip(here.values, needs(call, out), strict=True),
                        [index],
                    )

    def _add(
        self,
        partition: int,
        at: int,
        work: Work,
        reads: Iterable[tuple[int, AnyRegion]],
        makes: Sequence[int | None],
    ) -> None:
        self.tasks.append(
            Task(
                partition=partition,
                node=at,
                work=work,
                reads=tuple(reads),
                makes=tuple(index for index in makes if index is not None),
            )
        )

    def _whole_owner(self, here: Bound) -> int | None:
        """The partition that can run the node as it is, without receiving more than the rule says it needs."""
        made = [index for index in here.outputs if index is not None]
        for p in range(self._plan.partitions):
            if not all(self.data[index].owners[p].is_whole for index in made):
                continue
            if any(
                is_opaque(here.call.picking(k)) for k, index in enumerate(here.outputs) if index is not None
            ):
                return p
            if here.call.name in _MASKED:  # its mask is ours, which does not depend on the cut
                return None
            if all(self._is_near(value, need, p) for value, need in self._all_needs(here)):
                return p
        return None

    def _is_near(self, value: int, need: AnyRegion, partition: int) -> bool:
        return need.is_whole or self.data[value].owners[partition].is_whole

    def _all_needs(self, here: Bound) -> Iterator[tuple[int, AnyRegion]]:
        """For each input, the largest that some output needs of it."""
        calls = [here.call.picking(k) for k, index in enumerate(here.outputs) if index is not None]
        all_needs = [needs(call, Region.whole(call.shape)) for call in calls]
        for at, value in enumerate(here.values):
            yield value, max((each[at] for each in all_needs), key=lambda need: need.size)

    def _whole_reads(self, here: Bound) -> list[tuple[int, AnyRegion]]:
        return [(value, Region.whole(self.data[value].shape)) for value in dict.fromkeys(here.values)]

    # An op in stages.

    def _lower_stages(self, at: int, here: Bound, cuts: tuple[StageCut, ...]) -> None:
        made = [(k, index) for k, index in enumerate(here.outputs) if index is not None]
        plans = [_stages(here.call.picking(k)) for k, _ in made]
        flows = any(self.data[index].has_gradient for _, index in made)
        combined: list[int] = []
        for stage, cut in zip(plans[0].stages[:-1], cuts, strict=True):
            combined.append(self._combine(at, here, stage, cut, combined, flows))
        for (k, index), plan in zip(made, plans, strict=True):
            for p, out in enumerate(self.data[index].owners):
                if not out.is_empty:
                    self._share(
                        p, at, here, here.call.picking(k), plan.stages[-1], out.bounding(), combined, index
                    )

    def _combine(
        self, at: int, here: Bound, stage: Stage, cut: StageCut, earlier: Sequence[int], flows: bool
    ) -> int:
        """Contributions of each partition to one stage, and what they add up to; returns the latter's number."""
        assert stage.combine is not None
        flows = flows and stage.combine is Combine.ADD
        given: list[tuple[int, AnyRegion]] = []
        for p, share in enumerate(regions_of(cut.shares, stage.space)):
            boxes = share.boxes(stage.windows) if isinstance(share, Region) else []
            for box in boxes:
                if box.is_empty:
                    continue
                region = stage.gives(box)
                owners = [nothing(stage.shape)] * self._plan.partitions
                owners[p] = region
                value = self._new(at, "part", stage, tuple(owners), flows)
                self._share(p, at, here, here.call, stage, box, earlier, value)
                given.append((value, region))
        total = self._new(at, "sum", stage, regions_of(cut.combined, stage.shape), flows)
        for p, out in enumerate(self.data[total].owners):
            if not out.is_empty:
                reads = [(value, region & out) for value, region in given]
                reads = [(value, region) for value, region in reads if not region.is_empty]
                self._add(p, at, Merge(out=out, combine=stage.combine), reads, [total])
        return total

    def _share(
        self,
        p: int,
        at: int,
        here: Bound,
        call: Call,
        stage: Stage,
        share: Region,
        earlier: Sequence[int],
        value: int,
    ) -> None:
        reads = [
            *zip(here.values, stage.needs(share), strict=True),
            *zip(earlier, stage.reads(share), strict=False),
        ]
        self._add(p, at, Share(call=call, stage=stage, share=share), reads, [value])

    def _new(self, at: int, what: str, stage: Stage, owners: tuple[AnyRegion, ...], flows: bool) -> int:
        node = self._graph.nodes[at]
        dtype = stage.dtype or self._graph.values[next(i for i in node.outputs if i is not None)].dtype
        name = f"{node.name}.{what}{len(self.data)}"
        self.data.append(Datum(name=name, shape=stage.shape, dtype=dtype, owners=owners, has_gradient=flows))
        return len(self.data) - 1

    # What travels, and pieces.

    def program(self) -> Program:
        wanted = self._wanted()
        sent: dict[int, Transfers] = {}
        for value, needed in wanted.items():
            if not self._is_fed(value) and (travels := transfers(self.data[value].owners, needed)):
                sent[value] = travels
        parts = [self._part(p, wanted, sent) for p in range(self._plan.partitions)]
        parts = [replace(part, expects=_expected(part, parts)) for part in parts]
        return Program(
            graph=self._graph,
            plan=self._plan,
            batch=self._batch,
            data=tuple(self.data),
            parts=tuple(parts),
            sent=sent,
            loss=self._loss,
            results=self._results(),
        )

    def _results(self) -> frozenset[int]:
        found = {ref.index for ref in refs_in(self._graph.outputs)} | {
            value for _, value in moved(self._graph)
        }
        return frozenset(found if self._loss is None else found | {self._loss})

    def _is_fed(self, value: int) -> bool:
        return value < len(self._graph.values) and self._plan.is_everywhere(value)

    def _wanted(self) -> dict[int, list[list[AnyRegion]]]:
        """Value -> for each partition, what it reads of it: its tasks, and the owners of buffers that are moved."""
        wanted: dict[int, list[list[AnyRegion]]] = defaultdict(
            lambda: [[] for _ in range(self._plan.partitions)]
        )
        for task in self.tasks:
            for value, region in task.reads:
                if not region.is_empty:
                    wanted[value][task.partition].append(region)
        for buffer, value in moved(self._graph):
            for p, region in enumerate(self.data[buffer].owners):
                if not region.is_empty:
                    wanted[value][p].append(region)
        return wanted

    def _part(
        self, p: int, wanted: Mapping[int, list[list[AnyRegion]]], sent: Mapping[int, Transfers]
    ) -> Part:
        tasks = [task for task in self.tasks if task.partition == p]
        holds: dict[int, tuple[Held, ...]] = {}
        for value, datum in enumerate(self.data):
            if self._is_fed(value):
                regions = united(wanted[value][p]) if value in wanted else ()
                held = [Held(region=region, sender=FED) for region in regions]
            else:
                own = datum.owners[p]
                held = [] if own.is_empty else [Held(region=own, sender=p)]
                for (sender, receiver), regions in sorted(
                    sent.get(value, {}).items(), key=lambda item: item[0]
                ):
                    if receiver == p:
                        held += [Held(region=region, sender=sender) for region in regions]
            if held:
                holds[value] = tuple(held)
        sends: dict[int, dict[int, tuple[AnyRegion, ...]]] = {}
        for value, links in sent.items():
            for (sender, receiver), regions in links.items():
                if sender == p:
                    sends.setdefault(value, {})[receiver] = regions
        return Part(
            partition=p,
            data=tuple(self.data),
            pieces=tuple(self._pieces(tasks, holds, sends, p)),
            holds=holds,
            sends=sends,
            returns=self._returns(tasks, holds, p),
            expects={},
        )

    def _returns(
        self, tasks: Sequence[Task], holds: Mapping[int, tuple[Held, ...]], p: int
    ) -> frozenset[tuple[int, int]]:
        flowing = {
            value
            for task in tasks
            if any(self.data[made].has_gradient for made in task.makes)
            for value, region in task.reads
            if self.data[value].has_gradient and not region.is_empty
        }
        return frozenset(
            (value, held.sender)
            for value in flowing
            for held in holds.get(value, ())
            if held.sender not in (p, FED)
        )

    def _pieces(
        self,
        tasks: Sequence[Task],
        holds: Mapping[int, tuple[Held, ...]],
        sends: Mapping[int, Mapping[int, object]],
        p: int,
    ) -> Iterator[FusedPiece]:
        runs = _runs(
            tasks,
            {value for value, held in holds.items() if any(each.sender not in (p, FED) for each in held)},
            set(sends),
        )
        kept = self._results()
        read_by: dict[int, set[int]] = defaultdict(set)
        for number, run in enumerate(runs):
            for task in run:
                for value, region in task.reads:
                    if not region.is_empty:
                        read_by[value].add(number)
        for number, run in enumerate(runs):
            made = [value for task in run for value in task.makes]
            gives = tuple(v for v in made if v in kept or v in sends or read_by[v] - {number})
            # A value of which others own a part as well is made here and read as received: both.
            inside = {v for v in made if all(held.sender == p for held in holds[v])}
            reads = dict.fromkeys(
                value
                for task in run
                for value, region in task.reads
                if value not in inside and not region.is_empty
            )
            flows = any(self.data[value].has_gradient for value in made)
            yield FusedPiece(tasks=tuple(run), reads=tuple(reads), gives=gives, has_backward=flows)


def _runs(tasks: Sequence[Task], received: set[int], sent: set[int]) -> list[list[Task]]:
    """Consecutive tasks; a new run at the first reader of something received, and after each value that is sent."""
    runs: list[list[Task]] = []
    seen: set[int] = set()
    is_closed = True
    for task in tasks:
        fresh = {value for value, region in task.reads if value in received and not region.is_empty} - seen
        if is_closed or fresh:
            runs.append([])
        seen |= fresh
        runs[-1].append(task)
        is_closed = bool(sent.intersection(task.makes))
    return runs


def _expected(part: Part, parts: Sequence[Part]) -> dict[int, tuple[int, ...]]:
    """Which receivers of this partition's values send a gradient back."""
    found = {}
    for value, links in part.sends.items():
        receivers = tuple(r for r in sorted(links) if (value, part.partition) in parts[r].returns)
        if receivers:
            found[value] = receivers
    return found


def _stages(call: Call) -> Stages:
    found = stages(call)
    assert found is not None
    return found


def _reaching(graph: Graph, loss: int | None) -> set[int]:
    """The values from which the loss's gradient comes back, through values that have one themselves."""
    found = set() if loss is None else {loss}
    for node in reversed(graph.nodes):
        made = found.intersection(index for index in node.outputs if index is not None)
        if any(graph.values[index].requires_grad for index in made):
            found.update(node.inputs)
    return found


def moved(graph: Graph) -> list[tuple[int, int]]:
    """(buffer, its value after the call), as numbers of values."""
    names = {
        name: index
        for index in graph.from_outside(Source.BUFFER)
        for name in (graph.values[index].name, *graph.values[index].aliases)
    }
    return [(names[name], value) for name, value in graph.mutations]
