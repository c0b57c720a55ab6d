"""A plan covers every value exactly once, says so in JSON, and refuses what cannot be computed."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from squall.errors import ConfigError
from squall.model.graph import Source
from squall.partition import planner
from squall.partition.indices import Indices
from squall.partition.plan import EVERYWHERE, Holding, Plan, along, on_one, regions_of
from squall.partition.regions import Region
from tests.partition.whole import case


def changed(plan: Plan, value: int, holding: Holding) -> Plan:
    return replace(plan, holdings=(*plan.holdings[:value], holding, *plan.holdings[value + 1 :]))


def test_json_and_back_gives_the_same_plan() -> None:
    for name in ("mlp", "decoder"):
        graph = case(name)[0].graph
        for plan in (planner.horizontal(graph, 2), planner.vertical(graph, 3), planner.random(graph, 4, 2)):
            text = json.dumps(plan.to_json())
            assert Plan.from_json(text) == plan
            assert Plan.from_json(json.loads(text)) == plan


def test_a_share_without_indices_is_all_of_an_axis_at_any_batch_size() -> None:
    holding = along(1, {0: Indices.span(0, 2), 2: Indices.span(2, 3)}, 3, 2)
    for batch in (2, 7):
        assert [region.size for region in regions_of(holding, (batch, 3))] == [2 * batch, 0, batch]
    assert regions_of(on_one(1, 2, 0), ())[1].is_whole


WRONG: dict[str, Callable[[Indices, Indices], Holding]] = {
    "a gap": lambda low, high: along(1, {0: low}, 2, 2),
    "an overlap": lambda low, high: along(1, {0: low, 1: low | high}, 2, 2),
    "too few shares": lambda low, high: on_one(0, 1, 2),
    "too few axes": lambda low, high: on_one(0, 2, 1),
    "everywhere": lambda low, high: EVERYWHERE,
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_value_must_be_covered_exactly_once(fault: str) -> None:
    graph = case("mlp")[0].graph
    plan = planner.horizontal(graph, 2)
    at = next(
        i for i, value in enumerate(graph.values) if value.source is Source.NODE and value.shape[-1:] == (16,)
    )
    changed(plan, at, along(1, {0: Indices.span(0, 9), 1: Indices.span(9, 16)}, 2, 2)).check(graph)
    with pytest.raises(ConfigError, match=graph.values[at].name):
        changed(plan, at, WRONG[fault](Indices.span(0, 9), Indices.span(9, 16))).check(graph)


def test_a_plan_for_another_graph_is_refused() -> None:
    plan = planner.horizontal(case("mlp")[0].graph, 2)
    with pytest.raises(ConfigError, match="a graph with hash"):
        plan.check(case("dense")[0].graph)


def test_an_op_without_a_rule_is_not_cut() -> None:
    graph = case("recurrent")[0].graph
    plan = planner.vertical(graph, 2)
    (node,) = [node for node in graph.nodes if node.target == "squall.opaque.default"]
    value = next(index for index in node.outputs if index is not None)
    halves = along(2, {0: Indices.span(0, 3), 1: Indices.span(3, 6)}, 2, 3)
    with pytest.raises(ConfigError, match="whole on one partition"):
        changed(plan, value, halves).check(graph)


def test_stages_must_be_those_of_the_op() -> None:
    graph = case("decoder")[0].graph
    plan = next(p for seed in range(9) if (p := planner.random(graph, 2, seed)).staged)
    at, cuts = next(iter(plan.staged.items()))
    plain = next(i for i, node in enumerate(graph.nodes) if node.target == "aten.gelu.default")
    with pytest.raises(ConfigError, match="an op with these stages"):
        replace(plan, staged={plain: cuts}).check(graph)
    cut = replace(cuts[0], shares=tuple(None for _ in cuts[0].shares))
    with pytest.raises(ConfigError, match="a stage of node"):
        replace(plan, staged={at: (cut, *cuts[1:])}).check(graph)


def test_constants_belong_to_everybody() -> None:
    graph = case("local")[0].graph
    plan = planner.vertical(graph, 2)
    assert all(plan.is_everywhere(at) for at in graph.from_outside(Source.INPUT, Source.CONSTANT))
    constants = graph.from_outside(Source.CONSTANT)
    for at in constants:
        with pytest.raises(ConfigError, match="it everywhere"):
            changed(plan, at, on_one(0, 2, len(graph.values[at].shape))).check(graph)


def test_an_owner_of_everything_owns_the_whole() -> None:
    plan = planner.horizontal(case("mlp")[0].graph, 1)
    graph = case("mlp")[0].graph
    for index, value in enumerate(graph.values):
        if not plan.is_everywhere(index):
            assert plan.regions(index, value.shape_at(5)) == (Region.whole(value.shape_at(5)),)
