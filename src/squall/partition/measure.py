"""How long each op of a captured model takes here, forward and backward, one at a time on the example."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from squall.model.captured import Captured
from squall.model.graph import Graph, Ref, Source
from squall.model.straight import compile_straight
from squall.partition.calls import bound
from squall.partition.cost import OpTime
from squall.partition.planner import cost_of

GUESSED_RATE = 2e10
"""Multiplications a second, and elements of memory-bound ops in a tenth of that, where nothing can be run."""
COMPUTE = ("conv", "linear", "matmul", "mm", "bmm", "addmm", "locally_connected", "scaled_dot_product")
"""Beginnings of the names of ops that are bound by arithmetic; all others are bound by memory."""


def measure(
    captured: Captured, model: nn.Module, tensors: Sequence[Tensor], *, rounds: int = 3
) -> tuple[OpTime, ...]:
    """Run the graph node by node on one thread, each forward and backward; the quickest of some rounds.

    Args:
        tensors: an example, in the order of the graph's inputs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _quickest(captured, model, tensors, rounds)
    finally:
        torch.set_num_threads(threads)


def _quickest(
    captured: Captured, model: nn.Module, tensors: Sequence[Tensor], rounds: int
) -> tuple[OpTime, ...]:
    found: list[OpTime] | None = None
    for _ in range(rounds + 1):  # the first one warms up
        times = _Measured(captured, model, tensors).times()
        if found is None:
            found = [OpTime(forward_s=9e9, backward_s=9e9, is_compute=each.is_compute) for each in times]
            continue
        found = [
            OpTime(
                forward_s=min(a.forward_s, b.forward_s),
                backward_s=min(a.backward_s, b.backward_s),
                is_compute=a.is_compute,
            )
            for a, b in zip(found, times, strict=True)
        ]
    return tuple(found or ())


def guess(graph: Graph, batch: int) -> tuple[OpTime, ...]:
    """The same from shapes alone, for a model that cannot be run here: backward as twice forward."""
    found = []
    for at in range(len(graph.nodes)):
        call = bound(graph, at, batch).call
        seconds = cost_of(call) / GUESSED_RATE * (1 if _is_compute(call.name) else 10)
        found.append(OpTime(forward_s=seconds, backward_s=2 * seconds, is_compute=_is_compute(call.name)))
    return tuple(found)


def _is_compute(name: str) -> bool:
    return name.startswith(COMPUTE)


class _Measured:
    """One pass over the graph."""

    def __init__(self, captured: Captured, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        self._captured, self._model, self._graph = captured, model, captured.graph
        self._batch = captured.batch(tensors)
        self._env = {
            **self._state(),
            **dict(zip(self._graph.from_outside(Source.INPUT), tensors, strict=True)),
        }

    def _state(self) -> Mapping[int, Tensor]:
        values, found = self._graph.values, {}
        for index in self._graph.from_outside(Source.PARAMETER):
            found[index] = self._model.get_parameter(values[index].name).detach()
        for index in self._graph.from_outside(Source.BUFFER):
            found[index] = self._model.get_buffer(values[index].name).detach().clone()
        for index in self._graph.from_outside(Source.CONSTANT):
            found[index] = self._captured.constants[values[index].name]
        return found

    def times(self) -> list[OpTime]:
        users, found = self._graph.users, []
        for at, node in enumerate(self._graph.nodes):
            found.append(self._one(at))
            for index in node.inputs:
                if users[index][-1] == at:
                    self._env.pop(index, None)
        return found

    def _one(self, at: int) -> OpTime:
        node, values = self._graph.nodes[at], self._graph.values
        made = [index for index in node.outputs if index is not None]
        run = compile_straight(
            self._graph,
            nodes=[at],
            inputs=node.inputs,
            outputs=[Ref(index) for index in made],
            opaques=self._captured.opaques,
            model=self._model,
        )
        leaves = [self._env[index].requires_grad_(values[index].requires_grad) for index in node.inputs]
        start = time.perf_counter()
        results = run(self._batch, leaves)
        middle = time.perf_counter()
        outputs = [each for each in results if each.requires_grad]
        wanted = [each for each in leaves if each.requires_grad]
        seeds = [torch.ones_like(each) for each in outputs]
        begin = time.perf_counter()
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        end = time.perf_counter()
        for index, each in zip(made, results, strict=True):
            self._env[index] = each.detach()
        return OpTime(
            forward_s=middle - start,
            backward_s=end - begin,
            is_compute=_is_compute(node.target.split(".")[1]),
        )
