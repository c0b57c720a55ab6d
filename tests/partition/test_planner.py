"""What the planners choose: balance, whole layers, feature maps, heads; and that every choice can be computed.

Faults planted by hand, each seen to fail a test: a layer apart that takes less than its share · on the slowest partition ·
the others all on one.
"""

import pytest

from squall.errors import ConfigError
from squall.model.graph import Extent, Graph
from squall.partition import planner
from squall.partition.calls import bound
from squall.partition.plan import Plan
from tests.partition.whole import case


def owners(graph: Graph, plan: Plan, node: int) -> set[int]:
    """The partitions that compute some of a node."""
    made = [index for index in graph.nodes[node].outputs if index is not None]
    return {p for index in made for p, share in enumerate(plan.holdings[index]) if share is not None}


def test_a_horizontal_plan_gives_whole_layers_in_order() -> None:
    for name in ("lenet", "resnet", "decoder"):
        graph = case(name)[0].graph
        plan = planner.horizontal(graph, 3)
        placed = [owners(graph, plan, at) for at in range(len(graph.nodes))]
        assert all(len(one) == 1 for one in placed)
        flat = [min(one) for one in placed]
        assert flat == sorted(flat)
        assert set(flat) == {0, 1, 2}
        for _, nodes in planner.layers_of(graph):
            assert len({flat[at] for at in nodes}) == 1


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_horizontal_plan_is_as_even_as_whole_layers_allow(parts: int) -> None:
    graph = case("resnet")[0].graph
    layers = planner.layers_of(graph)
    plan = planner.horizontal(graph, parts)
    loads = [0.0] * parts
    for cost, nodes in layers:
        loads[min(owners(graph, plan, nodes[0]))] += cost
    assert max(loads) <= _least([cost for cost, _ in layers], parts) * (1 + 1e-5)


def _least(costs: list[float], parts: int) -> float:
    """The smallest possible largest load, by trying every cut."""
    if parts == 1:
        return sum(costs)
    return min(max(sum(costs[:at]), _least(costs[at:], parts - 1)) for at in range(1, len(costs) - parts + 2))


def test_a_vertical_plan_cuts_convolutions_by_feature_maps_and_attention_by_heads() -> None:
    for name, target, axis in [("lenet", "conv2d", 1), ("decoder", "scaled_dot_product_attention", 1)]:
        graph = case(name)[0].graph
        plan = planner.vertical(graph, 2)
        for node in graph.nodes:
            if target in node.target:
                (index,) = node.outputs
                assert index is not None
                cut = {
                    at
                    for share in plan.holdings[index]
                    if share
                    for at, part in enumerate(share)
                    if part is not None
                }
                assert cut == {axis}, node.name


def test_a_vertical_plan_normalises_in_stages_what_is_cut_by_features() -> None:
    graph = case("decoder")[0].graph
    plan = planner.vertical(graph, 2)
    assert {graph.nodes[at].target for at in plan.staged} == {"aten.layer_norm.default"}


def test_cut_in_space_means_rows_or_columns() -> None:
    graph = case("lenet")[0].graph
    plan = planner.vertical(graph, 3, tiles=("conv2d", "max_pool2d"))
    for at, node in enumerate(graph.nodes):
        if bound(graph, at, 4).call.name in ("conv2d", "max_pool2d"):
            (index,) = node.outputs
            assert index is not None
            for share in plan.holdings[index]:
                assert share is not None
                assert share[1] is None
                assert share[2] is not None or share[3] is not None


def test_the_axis_that_counts_examples_is_never_cut() -> None:
    for name in ("lenet", "decoder", "resnet"):
        graph = case(name)[0].graph
        for seed in range(4):
            plan = planner.random(graph, 3, seed)
            for value, holding in zip(graph.values, plan.holdings, strict=True):
                for share in holding:
                    for size, axis in zip(value.shape, share or (), strict=False):
                        assert axis is None or not isinstance(size, Extent)


def test_the_same_seed_gives_the_same_random_plan() -> None:
    graph = case("lenet")[0].graph
    assert planner.random(graph, 3, 1) == planner.random(graph, 3, 1)
    assert planner.random(graph, 3, 1) != planner.random(graph, 3, 2)


def test_what_follows_a_layer_stays_with_it() -> None:
    graph = case("mlp")[0].graph
    costs = [2.0 if "relu" in node.target or at == 0 else 0.1 for at, node in enumerate(graph.nodes)]
    plan = planner.mixed(graph, [1, 1], costs=costs)
    owners = {
        node.target.split(".")[1]: [p for p, share in enumerate(plan.holdings[index]) if share is not None]
        for node in reversed(graph.nodes)
        for index in node.outputs
        if index is not None
    }
    assert owners["linear"] == owners["relu"] == [0]
    assert owners["log_softmax"] == [1]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [([1.0, 1.0], [0, 1, 0]), ([2.0, 1.0], [1, 0, 1]), ([1.0, 1.0, 1.0], [0, 2, 1])],
)
def test_a_layer_that_takes_more_than_its_share_is_alone_on_the_fastest(
    speeds: list[float], expected: list[int]
) -> None:
    graph = case("dense")[0].graph
    linear = [at for at, node in enumerate(graph.nodes) if "linear" in node.target]
    costs = [1.0 if at in linear else 0.01 for at in range(len(graph.nodes))]
    costs[linear[1]] = 5.0

    plan = planner.one_apart(graph, len(speeds), speeds=speeds, costs=costs)

    assert plan is not None
    assert [owners(graph, plan, at) for at in linear] == [{p} for p in expected]
    even = [1.0 if at in linear else 0.0 for at in range(len(graph.nodes))]
    assert planner.one_apart(graph, 2, costs=even) is None
    assert planner.one_apart(graph, 1, costs=costs) is None


def test_a_team_needs_a_partition() -> None:
    with pytest.raises(ConfigError, match="at least one partition in each team"):
        planner.mixed(case("mlp")[0].graph, [2, 0])
