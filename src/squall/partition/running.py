"""One piece as a function of tensors: ops of whole nodes compiled in a row, cut ones by their rules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from squall.model.graph import Ref
from squall.model.opaque import OpaqueCall
from squall.model.straight import compile_straight
from squall.partition.masks import Draw
from squall.partition.pieces import Assembly, Frame
from squall.partition.program import Cut, FusedPiece, Held, Merge, Part, Program, Share, Task, Whole
from squall.partition.regions import AnyRegion, Region
from squall.partition.rules import prepare, prepare_stage
from squall.partition.stages import Combine

Slots = dict[int, list[Tensor | None]]
"""Value -> the tensors of `Part.holds`, None for those that are not here yet."""
_Place = tuple[int, int]
_Step = Callable[[Mapping[_Place, Tensor], Draw, int], Sequence[Tensor]]


class Runner:
    """A piece, made ready once for all its microbatches.

    Args:
        opaques, model: the opaque calls, and a module that has those of this piece.
    """

    def __init__(
        self,
        program: Program,
        part: Part,
        piece: FusedPiece,
        opaques: Mapping[str, OpaqueCall],
        model: nn.Module | None,
    ) -> None:
        self._program, self._part, self._piece = program, part, piece
        self._opaques, self._model = opaques, model
        self._leaves = [(value, at) for value in piece.reads for at in range(len(part.holds[value]))]
        self._flows = {value for value in piece.reads if program.data[value].has_gradient}
        self._steps = [(self._step(tasks), self._made(tasks)) for tasks in _grouped(piece.tasks)]

    def forward(
        self, slots: Slots, draw: Draw, batch: int, trains: bool
    ) -> tuple[list[Tensor], list[_Place], dict[int, Tensor]]:
        """Run it.

        Returns:
            What was read and gets a gradient, as leaves; which places these are; and every value made.
        """
        env: dict[_Place, Tensor] = {}
        leaves: list[Tensor] = []
        names: list[_Place] = []
        for value, at in self._leaves:
            tensor = slots[value][at]
            assert tensor is not None
            if trains and self._piece.has_backward and value in self._flows:
                tensor = tensor.detach().requires_grad_()
                leaves.append(tensor)
                names.append((value, at))
            env[value, at] = tensor
        made: dict[int, Tensor] = {}
        with nullcontext() if trains else torch.no_grad():
            for step, values in self._steps:
                for value, tensor in zip(values, step(env, draw, batch), strict=True):
                    made[value] = tensor
                    if value not in self._piece.reads:
                        env[value, 0] = tensor
        return leaves, names, made

    def _made(self, tasks: Sequence[Task]) -> list[int]:
        if not isinstance(tasks[0].work, Whole):
            return list(tasks[0].makes)
        inside = {value for task in tasks for value in task.makes}
        later = {value for task in self._piece.tasks if task not in tasks for value, _ in task.reads}
        return [value for value in inside if value in later or value in self._piece.gives]

    def _step(self, tasks: Sequence[Task]) -> _Step:
        work = tasks[0].work
        if isinstance(work, Whole):
            return self._whole(tasks)
        if isinstance(work, Cut):
            return self._cut(tasks[0], work)
        if isinstance(work, Share):
            return self._share(tasks[0], work)
        return self._merge(tasks[0], work)

    def _places(self, value: int, region: AnyRegion) -> tuple[list[_Place], list[AnyRegion]]:
        """Which held parts make up a region of a value."""
        parts = [
            (at, held.region)
            for at, held in enumerate(self._held(value))
            if not (held.region & region).is_empty
        ]
        return [(value, at) for at, _ in parts], [each for _, each in parts]

    def _held(self, value: int) -> Sequence[Held]:
        return self._part.holds.get(value, ())

    def _dtype(self, value: int) -> torch.dtype:
        found: torch.dtype = getattr(torch, self._program.data[value].dtype)
        return found

    def _whole(self, tasks: Sequence[Task]) -> _Step:
        inside = {value for task in tasks for value in task.makes}
        inputs = list(dict.fromkeys(v for task in tasks for v, _ in task.reads if v not in inside))
        places, makes = [], []
        for value in inputs:
            region = Region.whole(self._program.data[value].shape)
            found, held = self._places(value, region)
            places.append(found)
            makes.append(Assembly(Frame.bare(region), region, held, self._dtype(value)))
        run = compile_straight(
            self._program.graph,
            nodes=[task.node for task in tasks],
            inputs=inputs,
            outputs=[Ref(value) for value in self._made(tasks)],
            opaques=self._opaques,
            model=self._model,
        )

        def step(env: Mapping[_Place, Tensor], draw: Draw, batch: int) -> Sequence[Tensor]:
            given = [make([env[at] for at in found]) for make, found in zip(makes, places, strict=True)]
            return run(batch, given)

        return step

    def _cut(self, task: Task, work: Cut) -> _Step:
        found = [self._places(value, region) for value, region in task.reads]
        places, run = [each for each, _ in found], prepare(work.call, work.out, [held for _, held in found])
        return lambda env, draw, batch: [run([[env[at] for at in each] for each in places], draw)]

    def _share(self, task: Task, work: Share) -> _Step:
        found = [self._places(value, region) for value, region in task.reads]
        count = len(work.call.inputs)
        earlier = task.reads[count:]
        dtype = self._dtype(earlier[0][0]) if earlier else torch.float32
        places, held = [each for each, _ in found], [each for _, each in found]
        run = prepare_stage(work.call, work.stage, work.share, held[:count], held[count:], dtype)

        def step(env: Mapping[_Place, Tensor], draw: Draw, batch: int) -> Sequence[Tensor]:
            tensors = [[env[at] for at in each] for each in places]
            return [run(tensors[:count], tensors[count:])]

        return step

    def _merge(self, task: Task, work: Merge) -> _Step:
        fill = float("-inf") if work.combine is Combine.MAX else 0.0
        bare = Frame.bare(work.out)
        frame = Frame(bare.region, bare.before, bare.after, fill)
        parts = []
        for value, region in task.reads:
            places, held = self._places(value, region)
            parts.append((places, Assembly(frame, region, held, self._dtype(value))))

        def step(env: Mapping[_Place, Tensor], draw: Draw, batch: int) -> Sequence[Tensor]:
            total = None
            for places, make in parts:
                mine = make([env[at] for at in places])
                if total is None:
                    total = mine
                else:
                    total = torch.maximum(total, mine) if work.combine is Combine.MAX else total + mine
            assert total is not None
            return [total]

        return step


def _grouped(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Runs of whole nodes, and other tasks one by one."""
    run: list[Task] = []
    for task in tasks:
        if isinstance(task.work, Whole):
            run.append(task)
            continue
        if run:
            yield run
            run = []
        yield [task]
    if run:
        yield run
