"""A plan by names: kept, loaded, checked, and the same cut in every graph that has the model in it.

Faults planted by hand, each seen to fail a test: stages not kept · a shape not compared · names of the second op of a
module mixed up · shares of another number of partitions accepted · names compared in one direction only · results of ops
placed anew · the version not looked at.
"""

import copy
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from squall.errors import ConfigError, CorruptError
from squall.model.capture import capture
from squall.partition import planner
from squall.partition.model_plan import Plan
from squall.partition.plan import EVERYWHERE
from squall.partition.together import Together
from tests.models import EXAMPLES
from tests.partition.whole import Objective, case

NAMES = ["mlp", "lenet", "alexnet", "resnet", "decoder", "local"]


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    """The model alone, and its inputs, of a case of `whole`."""
    _, whole, (x, _) = case(name)
    assert isinstance(whole, Objective)
    return whole.model, x


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["vertical 3", "horizontal 2", "random 3"])
def test_a_plan_of_the_model_alone_trains_the_model_with_its_loss(name: str, how: str) -> None:
    model, x = model_of(name)
    graph = capture(model, (x,)).graph
    way, count = how.split()
    cut = (
        planner.random(graph, int(count), 1) if way == "random" else getattr(planner, way)(graph, int(count))
    )
    plan = Plan.of(graph, cut, how=how)

    captured, whole, minibatch = case(name)
    together = Together(captured, whole, plan.on(captured.graph))
    together.step(minibatch)

    plain = copy.deepcopy(whole)
    loss, out = plain(*minibatch)
    loss.backward()
    torch.testing.assert_close(together.outputs(), [loss.detach(), out.detach()], rtol=0, atol=1e-10)
    gradients = together.gradients()
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=0, atol=1e-10)
    state = together.state()
    for key, buffer in plain.named_buffers():
        torch.testing.assert_close(state[key], buffer, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["resnet", "decoder"])
def test_on_its_own_graph_it_is_the_plan_that_it_was_made_of(name: str) -> None:
    model, x = model_of(name)
    graph = capture(model, (x,)).graph
    for cut in (planner.vertical(graph, 3), planner.random(graph, 4, 2)):
        again = Plan.of(graph, cut, how="").on(graph)
        values = [at for at, holding in enumerate(cut.holdings) if holding != EVERYWHERE]
        own = {at for node in graph.nodes for at in node.outputs} | {
            at for at in values if graph.values[at].source.value in ("parameter", "buffer")
        }
        for at in own - {None}:
            assert again.holdings[at] == cut.holdings[at]
        assert again.staged == cut.staged


@pytest.mark.parametrize("name", ["alexnet", "resnet"])
def test_a_plan_for_training_also_fits_evaluation(name: str) -> None:
    model, x = model_of(name)
    graph = capture(model, (x,)).graph
    plan = Plan.of(graph, planner.vertical(graph, 3), how="vertical")
    evaluating = capture(model, (x,), training=False)
    together = Together(evaluating, model, plan.on(evaluating.graph), trains=False)
    together.step((x,))
    expected = copy.deepcopy(model).eval()(x)
    torch.testing.assert_close(together.outputs()[0], expected.detach(), rtol=0, atol=1e-10)


def test_it_is_kept_and_loaded_unchanged(tmp_path: Path) -> None:
    graph = case("resnet")[0].graph
    plan = Plan.of(graph, planner.random(graph, 4, 3), how="random", prefix="model.")
    assert plan.staged
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    for at, cuts in plan.on(graph).staged.items():
        assert planner.random(graph, 4, 3).staged[at] == cuts


def test_what_is_no_plan_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigError, match=r"plan\.json.*expected a file"):
        Plan.load(path)
    for text, reason in (
        ("{", "no JSON"),
        ("[]", "no plan of Squall"),
        ('{"format": "other"}', "no plan of Squall"),
    ):
        path.write_text(text)
        with pytest.raises(CorruptError, match=f"plan.json.*{reason}"):
            Plan.load(path)
    graph = case("mlp")[0].graph
    plan = Plan.of(graph, planner.vertical(graph, 2), how="vertical", prefix="model.")
    for change, error, reason in (
        ({"version": 2}, ConfigError, "expected version 1, but got 2"),
        ({"partitions": 3}, CorruptError, "'0.weight' has shares that are not of 3 partitions"),
        ({"parameters": None}, CorruptError, "AttributeError"),
        ({"staged": {"0/linear": [[1]]}}, CorruptError, "Error"),
    ):
        path.write_text(json.dumps({**plan.to_json(), **change}))
        with pytest.raises(error, match=reason):
            Plan.load(path)


def test_a_model_that_it_was_not_made_for_is_refused_by_name() -> None:
    def graph_of(*sizes: int, last: nn.Module | None = None) -> object:
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        return capture(nn.Sequential(*layers, *([last] if last else [])), (torch.zeros(2, sizes[0]),)).graph

    graph = graph_of(4, 6, 2)
    plan = Plan.of(graph, planner.vertical(graph, 2), how="vertical")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'0\.weight': expected the model's shape 8 x 4, but got 6 x 4"):
        plan.on(graph_of(4, 8, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'2\.weight' in the model only"):
        plan.on(graph_of(4, 6, 2, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'1\.weight' in the plan only"):
        plan.on(graph_of(4, 6))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'2/tanh' in the model only"):
        plan.on(graph_of(4, 6, 2, last=nn.Tanh()))  # type: ignore[arg-type]


def test_it_says_who_holds_what_as_one_would_index_it() -> None:
    graph = case("decoder")[0].graph
    told = str(Plan.of(graph, planner.vertical(graph, 2), how="vertical", prefix="model."))
    assert told.startswith("a plan over 2 partitions (vertical)")
    assert "embedding.weight: 0 holds [:, 0:8] of 20 x 16, 1 holds [:, 8:16] of 20 x 16" in told


def test_a_model_called_twice_has_a_name_for_each_call() -> None:
    graph = capture(EXAMPLES["shared"].model(), (torch.zeros(2, 6),)).graph
    plan = Plan.of(graph, planner.horizontal(graph, 2), how="horizontal")
    names = [name for name in plan.results if name.endswith(("linear", "linear.1"))]
    assert len(names) == 3
    assert len(set(plan.results)) == len(graph.nodes)
