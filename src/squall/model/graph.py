"""A model as a graph of aten ops: plain data, no tensor, nothing that runs.

A graph is in single assignment: every value is made once, by one node or from outside, and never changed. What a
model changes in place, its buffers, leaves the graph as an output (`Graph.mutations`).
"""

import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

BATCH = "batch"
"""The one symbol: how many examples there are."""


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the graph: its index in `Graph.values`."""

    index: int


@dataclass(frozen=True, slots=True)
class Named:
    """An argument that names a thing of torch, as in ``Named("dtype", "float32")``.

    Attributes:
        kind: "dtype", "layout", "memory_format" or "device".
    """

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Extent:
    """A number that depends on the batch size.

    Attributes:
        form: ``"batch"``, a number, or a tuple of an operation's name and two forms.

    >>> Extent(("add", ("mul", 49, "batch"), 1)).at(2)
    99
    >>> print(Extent(("add", ("mul", 49, "batch"), 1)))
    49 * batch + 1
    """

    form: Any = BATCH

    def at(self, batch: int) -> int | float:
        """The number for a batch of so many examples."""
        return _number(self.form, batch)

    def __str__(self) -> str:
        return _text(self.form)


Size = int | Extent


class Source(Enum):
    """Where a value comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor of the graph.

    Attributes:
        name: qualified name of a parameter or buffer; otherwise a name that is unique in the graph.
        aliases: the other names of a tied parameter or shared buffer, in the model's order.
        shape: its sizes; those that follow the batch are Extents.
        dtype: as in ``"float32"``.
        requires_grad: whether a gradient flows back through it.
    """

    name: str
    source: Source
    aliases: tuple[str, ...] = ()
    shape: tuple[Size, ...]
    dtype: str
    requires_grad: bool = False

    def shape_at(self, batch: int) -> tuple[int, ...]:
        """Its sizes for a batch of so many examples."""
        return tuple(int(concrete(size, batch)) for size in self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of an op.

    Attributes:
        target: as in ``"aten.conv2d.default"``; ``"squall.opaque"`` runs a whole module.
        args, kwargs: constants, `Ref`, `Extent` and `Named`, in nested tuples; defaults left out as torch does.
        outputs: indices of the values made, in the op's order; None for an output that is no tensor.
        name: unique in the graph.
        module: qualified name of the module whose code called it; "" for the model itself.
        line: the user's own line, as in ``'File "model.py", line 12, in forward'``; "" if none is known.
        is_random: whether it draws from torch's generator.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[int | None, ...]
    name: str
    module: str = ""
    line: str = ""
    is_random: bool = False

    @property
    def inputs(self) -> tuple[int, ...]:
        """Indices of the values it reads, in the order of its arguments, each once."""
        return tuple(dict.fromkeys(ref.index for ref in refs_in((self.args, self.kwargs))))


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model in one mode, for batches of any size.

    Attributes:
        values: all tensors; those from outside first.
        nodes: in an order in which every value is made before it is read.
        outputs: what the model returns, flat: `Ref`, `Extent` or a constant.
        mutations: (name of a buffer, index of the value that it has after the call).
        training: whether it was captured in training mode.
        notes: what a user should know: modules that were made opaque, and why.
    """

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    mutations: tuple[tuple[str, int], ...] = ()
    training: bool = True
    notes: tuple[str, ...] = ()

    def from_outside(self, *sources: Source) -> tuple[int, ...]:
        """Indices of the values of these sources, in order; of all that no node makes if none is given."""
        wanted = set(sources) or set(Source) - {Source.NODE}
        return tuple(index for index, value in enumerate(self.values) if value.source in wanted)

    @cached_property
    def users(self) -> Mapping[int, tuple[int, ...]]:
        """Of each value, the indices of the nodes that read it, in order."""
        found: dict[int, list[int]] = {index: [] for index in range(len(self.values))}
        for at, node in enumerate(self.nodes):
            for index in node.inputs:
                found[index].append(at)
        return {index: tuple(users) for index, users in found.items()}

    @cached_property
    def schema_hash(self) -> str:
        """SHA-256 (hex) of what is computed: equal for two captures of the same model."""
        described = {**self.to_json(), "notes": []}
        for node in described["nodes"]:
            del node["line"]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """A description that `json.dumps` takes."""
        return {
            "training": self.training,
            "values": [_value_json(value) for value in self.values],
            "nodes": [_node_json(node) for node in self.nodes],
            "outputs": _argument_json(self.outputs),
            "mutations": [list(mutation) for mutation in self.mutations],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join([*self._lines(), f"return {_argument_text(self.outputs, self.values)}"])

    def _lines(self) -> Iterator[str]:
        for node in self.nodes:
            made = ", ".join("_" if at is None else self.values[at].name for at in node.outputs)
            arguments = [_argument_text(arg, self.values) for arg in node.args]
            arguments += [f"{key}={_argument_text(arg, self.values)}" for key, arg in node.kwargs.items()]
            yield f"{made} = {node.target}({', '.join(arguments)})"


def concrete(argument: Any, batch: int) -> Any:
    """An argument with every Extent, however deep, replaced by its number for that batch size."""
    return map_argument(lambda leaf: leaf.at(batch) if isinstance(leaf, Extent) else leaf, argument)


def map_argument(function: Callable[[Any], Any], argument: Any) -> Any:
    """Nested arguments of the same form, each leaf replaced by `function(leaf)`."""
    if isinstance(argument, tuple):
        return tuple(map_argument(function, part) for part in argument)
    if isinstance(argument, Mapping):
        return {key: map_argument(function, part) for key, part in argument.items()}
    return function(argument)


def refs_in(argument: Any) -> Iterator[Ref]:
    """Every `Ref` in nested arguments, in order."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from refs_in(part)
    elif isinstance(argument, Mapping):
        for part in argument.values():
            yield from refs_in(part)


def without_dead(graph: Graph) -> Graph:
    """The graph without nodes whose results nobody reads; random ones stay, since they move the generator."""
    needed = {index for _, index in graph.mutations} | {ref.index for ref in refs_in(graph.outputs)}
    kept = []
    for node in reversed(graph.nodes):
        if node.is_random or needed.intersection(at for at in node.outputs if at is not None):
            kept.append(node)
            needed.update(node.inputs)
    made = {at for node in kept for at in node.outputs}
    live = [at for at, v in enumerate(graph.values) if v.source is not Source.NODE or at in made]
    new = {old: at for at, old in enumerate(live)}

    def moved(leaf: Any) -> Any:
        return Ref(new[leaf.index]) if isinstance(leaf, Ref) else leaf

    nodes = tuple(
        replace(
            node,
            args=map_argument(moved, node.args),
            kwargs=map_argument(moved, node.kwargs),
            outputs=tuple(None if at is None else new[at] for at in node.outputs),
        )
        for node in reversed(kept)
    )
    return replace(
        graph,
        values=tuple(graph.values[at] for at in live),
        nodes=nodes,
        outputs=map_argument(moved, graph.outputs),
        mutations=tuple((name, new[at]) for name, at in graph.mutations),
    )


_SIGNS = {"add": "+", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**"}
_CALLS = {"max": max, "min": min}
_OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "pow": operator.pow,
    **_CALLS,
}


def _number(form: Any, batch: int) -> int | float:
    if form == BATCH:
        return batch
    if not isinstance(form, tuple):
        number: int | float = form
        return number
    name, left, right = form[0], _number(form[1], batch), _number(form[2], batch)
    result: int | float = _OPERATIONS[name](left, right)
    return result


def _text(form: Any, is_inner: bool = False) -> str:
    if not isinstance(form, tuple):
        return str(form)
    name, left, right = form
    if name in _CALLS:
        return f"{name}({_text(left)}, {_text(right)})"
    text = f"{_text(left, name != 'add')} {_SIGNS[name]} {_text(right, name != 'add')}"
    return f"({text})" if is_inner else text


def _value_json(value: Value) -> dict[str, Any]:
    return {
        "name": value.name,
        "source": value.source.value,
        "aliases": list(value.aliases),
        "shape": _argument_json(value.shape),
        "dtype": value.dtype,
        "requires_grad": value.requires_grad,
    }


def _node_json(node: Node) -> dict[str, Any]:
    return {
        "target": node.target,
        "args": _argument_json(node.args),
        "kwargs": _argument_json(node.kwargs),
        "outputs": list(node.outputs),
        "name": node.name,
        "module": node.module,
        "line": node.line,
        "is_random": node.is_random,
    }


def _argument_json(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return [_argument_json(part) for part in argument]
    if isinstance(argument, Mapping):
        return {key: _argument_json(part) for key, part in argument.items()}
    if isinstance(argument, Ref):
        return {"ref": argument.index}
    if isinstance(argument, Extent):
        return {"extent": _argument_json(argument.form)}
    if isinstance(argument, Named):
        return {argument.kind: argument.name}
    if isinstance(argument, complex):
        return {"complex": [argument.real, argument.imag]}
    return argument


def _argument_text(argument: Any, values: tuple[Value, ...]) -> str:
    if isinstance(argument, tuple):
        inner = ", ".join(_argument_text(part, values) for part in argument)
        return f"({inner},)" if len(argument) == 1 else f"({inner})"
    if isinstance(argument, Ref):
        return values[argument.index].name
    if isinstance(argument, Extent):
        return str(argument)
    return argument.name if isinstance(argument, Named) else repr(argument)
