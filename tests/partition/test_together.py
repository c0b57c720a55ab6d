"""Whole models, cut in every way over one to four partitions, against plain PyTorch.

Faults planted by hand, each seen to fail a test here or beside it: a value sent once for each reader instead of each
partition · backward without waiting for another partition's gradient · the gradient of the first peer only · of the
first reader only · a microbatch with the weight of a minibatch · pieces that go on after what is sent · torch's own mask
for dropout · a gradient awaited from whoever reads an empty region (all wait for ever) · no limit on microbatches in
flight · buffers that do not move · microbatches that number their masks as if each were the minibatch. A gradient awaited
behind `detach` was a fault found here, not planted.
"""

from collections.abc import Callable

import pytest
import torch

from squall.errors import ConfigError
from squall.partition import planner
from squall.partition.agenda import BackwardFirst, FillDrain
from squall.partition.compiler import program_of
from squall.partition.engine import Message, Worker
from squall.partition.masks import Draw
from squall.partition.plan import Plan
from squall.partition.program import FED
from squall.partition.together import Together
from tests.partition.whole import case, largest_difference, loss_of

MODELS = ["mlp", "lenet", "alexnet", "resnet", "local", "decoder"]
CUTS = [
    "horizontal 3",
    "vertical 2",
    "vertical 4",
    "mixed 1 2",
    "random 2",
    "random 3",
    "random 4",
]


def plan_of(name: str, cut: str, seed: int = 0) -> Plan:
    graph, (kind, *numbers) = case(name)[0].graph, cut.split()
    counts = [int(number) for number in numbers]
    if kind == "random":
        return planner.random(graph, counts[0], seed)
    if kind == "mixed":
        return planner.mixed(graph, counts)
    if kind == "tiles":
        return planner.vertical(
            graph, counts[0], tiles=("conv2d", "locally_connected2d", "avg_pool2d", "max_pool2d")
        )
    return {"horizontal": planner.horizontal, "vertical": planner.vertical}[kind](graph, counts[0])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_cut_model_trains_as_the_model_does(name: str, cut: str) -> None:
    assert largest_difference(name, plan_of(name, cut)) < 1e-8


@pytest.mark.parametrize("name", ["lenet", "local"])
def test_a_model_cut_in_space_trains_as_the_model_does(name: str) -> None:
    plan = plan_of(name, "tiles 3")
    assert largest_difference(name, plan) < 1e-8


@pytest.mark.parametrize("cut", ["horizontal 3", "vertical 2", "random 3"])
def test_an_opaque_module_runs_whole_on_one_partition_of_a_cut_model(cut: str) -> None:
    assert largest_difference("recurrent", plan_of("recurrent", cut)) < 1e-8


def test_what_is_frozen_or_detached_gets_no_gradient_and_no_message() -> None:
    plan = plan_of("frozen", "random 3", 1)
    assert largest_difference("frozen", plan) < 1e-8
    graph = case("frozen")[0].graph
    program = program_of(graph, plan, 4, loss_of(graph))
    teacher = [at for at, value in enumerate(graph.values) if "teacher" in value.name]
    assert teacher
    assert not any(program.data[at].has_gradient for at in teacher)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*MODELS, "frozen", "shared", "recurrent"])
def test_twenty_steps_under_random_plans_are_those_of_the_model(name: str, seed: int) -> None:
    for cut in ("random 2", "random 3", "random 4"):
        assert largest_difference(name, plan_of(name, cut, seed), steps=20, seed=seed) < 1e-8


ALL_CUTS = [
    *(f"{way} {count}" for way in ("vertical", "horizontal") for count in (1, 2, 3, 4)),
    *("mixed 1 1", "mixed 2 1", "mixed 1 2", "mixed 2 2", "mixed 1 3", "mixed 1 2 1"),
]


@pytest.mark.nightly
@pytest.mark.parametrize("cut", ALL_CUTS)
@pytest.mark.parametrize("name", [*MODELS, "recurrent"])
def test_twenty_steps_under_every_made_plan_are_those_of_the_model(name: str, cut: str) -> None:
    assert largest_difference(name, plan_of(name, cut), steps=20) < 1e-8


def test_one_partition_computes_what_the_model_computes_to_the_bit_in_one_piece() -> None:
    for name in MODELS:
        plan = plan_of(name, "horizontal 1")
        assert largest_difference(name, plan) == 0
        graph = case(name)[0].graph
        (part,) = program_of(graph, plan, 4, loss_of(graph)).parts
        assert len(part.pieces) == 1


def test_the_order_of_messages_changes_nothing() -> None:
    captured, model, minibatch = case("lenet")
    plan, found = plan_of("lenet", "random 3", 4), []
    for seed in range(4):
        together = Together(captured, model, plan, seed=seed)
        together.step(minibatch)
        found.append((together.outputs(), together.gradients()))
    for outputs, gradients in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs, found[0][0], strict=True))
        assert all(torch.equal(gradients[key], found[0][1][key]) for key in found[0][1])


