"""Nodes as calls: every op of these graphs, run as a call, gives what the graph says it gives."""

import pytest
import torch

from squall.model.graph import Source
from squall.partition.call import run_whole
from squall.partition.calls import bound
from tests.partition.whole import case


@pytest.mark.parametrize("name", ["lenet", "resnet", "decoder", "local"])
def test_each_call_gives_the_shape_and_dtype_that_the_graph_says(name: str) -> None:
    graph = case(name)[0].graph
    for batch in (2, 3):
        for at, node in enumerate(graph.nodes):
            here = bound(graph, at, batch)
            tensors = [torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for each in here.call.inputs]
            for k, index in enumerate(node.outputs):
                if index is not None:
                    made = run_whole(here.call.picking(k), tensors)
                    assert tuple(made.shape) == here.call.outputs[k] == graph.values[index].shape_at(batch)
                    assert str(made.dtype) == f"torch.{graph.values[index].dtype}"


def test_each_tensor_argument_has_an_input_of_its_own() -> None:
    graph = case("local")[0].graph
    squares = [
        at
        for at, node in enumerate(graph.nodes)
        if node.target == "aten.mul.Tensor" and len(node.inputs) == 1
    ]
    assert any(len(bound(graph, at, 2).call.inputs) == 2 for at in squares)
    assert all(
        len(bound(graph, at, 2).values) == len(bound(graph, at, 2).call.inputs)
        for at in range(len(graph.nodes))
    )
    assert graph.from_outside(Source.PARAMETER)
