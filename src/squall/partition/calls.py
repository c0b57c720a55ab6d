"""From a captured graph to the calls that rules know: sizes as numbers, each tensor argument with an input of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from squall.model.graph import BATCH, Extent, Graph, Named, Value, concrete
from squall.model.graph import Ref as ValueRef
from squall.model.straight import torch_thing
from squall.partition.call import Call, Ref, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A node's call at one batch size, and the values that its inputs are.

    Attributes:
        call: of the node's first output; ``call.picking(at)`` is another one.
        values: for each input of the call, its index in `Graph.values`.
        outputs: for each output of the call, its index there; None for one that is no tensor or that nobody reads.
    """

    call: Call
    values: tuple[int, ...]
    outputs: tuple[int | None, ...]


def bound(graph: Graph, at: int, batch: int) -> Bound:
    """The call of node number `at`, for a batch of so many examples.

    >>> from squall.model.graph import Extent, Node, Source, Value
    >>> x, y = (Value(name=name, source=source, shape=(Extent(), 2), dtype="float32")
    ...         for name, source in (("x", Source.INPUT), ("y", Source.NODE)))
    >>> node = Node(target="aten.mul.Tensor", args=(ValueRef(0), ValueRef(0)), outputs=(1,), name="y")
    >>> square = bound(Graph(values=(x, y), nodes=(node,), outputs=(ValueRef(1),)), 0, batch=3)
    >>> square.call.args, square.call.inputs[1].shape, square.values
    ((Ref(index=0), Ref(index=1)), (3, 2), (0, 0))
    """
    node = graph.nodes[at]
    values: list[int] = []

    def placed(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return [placed(part) for part in argument]
        if isinstance(argument, Mapping):
            return {key: placed(part) for key, part in argument.items()}
        if isinstance(argument, ValueRef):
            values.append(argument.index)
            return Ref(len(values) - 1)
        return torch_thing(argument) if isinstance(argument, Named) else concrete(argument, batch)

    args = tuple(placed(argument) for argument in node.args)
    kwargs = {key: placed(argument) for key, argument in node.kwargs.items()}
    call = Call(
        target=node.target,
        args=args,
        kwargs=kwargs,
        inputs=tuple(
            TensorSpec(graph.values[index].shape_at(batch), graph.values[index].dtype) for index in values
        ),
        outputs=tuple(() if index is None else graph.values[index].shape_at(batch) for index in node.outputs),
        examples=tuple(
            None if index is None else example_axis(graph.values[index]) for index in node.outputs
        ),
        output=next((at for at, index in enumerate(node.outputs) if index is not None), 0),
        site=at,
    )
    return Bound(call=call, values=tuple(values), outputs=node.outputs)


def example_axis(value: Value) -> int | None:
    """The axis of a value that counts examples and nothing else, if it is the only one that follows the batch.

    >>> from squall.model.graph import Source
    >>> example_axis(Value(name="x", source=Source.INPUT, shape=(3, Extent()), dtype="float32"))
    1
    >>> example_axis(Value(name="x", source=Source.INPUT, shape=(Extent(("mul", 3, "batch")),), dtype="float32"))
    """
    found = [at for at, size in enumerate(value.shape) if isinstance(size, Extent)]
    is_plain = len(found) == 1 and value.shape[found[0]] == Extent(BATCH)
    return found[0] if is_plain else None