@pytest.mark.parametrize("cut", ["horizontal 3", "vertical 2", "random 3"])
@pytest.mark.parametrize("policy", [FillDrain(), BackwardFirst(1), BackwardFirst(2), BackwardFirst(None)])
def test_microbatches_add_up_to_the_minibatch(cut: str, policy: FillDrain | BackwardFirst) -> None:
    captured, model, minibatch = case("lenet")
    together = Together(captured, model, plan_of("lenet", cut))
    together.step(minibatch)
    whole = together.gradients()
    for microbatches in (2, 4):
        together.step(minibatch, microbatches=microbatches, policy=policy)
        for key, gradient in together.gradients().items():
            torch.testing.assert_close(gradient, whole[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_partition_is_sent_more_microbatches_than_the_limit_whoever_is_slow(limit: int) -> None:
    """A sender's place is free again when the gradient is back, so nobody can be flooded: that is the credit."""
    captured, model, minibatch = case("lenet")
    most = 0
    for seed in range(8):
        together = Together(captured, model, plan_of("lenet", "horizontal 3"), seed=seed)

        def watched(worker: Worker, receive: Callable[[Message], None]) -> Callable[[Message], None]:
            def taken(message: Message) -> None:
                nonlocal most
                receive(message)
                most = max(most, sum(_holds_of_others(worker, micro) for micro in range(4)))

            return taken

        for worker in together.workers:
            worker.receive = watched(worker, worker.receive)  # type: ignore[method-assign]
        together.step(minibatch, microbatches=4, policy=BackwardFirst(limit))
    assert most == limit


def _holds_of_others(worker: Worker, micro: int) -> bool:
    """Whether a worker has anything of a microbatch that another partition sent."""
    return any(
        tensor is not None and held.sender not in (FED, worker.partition)
        for value, slots in worker._micros[micro].slots.items()
        for held, tensor in zip(worker.part.holds[value], slots, strict=True)
    )


def test_parameters_travel_once_for_all_microbatches() -> None:
    captured, model, minibatch = case("lenet")
    together = Together(captured, model, plan_of("lenet", "random 3"))
    for microbatches in (1, 4):
        before = together.links.copy()
        together.step(minibatch, microbatches=microbatches)
        sent = together.links - before
        program = together.program(4 // microbatches)
        lasting = {link[:2]: size for link, size in sent.items() if link[3] and not link[2]}
        assert lasting == program.bytes_up(lasting=True)
        moving = {link[:2]: size for link, size in sent.items() if not link[3] and not link[2]}
        assert moving == {link: size * microbatches for link, size in program.bytes_up().items()}
        down = {link[1::-1]: size for link, size in sent.items() if link[2] and not link[3]}
        assert down == {link: size * microbatches for link, size in program.bytes_down().items()}


def test_microbatches_of_a_model_that_couples_examples_are_refused() -> None:
    captured, model, minibatch = case("resnet")
    together = Together(captured, model, plan_of("resnet", "horizontal 1"))
    with pytest.raises(ConfigError, match=r"batch_norm.*couples examples"):
        together.step(minibatch, microbatches=2)
    captured, model, minibatch = case("lenet")
    with pytest.raises(ConfigError, match="divides 4 examples"):
        Together(captured, model, plan_of("lenet", "horizontal 1")).step(minibatch, microbatches=3)


def test_random_masks_do_not_depend_on_the_cut() -> None:
    captured, model, minibatch = case("decoder", dropout=0.5)
    graph, found = captured.graph, []
    for plan in (planner.horizontal(graph, 1), planner.vertical(graph, 3), planner.random(graph, 4, 0)):
        for position in (0, 1):
            together = Together(captured, model, plan)
            together.step(minibatch, draw=Draw(seed=1, position=position))
            found.append((together.outputs()[1], together.gradients()["model.position"]))
    for at, same in enumerate(found):
        torch.testing.assert_close(same, found[at % 2], rtol=0, atol=1e-10)
    assert float((found[1][0] - found[0][0]).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["decoder", "alexnet"])
@pytest.mark.parametrize("cut", ["horizontal 2", "vertical 3", "random 3"])
def test_microbatches_have_the_masks_of_the_minibatch(name: str, cut: str) -> None:
    captured, model, minibatch = case(name, dropout=0.5)
    way, count = cut.split()
    plan = (
        planner.random(captured.graph, 3, 1)
        if way == "random"
        else getattr(planner, way)(captured.graph, int(count))
    )
    together = Together(captured, model, plan)
    draw = Draw(seed=1, position=3)
    together.step(minibatch, draw=draw)
    whole, (_, out) = together.gradients(), together.outputs()
    for microbatches, policy in ((2, FillDrain()), (4, BackwardFirst(2))):
        together.step(minibatch, microbatches=microbatches, policy=policy, draw=draw)
        parts = torch.cat([together.outputs(micro)[1] for micro in range(microbatches)])
        torch.testing.assert_close(parts, out, rtol=0, atol=1e-12)
        for key, gradient in together.gradients().items():
            torch.testing.assert_close(gradient, whole[key], rtol=0, atol=1e-12)


def test_a_forward_pass_alone_gives_the_outputs_and_sends_nothing_down() -> None:
    captured, model, minibatch = case("mlp")
    together = Together(captured, model, plan_of("mlp", "vertical 3"), trains=False)
    together.step(minibatch)
    loss, out = together.outputs()
    theirs = model(*minibatch)
    torch.testing.assert_close((loss, out), theirs, rtol=0, atol=1e-12)
    assert not any(is_gradient for _, _, is_gradient, _ in together.links)
    assert not together.gradients()
