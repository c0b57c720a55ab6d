"""A graph, or a part of one, as one Python function: a call after another, without an interpreter.

The function's source is written here, from a graph that this process captured, and compiled once; nothing that came
over a wire or out of a file gets in: names are our own, constants other than plain numbers and strings are bound as
objects. A value is let go of after its last use, as in the model's own forward.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from squall.model.graph import Extent, Graph, Named, Node, Ref, refs_in
from squall.model.opaque import TARGET, OpaqueCall

Straight = Callable[[int, Sequence[Tensor]], tuple[Any, ...]]
"""``run(batch, values) -> outputs``: the batch size, and tensors in the order of the inputs compiled for."""


def compile_straight(
    graph: Graph,
    *,
    nodes: Sequence[int] | None = None,
    inputs: Sequence[int] | None = None,
    outputs: Sequence[Any] | None = None,
    opaques: Mapping[str, OpaqueCall] | None = None,
    model: nn.Module | None = None,
) -> Straight:
    """Compile consecutive nodes of a graph; all of them if not told otherwise.

    Args:
        nodes: indices in `graph.nodes`, in order.
        inputs: indices of the values given; all that no node makes by default.
        outputs: what to return: `Ref`, `Extent` or constants; by default the graph's outputs and then the new
            values of its mutations.
        opaques, model: the opaque calls by key, and the module that has them; needed if there are any.

    >>> from squall.model.graph import Source, Value
    >>> x, y = (Value(name=n, source=s, shape=(Extent(), 2), dtype="float32")
    ...         for n, s in (("x", Source.INPUT), ("y", Source.NODE)))
    >>> double = Node(target="aten.mul.Tensor", args=(Ref(0), 2), outputs=(1,), name="y")
    >>> run = compile_straight(Graph(values=(x, y), nodes=(double,), outputs=(Ref(1), Extent(("mul", 3, "batch")))))
    >>> run(1, [torch.ones(1, 2)])
    (tensor([[2., 2.]]), 3)
    """
    if outputs is None:
        outputs = (*graph.outputs, *(Ref(index) for _, index in graph.mutations))
    writer = _Writer(opaques or {}, model)
    source = writer.source(
        [graph.nodes[at] for at in (range(len(graph.nodes)) if nodes is None else nodes)],
        graph.from_outside() if inputs is None else inputs,
        tuple(outputs),
    )
    made: dict[str, Any] = dict(writer.bound)
    exec(compile(source, "<straight-line graph>", "exec"), made)
    run: Straight = made["run"]
    return run


class _Writer:
    """Writes the source and collects the objects that it names."""

    def __init__(self, opaques: Mapping[str, OpaqueCall], model: nn.Module | None) -> None:
        self._opaques = opaques
        self._model = model
        self.bound: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def source(self, nodes: Sequence[Node], inputs: Sequence[int], outputs: tuple[Any, ...]) -> str:
        last = _last_uses(nodes, {ref.index for ref in refs_in(outputs)})
        lines = []
        if inputs:
            lines.append(f"{''.join(f'v{index}, ' for index in inputs)} = values")
            unused = [index for index in inputs if index not in last]
            lines += _deletion(index for index in unused if Ref(index) not in outputs)
        for at, node in enumerate(nodes):
            lines.append(self._call(node))
            dead = [index for index in (*node.inputs, *filter(None, node.outputs)) if last.get(index) == at]
            lines += _deletion(dict.fromkeys(dead))
        lines.append(f"return {self._argument(outputs)}")
        # Bound as defaults: locals are found faster than globals.
        bound = "".join(f", {name}={name}" for name in self.bound)
        return "\n    ".join([f"def run(batch, values{bound}):", *lines]) + "\n"

    def _call(self, node: Node) -> str:
        arguments = [self._argument(argument) for argument in node.args]
        arguments += [f"{key}={self._argument(argument)}" for key, argument in node.kwargs.items()]
        call = f"{self._function(node)}({', '.join(arguments)})"
        if node.outputs == (None,) or not node.outputs:
            return call
        if len(node.outputs) == 1 and not _returns_list(node):
            return f"v{node.outputs[0]} = {call}"
        return f"{''.join('_, ' if at is None else f'v{at}, ' for at in node.outputs)} = {call}"

    def _function(self, node: Node) -> str:
        if node.target == BATCH_NORM:
            return self._bind(node.target, lambda: _batch_norm)
        if node.target != TARGET:
            return self._bind(node.target, lambda: op_of(node.target)._op)
        call = self._opaques[node.args[0]]
        assert self._model is not None
        module = self._model.get_submodule(call.module)
        return self._bind(call.key, lambda: call.bind(module))

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, tuple):
            return f"({''.join(f'{self._argument(part)}, ' for part in argument)})"
        if isinstance(argument, Ref):
            return f"v{argument.index}"
        if isinstance(argument, Extent):
            return f"({argument})"
        if argument is None or isinstance(argument, bool | int | str):
            return repr(argument)
        if isinstance(argument, float) and math.isfinite(argument):
            return repr(argument)
        if isinstance(argument, Named):
            return self._bind(argument, lambda: torch_thing(argument))
        return self._bind((type(argument), repr(argument)), lambda: argument)

    def _bind(self, key: Any, make: Callable[[], Any]) -> str:
        if key not in self._names:
            self._names[key] = f"c{len(self._names)}"
            self.bound[self._names[key]] = make()
        return self._names[key]


BATCH_NORM = "aten._native_batch_norm_legit_functional.default"


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, None, None, Tensor, Tensor]:
    """The pure batch norm by the op that eager code calls, so that it is the same to the bit on every device.

    The op of that name would also keep the old statistics for backward, which does not need them; whoever writes the
    new ones into the buffer would then be told off by autograd.
    """
    mean, variance = mean.clone(), variance.clone()
    output = torch.batch_norm(
        input, weight, bias, mean, variance, training, momentum, eps, torch.backends.cudnn.enabled
    )
    return output, None, None, mean, variance


def op_of(target: str) -> Any:
    """The op of torch of that name, as in ``"aten.relu.default"``."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def torch_thing(named: Named) -> Any:
    """The dtype, layout, memory format or device of that name."""
    return torch.device(named.name) if named.kind == "device" else getattr(torch, named.name)


def _returns_list(node: Node) -> bool:
    if node.target == TARGET:
        return True
    returns = op_of(node.target)._schema.returns
    return len(returns) != 1 or "[]" in str(returns[0].type)


def _last_uses(nodes: Sequence[Node], kept: set[int]) -> dict[int, int]:
    """Of each value that is not kept, the position of the node after which it can go."""
    last: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for index in (*node.outputs, *node.inputs):
            if index is not None and index not in kept:
                last[index] = at
    return last


def _deletion(indices: Any) -> Iterator[str]:
    names = [f"v{index}" for index in indices]
    if names:
        yield f"del {', '.join(names)}"
