"""Capture held against the model itself, in both modes and at other batch sizes.

Faults planted here by hand, each seen to fail a test: a running mean that is not an output · sections under `no_grad` with
gradients · buffers set anew forgotten · no walk over `grad_fn` · gradients not compared · no check on a single example ·
parameters of the stand-in in the model's own memory · random nodes dropped as dead ·
NaN taken for another value than itself · a parameter that is written to compared by its shape only.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import squall
from squall.errors import ConfigError, ModelError
from squall.model.capture import capture
from squall.model.captured import Captured
from squall.model.graph import Node, Source
from squall.model.randomness import random_state
from squall.model.straight import op_of
from tests.models import EXAMPLES, Example, SecondDimension, Swish, second_dimension, with_own_backward


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from tensors_in(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from tensors_in(part)
    elif hasattr(tree, "__dataclass_fields__"):
        yield from tensors_in(vars(tree))


def step(model: nn.Module, call: Any, example: Example, batch: int) -> tuple[Any, list[Tensor | None]]:
    """One forward and backward under a fixed seed: the result and the gradients."""
    args, kwargs = example.inputs(batch)
    torch.manual_seed(3)
    with torch.compiler.set_stance("force_eager"):
        result = call(*args, **kwargs)
    model.zero_grad()
    loss = sum(t.square().sum() + t.sum() for t in tensors_in(result) if t.requires_grad)
    loss.backward()  # type: ignore[union-attr]
    return result, [p.grad for p in model.parameters()]


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    pairs = list(zip(tensors_in(ours), tensors_in(theirs), strict=True))
    assert pairs
    for got, wanted in pairs:
        assert got.dtype == wanted.dtype
        assert got.requires_grad == wanted.requires_grad
        assert torch.equal(got, wanted)


def assert_equals_eager(captured: Captured, example: Example, training: bool, batch: int) -> None:
    theirs = example.model().train(training)
    ours = copy.deepcopy(theirs)
    bound = captured.bind(ours)
    for _ in range(2):
        result, gradients = step(ours, bound, example, batch)
        wanted, wanted_gradients = step(theirs, theirs, example, batch)

        assert_same(result, wanted)
        for got, want in zip(gradients, wanted_gradients, strict=True):
            assert (got is None) == (want is None)
            assert got is None or (want is not None and torch.equal(got, want))
    for (name, got), (_, want) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(got, want), name


@cache
def captured_of(name: str, training: bool = True) -> Captured:
    args, kwargs = EXAMPLES[name].inputs(4)
    return capture(EXAMPLES[name].model(), args, kwargs, training=training)


# In evaluation most models differ by dropout alone; these differ by more.
IN_EVALUATION = {"resnet", "masked", "tagger", "noisy", "normalised"}


def cases() -> Iterator[Any]:
    for name, example in EXAMPLES.items():
        for training in (True, False):
            is_slow = example.is_slow or not (training or name in IN_EVALUATION)
            mode = "training" if training else "evaluation"
            marks = [pytest.mark.nightly] if is_slow else []
            yield pytest.param(name, training, id=f"{name}-{mode}", marks=marks)


@pytest.mark.parametrize(("name", "training"), list(cases()))
def test_outputs_gradients_and_buffers_are_those_of_the_model_to_the_bit(name: str, training: bool) -> None:
    captured = captured_of(name, training)
    for batch in (4, EXAMPLES[name].smallest, 3, 7):
        assert_equals_eager(captured, EXAMPLES[name], training, batch)


# The graph as data.


def test_tied_parameters_are_one_value_with_both_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight

    graph = capture(model, (torch.randn(2, 3),)).graph

    (weight,) = graph.from_outside(Source.PARAMETER)
    assert (graph.values[weight].name, graph.values[weight].aliases) == ("0.weight", ("2.weight",))
    assert graph.users[weight] == (0, 2)


def test_frozen_parameters_and_what_comes_of_them_alone_need_no_gradient() -> None:
    graph = captured_of("frozen").graph
    needs = {value.name: value.requires_grad for value in graph.values}
    assert not needs["features.0.weight"]
    assert not needs["%relu"]
    assert needs["head.weight"]
    assert needs["%mul"]


def test_running_statistics_leave_the_graph_as_mutations() -> None:
    graph = capture(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), (torch.randn(2, 1, 5, 5),)).graph
    assert {name for name, _ in graph.mutations} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert not captured_of("resnet", training=False).graph.mutations


def test_no_op_of_a_graph_writes_to_its_inputs() -> None:
    for name in ("masked", "resnet", "noisy", "normalised"):
        for node in captured_of(name).graph.nodes:
            assert not op_of(node.target)._schema.is_mutable, node


def test_random_ops_are_marked_in_training_and_dropout_is_gone_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.ReLU())
    example = (torch.randn(2, 3),)

    training = capture(model, example).graph
    evaluation = capture(model, example, training=False).graph

    assert [node.target for node in training.nodes if node.is_random] == ["aten.dropout.default"]
    assert [node.target for node in evaluation.nodes] == ["aten.linear.default", "aten.relu.default"]


def test_an_opaque_module_that_draws_is_marked_random() -> None:
    by_name = {node.args[0]: node.is_random for node in captured_of("tagger").graph.nodes if is_opaque(node)}
    assert by_name == {"lstm#0": True, "gru#0": False}


def is_opaque(node: Node) -> bool:
    return node.target == "squall.opaque.default"


def test_sizes_follow_the_batch_wherever_a_view_puts_it() -> None:
    graph = captured_of("lambdas").graph
    view = next(node for node in graph.nodes if node.target.startswith("aten.view"))
    assert [str(size) for size in view.args[1]] == ["2 * batch", "-1"]
    (made,) = view.outputs
    assert made is not None
    assert graph.values[made].shape_at(5) == (10, 4)


def test_the_batch_may_lie_in_another_dimension() -> None:
    example = Example(SecondDimension, second_dimension)
    args, kwargs = example.inputs(4)

    captured = capture(example.model(), args, kwargs, batch_dims=(None, 1))

    for batch in (4, 1, 5):
        assert_equals_eager(captured, example, True, batch)


def test_a_node_knows_its_module_and_the_users_line() -> None:
    graph = captured_of("lenet").graph
    node = next(node for node in graph.nodes if node.target == "aten.max_pool2d.default")
    assert node.module == ""
    assert "models.py" in node.line
    assert "in forward" in node.line
    assert [n.module for n in graph.nodes if n.target == "aten.linear.default"] == ["fc1", "fc2"]


def test_two_captures_of_one_model_have_one_hash_and_another_model_has_another() -> None:
    again = capture(EXAMPLES["mlp"].model(), EXAMPLES["mlp"].inputs(5)[0])
    hashes = [c.graph.schema_hash for c in (captured_of("mlp"), again, captured_of("lambdas"))]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_description_is_json() -> None:
    graph = captured_of("masked").graph
    assert json.loads(json.dumps(graph.to_json()))["mutations"]


# What must not be lost in silence.


class Step(nn.Module):
    """A linear layer and then whatever a test wants."""

    def __init__(self, function: Callable[["Step", Tensor], Any], **state: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.linear(x))


def inner(function: Callable[[Step, Tensor], Any], **state: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Step(function, **state))


def notes_of(model: nn.Module, **options: Any) -> str:
    return "; ".join(capture(model, (torch.randn(4, 6),), **options).graph.notes)


COUNTS = [0]


def counted(step: Step, x: Tensor) -> Tensor:
    COUNTS[0] += 1
    return x


def stored(step: Step, x: Tensor) -> Tensor:
    step.last = x
    return x


def half_precision(step: Step, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.t()).float()


def written_without_gradient(step: Step, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: with_own_backward(), "'1' is kept whole: its forward uses the custom autograd function"),
        (lambda: inner(lambda s, x: s.log.append(1) or x, log=[]), "its forward changes self.log"),
        (lambda: inner(stored), "its forward changes self.last"),
        (lambda: inner(counted), "its forward changes the global 'COUNTS'"),
        (lambda: inner(lambda s, x: x * random.random()), "draws from Python's or NumPy's"),
        (lambda: inner(lambda s, x: x * np.random.rand()), "draws from Python's or NumPy's"),
        (
            lambda: inner(lambda s, x: x + torch.rand(6, generator=s.own), own=torch.Generator()),
            "its forward changes self.own",
        ),
        (lambda: inner(lambda s, x: s.plain.add_(1) + x, plain=torch.zeros(6)), "changes self.plain"),
        (lambda: inner(half_precision), "it uses torch.autocast"),
        (lambda: inner(written_without_gradient), "writes without gradients to a value that has one"),
        (lambda: inner(lambda s, x: s.norm(x), norm=nn.BatchNorm1d(6, momentum=None)), "'1.norm' is kept"),
        (
            lambda: inner(lambda s, x: checkpoint(s.linear, x, use_reentrant=True)),
            "custom autograd function 'CheckpointFunction'",
        ),
    ],
)
def test_what_a_graph_would_lose_makes_its_innermost_module_opaque(
    model: Callable[[], nn.Module], reason: str
) -> None:
    assert reason in notes_of(model())


def branch(step: Step, x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def hooked(step: Step, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 3)
    return x


def clamped(step: Step, x: Tensor) -> Tensor:
    with torch.no_grad():
        step.linear.weight.clamp_(-9, 9)
    return x


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (branch, "module '1' .*test_capture.py.*in branch.*depends on the values.*opaque=.'1',"),
        (lambda s, x: x[x > 0].sum(), "depends on values.*opaque"),
        (lambda s, x: x * x.mean().item(), "depends on values"),
        (lambda s, x: x / len(x), r"test_capture.py.*a batch size fixed.*not len\(x\)"),
        (lambda s, x: x.view(4, 6), "a batch size fixed by the code"),
        (lambda s, x: x * 2 if x.shape[0] == 1 else x, "output 0 of the model itself on 1 examples"),
        (hooked, "the gradient of '1.linear.*module '1.linear'"),
        (clamped, "'1.linear.weight': expected a forward that leaves parameters as they are"),
        (lambda s, x: s.linear.bias.data.mul_(0.5) + x, "'1.linear.bias'.*leaves parameters"),
        (lambda s, x: x.nonsense(), "runs on the example, but got AttributeError"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(
    function: Callable[[Step, Tensor], Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        capture(inner(function), (torch.randn(4, 6),))


def test_a_parameter_that_is_not_finite_is_not_written_to_by_that() -> None:
    step = Step(lambda s, x: s.linear(x))
    with torch.no_grad():
        step.linear.weight[0, 0], step.linear.weight[1, 1] = float("nan"), float("inf")
    capture(step, (torch.randn(4, 6),))


def test_a_step_that_would_be_lost_in_the_models_own_forward_is_refused() -> None:
    with pytest.raises(ModelError, match="Move that step into a module of its own"):
        capture(Step(lambda s, x: Swish.apply(x)), (torch.randn(4, 6),))


def test_a_hook_on_a_parameter_is_refused() -> None:
    model = nn.Linear(6, 6)
    model.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ModelError, match="'weight': expected no hook"):
        capture(model, (torch.randn(4, 6),))


@pytest.mark.parametrize("how", ["marked", "by pattern"])
def test_the_user_may_keep_a_module_whole_and_it_computes_the_same(how: str) -> None:
    example = Example(lambda: inner(branch), EXAMPLES["lambdas"].call)
    model = example.model()
    if how == "marked":
        squall.opaque(model[1])

    captured = capture(model, example.inputs(4)[0], opaque=("1",) if how == "by pattern" else ())

    assert captured.graph.notes == ("module '1' is kept whole: as asked for",)
    for batch in (4, 1, 6):
        assert_equals_eager(captured, example, True, batch)


def test_a_pattern_that_fits_nothing_is_refused_with_the_modules_names() -> None:
    with pytest.raises(ConfigError, match=r"'lstm'.*Its modules are 0, 1"):
        capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.randn(2, 2),), opaque=("lstm",))


def test_an_example_of_one_is_refused() -> None:
    with pytest.raises(ModelError, match="at least two examples"):
        capture(nn.Linear(2, 2), (torch.randn(1, 2),))


def test_a_call_of_another_form_is_refused() -> None:
    bound = captured_of("mlp").bind(EXAMPLES["mlp"].model())
    with pytest.raises(ModelError, match=r"input args_0: expected float32 of shape \(batch, 12\)"):
        bound(torch.randn(4, 13))
    with pytest.raises(ModelError, match="float64"):
        bound(torch.randn(4, 12, dtype=torch.float64))
    with pytest.raises(ModelError, match="the form and constants of the example"):
        bound(torch.randn(4, 12), scale=2)


# The caller's things stay as they are.


def test_neither_the_model_nor_the_generators_are_changed() -> None:
    model = EXAMPLES["masked"].model().eval()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    states = random_state()

    capture(model, (torch.randn(4, 6, generator=torch.Generator()),))

    assert random_state() == states
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("_call_impl" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["shared", "siamese", "own_backward"])
def test_a_model_on_the_meta_device_gives_the_same_graph(name: str) -> None:
    example = EXAMPLES[name]
    args, kwargs = example.inputs(4)
    with torch.device("meta"):
        model = example.model()

    graph = capture(model, args, kwargs).graph

    assert graph.schema_hash == captured_of(name).graph.schema_hash
    assert "was not checked" in graph.notes[-1]
