"""`squall.plan`: the ways to ask, what is refused, and what a person sees of a plan.

Faults planted by hand, each seen to fail a test: the slowest plan taken · plans that do not fit taken · weights of a layer lost ·
patterns that fit what only begins alike · speeds of machines ignored · the module put into training mode · parameters
drawn on the wrong lane · bytes left out of the picture · rows joined over an edge · layers always
joined with what follows them. (In `test_planner.py`: what follows a layer given to the next team.)
"""

import copy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import squall
from squall.errors import ConfigError, ModelError
from squall.observe.units import human_bytes
from squall.partition import planning
from squall.partition.measure import guess
from squall.partition.planning import plan
from tests.models import EXAMPLES
from tests.partition.whole import case


def net(width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)
    )


X = torch.zeros(8, 32)


def sizes(made: squall.Plan, name: str) -> list[int]:
    """Of the first axis of a parameter, what each partition holds."""
    owned = made.parameters[name]
    found = []
    for share in owned.holding:
        axis = share and share[0]
        found.append(0 if share is None else axis.size if axis else int(owned.shape[0]))
    return found


def test_vertical_cuts_every_layer_horizontal_none_and_teams_some() -> None:
    assert sizes(plan(net(), X, partitions=4, how="vertical"), "2.weight") == [16] * 4
    flat = plan(net(), X, partitions=3, how="horizontal")
    assert [sorted(sizes(flat, f"{at}.weight")) for at in (0, 2, 4)] == [[0, 0, 64], [0, 0, 64], [0, 0, 8]]
    mixed = plan(net(), X, how=[1, 2])
    assert mixed.partitions == 3
    assert sizes(mixed, "0.weight") == [64, 0, 0]
    assert sizes(mixed, "4.weight") == [0, 4, 4]


def test_layers_are_placed_by_hand_by_name_pattern_and_weight() -> None:
    made = plan(net(), X, how={"0": {0: 3, 1: 1}, "2": [0, 2], "4": 2})
    assert made.partitions == 3
    assert made.how == "by hand"
    assert sizes(made, "0.weight") == [48, 16, 0]
    assert sizes(made, "2.weight") == [32, 0, 32]
    assert sizes(made, "4.weight") == [0, 0, 8]
    model = EXAMPLES["resnet"].model()
    made = plan(model, EXAMPLES["resnet"].inputs(4)[0], partitions=2, how={"body.1": 1, "*": 0})
    owners = {
        name: [p for p, share in enumerate(each.holding) if share is not None]
        for name, each in made.parameters.items()
    }
    assert all(where == [1 if name.startswith("body.1.") else 0] for name, where in owners.items())


def test_a_pattern_is_a_whole_name_and_not_the_beginning_of_one() -> None:
    model = nn.Sequential()
    for name in ("fc", "fc2"):
        model.add_module(name, nn.Linear(32, 32))
    made = plan(model, X, how={"fc": 0, "fc2": 1})
    assert sizes(made, "fc.weight") == [32, 0]
    assert sizes(made, "fc2.weight") == [0, 32]


@pytest.mark.parametrize("way", ["vertical", "by hand"])
def test_shares_follow_the_speeds_of_machines(way: str) -> None:
    machines = [squall.Machine(host="fast", speed=3.0), squall.Machine(host="slow", speed=1.0)]
    how: Any = "vertical" if way == "vertical" else {"*": [0, 1]}
    made = plan(net(), X, machines=machines, how=how)
    assert sizes(made, "0.weight") == [48, 16]
    lines = plan(net(256), torch.zeros(64, 32), machines=machines, how="horizontal")
    assert sum(sizes(lines, "2.weight")) == 256


def test_auto_takes_the_plan_that_is_predicted_to_be_quickest_and_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Times from shapes, so that the choice does not hang on how busy this machine is.
    monkeypatch.setattr(
        planning, "measure", lambda captured, model, tensors: guess(captured.graph, len(tensors[0]))
    )
    apart = [squall.Machine(host=str(p)) for p in range(3)]
    ways: list[Any] = ["vertical", "horizontal", [1, 2], [2, 1]]
    each = [plan(net(), X, machines=apart, how=how).predicted for how in ways]
    best = plan(net(), X, machines=apart).predicted
    assert best is not None
    assert best.step_s == min(told.step_s for told in each if told)
    needs = sorted(max(told.memory_bytes) for told in each if told)
    limit = [squall.Machine(host=str(p), memory_bytes=needs[0]) for p in range(3)]
    found = plan(net(), X, machines=limit).predicted
    assert found is not None
    assert max(found.memory_bytes) == needs[0]


