"""What a plan makes partitions do and send: the byte formulas, pieces, and who holds what.

`V_up = e*B*n*(P-1)` for n units split over P partitions, `e*B*C*W*(k-1)*(P-1)` for a locally connected map in strips;
down, the same sets reversed (Dean et al., NIPS 2012, figure 1).
"""

import pytest
import torch
from torch import nn

from squall.model.capture import capture
from squall.model.graph import Source
from squall.model.layers import LocallyConnected2d
from squall.partition import planner
from squall.partition.compiler import program_of
from squall.partition.plan import Plan
from squall.partition.program import Datum, Program
from squall.partition.together import Together
from tests.partition.whole import EXAMPLES_HERE, Squares, case, loss_of

B, E = EXAMPLES_HERE, 8


def program(name: str, plan: Plan) -> Program:
    graph = case(name)[0].graph
    return program_of(graph, plan, B, loss_of(graph))


def bytes_of(program: Program, target: str) -> tuple[list[int], list[int]]:
    """Bytes up and down of each output of the ops of this name, in order."""
    up, down = [], []
    for node in program.graph.nodes:
        if node.target == target:
            (value,) = (index for index in node.outputs if index is not None)
            links = program.sent.get(value, {})
            up.append(E * sum(region.size for regions in links.values() for region in regions))
            down.append(
                E
                * sum(
                    region.size
                    for (sender, receiver), regions in links.items()
                    if (value, sender) in program.parts[receiver].returns
                    for region in regions
                )
            )
    return up, down


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_a_dense_net_sends_each_unit_once_to_each_other_partition(parts: int) -> None:
    captured, model, minibatch = case("dense")
    plan = planner.vertical(captured.graph, parts)
    made = program("dense", plan)

    up, down = bytes_of(made, "aten.tanh.default")
    each = E * B * 24 * (parts - 1)
    loss = E * (parts - 1)  # each other partition's sum of squares
    assert up == down == [each, each, 0]
    assert sum(made.bytes_up().values()) == sum(made.bytes_down().values()) == 2 * each + loss
    assert not made.bytes_up(lasting=True)

    together = Together(captured, model, plan)
    together.step(minibatch)
    sent = {link[:2]: size for link, size in together.links.items() if not link[2]}
    returned = {link[1::-1]: size for link, size in together.links.items() if link[2]}
    assert sent == made.bytes_up()
    assert returned == made.bytes_down()


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_locally_connected_net_sends_only_halos(parts: int, kernel: int) -> None:
    torch.manual_seed(1)
    layers = [
        LocallyConnected2d(2, 3, size=(20, 7), kernel=3),
        nn.Tanh(),
        LocallyConnected2d(3, 2, size=(18, 5), kernel=kernel),
    ]
    model = Squares(nn.Sequential(*layers)).double()
    x = torch.randn(B, 2, 20, 7, dtype=torch.float64)
    minibatch = (x, torch.zeros_like(model.model(x)))
    captured = capture(model, minibatch)
    plan = planner.vertical(captured.graph, parts, tiles=("locally_connected2d",))
    made = program_of(captured.graph, plan, B, loss_of(captured.graph))

    halo = E * B * 3 * 5 * (kernel - 1) * (parts - 1)
    assert bytes_of(made, "aten.tanh.default") == ([halo], [halo])
    assert not made.bytes_up(lasting=True)

    together = Together(captured, model, plan)
    together.step(minibatch)
    assert {link[:2]: size for link, size in together.links.items() if not link[2]} == made.bytes_up()


def test_a_partition_holds_no_parameter_but_its_own() -> None:
    for name, plan in [(n, p) for n in ("lenet", "decoder") for p in _plans(n)]:
        captured, model, _ = case(name)
        together = Together(captured, model, plan)
        graph, held = captured.graph, dict.fromkeys(captured.graph.from_outside(Source.PARAMETER), 0)
        for worker in together.workers:
            for value, tensor in worker.values.items():
                assert (
                    tuple(tensor.shape)
                    == plan.regions(value, graph.values[value].shape_at(B))[worker.partition].sizes
                )
                held[value] += tensor.numel()
        assert held == {value: torch.Size(graph.values[value].shape_at(B)).numel() for value in held}


def _plans(name: str) -> list[Plan]:
    graph = case(name)[0].graph
    return [planner.vertical(graph, 3), planner.horizontal(graph, 2), planner.random(graph, 3, 1)]


def test_a_vertical_dense_net_needs_no_partition_to_hold_more_than_its_part() -> None:
    captured, model, _ = case("dense")
    together = Together(captured, model, planner.vertical(captured.graph, 4))
    sizes = [sum(tensor.numel() for tensor in worker.values.values()) for worker in together.workers]
    assert sizes == [sum(p.numel() for p in model.parameters()) // 4] * 4


def test_a_piece_begins_with_what_is_received_and_ends_with_what_is_sent() -> None:
    for name in ("lenet", "decoder"):
        for plan in _plans(name):
            made = program(name, plan)
            for part in made.parts:
                seen: set[int] = set()
                for piece in part.pieces:
                    for at, task in enumerate(piece.tasks):
                        fresh = {
                            v for v, region in task.reads if v in part.receives and not region.is_empty
                        } - seen
                        assert at == 0 or not fresh
                        seen |= fresh
                        assert at == len(piece.tasks) - 1 or not set(task.makes) & set(part.sends)


def test_what_is_received_at_all_is_received_in_just_the_regions_that_are_needed() -> None:
    made = program("lenet", planner.random(case("lenet")[0].graph, 3, 5))
    for part in made.parts:
        for value, parts in part.holds.items():
            needed = [
                region
                for piece in part.pieces
                for task in piece.tasks
                for v, region in task.reads
                if v == value
            ]
            for held in parts:
                if held.sender != part.partition:
                    assert any((held.region & region).size for region in needed)
                    assert (held.region & made.data[value].owners[part.partition]).is_empty


def test_tied_weights_have_one_owner_for_each_element_and_gradients_from_all_readers() -> None:
    captured, _, _ = case("decoder")
    made = program("decoder", planner.horizontal(captured.graph, 3))
    (tied,) = [i for i in captured.graph.from_outside(Source.PARAMETER) if captured.graph.values[i].aliases]
    (link,) = made.sent[tied]
    assert made.parts[link[0]].expects[tied] == (link[1],)
    assert made.bytes_up(lasting=True) == made.bytes_down(lasting=True)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.complex64, torch.int32]
)
def test_an_element_has_as_many_bytes_as_torch_says(dtype: torch.dtype) -> None:
    datum = Datum(name="x", shape=(), dtype=str(dtype).removeprefix("torch."), owners=())
    assert datum.itemsize == dtype.itemsize
