"""Generated functions: parts of a graph, what is let go of, and what may get into the source.

Fault planted here by hand, seen to fail a test: values let go of after their first use.
"""

import weakref

import pytest
import torch
from torch import Tensor, nn

from squall.model.capture import capture
from squall.model.graph import Extent, Graph, Named, Node, Ref, Source, Value
from squall.model.straight import compile_straight


def chain(*targets: str, args: tuple[tuple[object, ...], ...] = ()) -> Graph:
    """One input and a node after another, each reading the value before it."""
    values = [Value(name="x", source=Source.INPUT, shape=(Extent(), 2), dtype="float32")]
    nodes = []
    for at, target in enumerate(targets):
        more = args[at] if at < len(args) else ()
        nodes.append(Node(target=target, args=(Ref(at), *more), outputs=(at + 1,), name=f"n{at}"))
        values.append(Value(name=f"n{at}", source=Source.NODE, shape=(Extent(), 2), dtype="float32"))
    return Graph(values=tuple(values), nodes=tuple(nodes), outputs=(Ref(len(targets)),))


def test_a_part_of_a_graph_runs_from_the_values_given() -> None:
    graph = chain("aten.relu.default", "aten.neg.default", "aten.exp.default")
    run = compile_straight(graph, nodes=[1, 2], inputs=[1], outputs=(Ref(2), Ref(3), Extent()))
    x = torch.randn(3, 2)
    neg, exp, batch = run(3, [x])
    assert torch.equal(neg, -x)
    assert torch.equal(exp, torch.exp(-x))
    assert batch == 3


def test_sizes_are_computed_from_the_batch() -> None:
    graph = chain("aten.view.default", args=(((Extent(("mul", 2, "batch")), 1),),))
    run = compile_straight(graph)
    assert run(3, [torch.zeros(3, 2)])[0].shape == (6, 1)
    assert run(5, [torch.zeros(5, 2)])[0].shape == (10, 1)


def test_constants_that_are_no_plain_numbers_are_bound_as_objects() -> None:
    graph = chain(
        "aten.clamp.default", "aten.clamp.default", args=((float("-inf"), 1e30), (float("-inf"), 0.5))
    )
    cast = Node(target="aten.to.dtype", args=(Ref(2), Named("dtype", "float64")), outputs=(3,), name="to")
    value = Value(name="to", source=Source.NODE, shape=(Extent(), 2), dtype="float64")
    graph = Graph(values=(*graph.values, value), nodes=(*graph.nodes, cast), outputs=(Ref(3),))
    (out,) = compile_straight(graph)(1, [torch.tensor([[-3.0, 9.0]])])
    assert torch.equal(out, torch.tensor([[-3.0, 0.5]], dtype=torch.float64))


def test_a_text_constant_cannot_become_code() -> None:
    graph = chain("aten.gelu.default")
    text = "tanh'); raise SystemExit(('"
    node = Node(
        target="aten.gelu.default",
        args=(Ref(0),),
        kwargs={"approximate": text},
        outputs=(1,),
        name="gelu",
    )
    run = compile_straight(Graph(values=graph.values, nodes=(node,), outputs=graph.outputs))
    with pytest.raises(RuntimeError, match="approximate"):
        run(1, [torch.zeros(1, 2)])


def test_a_value_is_let_go_of_after_its_last_use() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        alive: list[int] = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
            result = func(*args, **(kwargs or {}))
            self.alive.append(sum(ref() is not None for ref in seen))
            seen.append(weakref.ref(result))
            return result

    run = compile_straight(chain(*["aten.neg.default"] * 6))
    given = [torch.zeros(1, 2)]
    with torch.no_grad(), Watch() as watch:
        run(1, given)
    assert max(watch.alive) <= 1


def test_running_twice_gives_the_same_and_changes_no_input() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True))
    captured = capture(model, (torch.randn(2, 1, 5, 5),))
    run = compile_straight(captured.graph)
    tensors = [*model.parameters(), *model.buffers(), torch.randn(3, 1, 5, 5)]
    before = [tensor.detach().clone() for tensor in tensors]

    first, second = run(3, tensors), run(3, tensors)

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