def test_activations_are_parted_from_their_layer_where_the_line_is_fast_enough_for_more_equal_parts() -> None:
    with torch.device("meta"):  # times from shapes
        pooled = nn.Sequential(
            nn.Conv2d(1, 32, 1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(2048, 8)
        )
        images = torch.zeros(8, 1, 32, 32)

    def crossing(bytes_per_s: float) -> int:
        machines = [squall.Machine(host=host, bytes_per_s=bytes_per_s, latency_s=1e-6) for host in "ab"]
        told = plan(pooled, images, machines=machines, how="horizontal", microbatches=4).predicted
        assert told is not None
        return told.links[0, 1]

    unpooled, after_pooling = 8 * 32 * 32 * 32 * 4, 8 * 2048 * 4
    assert crossing(1e6) == after_pooling
    assert crossing(1e12) == unpooled


def test_what_does_not_fit_is_refused_with_machine_and_bytes() -> None:
    with pytest.raises(
        ConfigError, match=r"partition 0 on machine 'a': expected at most 1,000 bytes of memory"
    ):
        plan(net(), X, machines=[squall.Machine(host="a", memory_bytes=1000)])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"how": "diagonal", "partitions": 2}, "one of auto, vertical, horizontal"),
        ({}, "one number of partitions, at least 1, but got none"),
        ({"partitions": 0}, "at least 1, but got partitions for 0"),
        ({"partitions": 2, "machines": [squall.Machine()]}, "partitions for 2, machines for 1"),
        ({"partitions": 2, "how": [1, 2]}, "partitions for 2, how for 3"),
        ({"partitions": 2, "how": {"0": 2}}, "partitions for 2, how for 3"),
        ({"how": {"0": 0, "fc": 1}}, "'fc': expected the name or pattern of a module.*among 0, 1, 2"),
        ({"partitions": 1, "microbatches": 3}, "a number that divides 8 examples, but got 3"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(net(), X, **request_)


def test_a_plan_says_why_a_minibatch_cannot_be_computed_in_parts() -> None:
    model, (args, _) = EXAMPLES["resnet"].model(), EXAMPLES["resnet"].inputs(4)
    made = plan(model, args, partitions=2, how="horizontal")
    assert made.predicted is not None
    assert made.predicted.microbatches == 1
    assert any("batch_norm" in reason and "couples examples" in reason for reason in made.couplings)
    with pytest.raises(ConfigError, match=r"plan\(microbatches=\): expected 1.*couples examples"):
        plan(model, args, partitions=2, how="horizontal", microbatches=2)
    args, _ = EXAMPLES["dataclass"].inputs(4)
    several = plan(EXAMPLES["dataclass"].model(), args, partitions=2, how="horizontal", microbatches=2)
    assert several.couplings == ()


def test_a_model_that_does_not_run_is_called_by_its_own_name() -> None:
    with pytest.raises(ModelError, match="model Sequential: expected a forward that runs"):
        plan(net(), torch.zeros(8, 31), partitions=2)


def test_the_module_its_mode_and_the_generators_are_left_alone() -> None:
    model, (args, _) = EXAMPLES["resnet"].model().eval(), EXAMPLES["resnet"].inputs(4)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(4)
    state = torch.get_rng_state()
    plan(model, args, partitions=2, how="vertical")
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_a_model_without_memory_is_planned_from_shapes() -> None:
    with torch.device("meta"):
        model = net(20_000)
    made = plan(model, torch.zeros(8, 32, device="meta"), partitions=4, how="vertical")
    assert made.predicted is not None
    assert not made.predicted.is_measured
    assert max(made.predicted.parameter_bytes) < 0.26 * 20_000**2 * 4


def test_inputs_may_be_a_dict_and_outputs_nested() -> None:
    model, (args, kwargs) = EXAMPLES["siamese"].model(), EXAMPLES["siamese"].inputs(4)
    made = plan(model, args, partitions=2, how="vertical")
    assert made.predicted is not None
    assert kwargs


def test_a_plan_trains_under_the_graph_with_its_loss() -> None:
    captured, whole, _ = case("lenet")
    model, (x, _) = whole.model, case("lenet")[2]
    made = plan(model, x, how=[1, 2])
    made.on(captured.graph).check(captured.graph)


def drawn(made: squall.Plan, path: Path) -> list[tuple[float, float, str]]:
    """All texts of a picture with where they stand."""
    made.svg(path)
    root = ElementTree.parse(path).getroot()
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    found = [
        (float(each.get("x", 0)), float(each.get("y", 0)), each.text or "")
        for each in root.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert all(0 <= x < width and 0 <= y < height for x, y, _ in found)
    return found


def test_the_picture_says_who_holds_what_and_the_bytes_on_each_edge(tmp_path: Path) -> None:
    made = plan(net(), X, partitions=2, how="vertical")
    texts = drawn(made, tmp_path / "plan.svg")
    words = [text for _, _, text in texts]
    assert words[0] == "2 partitions, vertical"
    assert [word for word in words if word.startswith("partition ")] == ["partition 0", "partition 1"]
    assert words.count("0:32 of 64") == words.count("32:64 of 64") == 2
    edge = human_bytes(8 * 32 * 4)
    assert words.count(f"⇅ {edge} from 1") == words.count(f"⇅ {edge} from 0") == 2
    left, right = (next(x for x, _, text in texts if text == word) for word in ("0:32 of 64", "32:64 of 64"))
    assert left < right
    owns = [human_bytes(32 * (32 + 1) * 4), human_bytes(32 * (64 + 1) * 4), human_bytes(4 * (64 + 1) * 4)]
    for size in owns:
        assert words.count(f"{size} of parameters") == 2


def test_a_row_of_the_picture_is_a_layer_with_what_follows_it_in_the_same_place(tmp_path: Path) -> None:
    made = plan(net(), X, how={"0": 0, "1": 0, "2": 1, "3": 1, "4": 0})
    assert made.drawn is not None
    assert [(row.name, row.ops) for row in made.drawn.rows] == [
        ("0", "linear, relu"),
        ("2", "linear, relu"),
        ("4", "linear"),
    ]
    assert [[(e.sender, e.receiver, e.up, e.down) for e in row.edges] for row in made.drawn.rows] == [
        [],
        [(0, 1, 8 * 64 * 4, 8 * 64 * 4)],
        [(1, 0, 8 * 64 * 4, 8 * 64 * 4)],
    ]


def test_a_layer_without_parameters_to_which_something_crosses_has_a_row_of_its_own() -> None:
    layers = nn.Sequential(nn.Linear(32, 64), nn.Softmax(dim=1), nn.Linear(64, 8))
    made = plan(layers, X, partitions=2, how="vertical")
    assert made.drawn is not None
    assert [row.name for row in made.drawn.rows] == ["0", "1", "2"]
    assert made.drawn.rows[1].edges


def test_bytes_in_the_picture_add_up_to_those_that_are_predicted(tmp_path: Path) -> None:
    for name in ("lenet", "decoder"):
        model, (args, _) = EXAMPLES[name].model(), EXAMPLES[name].inputs(4)
        made = plan(model, args, partitions=3, how="vertical")
        assert made.drawn is not None
        assert made.predicted is not None
        total = sum(edge.up + edge.down for row in made.drawn.rows for edge in row.edges)
        assert total == pytest.approx(made.predicted.bytes, abs=64)  # but for the sum in the place of a loss


def test_a_plan_that_nobody_priced_has_no_picture(tmp_path: Path) -> None:
    made = plan(net(), X, partitions=2, how="vertical")
    bare = squall.Plan(partitions=2, parameters=made.parameters, results=made.results)
    with pytest.raises(ConfigError, match="a picture of a plan"):
        bare.svg(tmp_path / "plan.svg")
