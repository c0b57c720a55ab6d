"""Messages node by node: the same step at about twice the bytes, in whatever order the records come.

Faults planted by hand, each seen to fail a test: numbers within the region instead of the value · values in the order in which
they came · gradients over the regions of the opposite link · numbers left out of the bytes.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from squall.model.capture import capture
from squall.model.layers import LocallyConnected2d
from squall.partition import planner
from squall.partition.engine import Message
from squall.partition.records import as_message, as_records, numbers
from squall.partition.regions import FlatRegion, Indices, Region
from squall.partition.together import Together
from tests.partition.whole import EXAMPLES_HERE, Squares, case, dense

PARTS = 3


@pytest.mark.parametrize("name", ["mlp", "lenet", "decoder", "local"])
def test_a_step_by_records_is_the_step_by_messages(name: str) -> None:
    captured, model, minibatch = case(name)
    plan = planner.random(captured.graph, PARTS, 1)
    found = []
    for records in (False, True):
        together = Together(captured, model, plan, records=records)
        together.step(minibatch)
        found.append((together.outputs(), together.gradients()))
    (outputs, gradients), (others, theirs) = found
    assert all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True))
    assert all(torch.equal(gradients[key], theirs[key]) for key in gradients)


@pytest.mark.parametrize("kind", ["dense", "local"])
def test_in_float32_records_cost_twice_the_messages_which_cost_what_the_formula_says(kind: str) -> None:
    torch.manual_seed(1)
    if kind == "dense":
        model, x, tiles = dense(600, 3), torch.randn(EXAMPLES_HERE, 600), ()
        formula = 2 * 600 * (PARTS - 1)  # two layers' units to each other partition
    else:
        layers = [
            LocallyConnected2d(2, 3, size=(20, 17), kernel=3),
            LocallyConnected2d(3, 2, size=(18, 15), kernel=4),
        ]
        model, x, tiles = (
            nn.Sequential(*layers),
            torch.randn(EXAMPLES_HERE, 2, 20, 17),
            ("locally_connected2d",),
        )
        formula = 3 * 15 * (4 - 1) * (PARTS - 1)  # channels, columns, and rows of halo
    whole = Squares(model)
    minibatch = (x, torch.zeros_like(model(x)))
    captured = capture(whole, minibatch)
    plan = planner.vertical(captured.graph, PARTS, tiles=tiles)
    sent = {}
    for records in (False, True):
        together = Together(captured, whole, plan, records=records)
        together.step(minibatch)
        for way in (False, True):
            sent[records, way] = sum(size for link, size in together.links.items() if link[2] == way)
    for way in (False, True):
        assert sent[False, way] == pytest.approx(4 * EXAMPLES_HERE * formula, rel=0.03)
        assert sent[True, way] == 2 * sent[False, way]


def test_records_may_come_in_any_order() -> None:
    captured, model, minibatch = case("lenet")
    together = Together(captured, model, planner.random(captured.graph, PARTS, 2))
    together.step(minibatch)
    program = together.program(EXAMPLES_HERE)
    tried = 0
    for value, links in program.sent.items():
        for (sender, receiver), regions in links.items():
            for is_gradient in (False, True):
                message = Message(
                    sender=receiver if is_gradient else sender,
                    receiver=sender if is_gradient else receiver,
                    value=value,
                    micro=0,
                    is_gradient=is_gradient,
                    tensors=tuple(torch.randn(region.sizes) for region in regions),
                )
                told = as_records(message, program)
                order = torch.randperm(told.numbers.numel())
                mixed = replace(told, numbers=told.numbers[order], values=told.values[order])
                back = as_message(mixed, program)
                assert all(torch.equal(a, b) for a, b in zip(back.tensors, message.tensors, strict=True))
                assert (back.sender, back.receiver, back.is_gradient) == (
                    message.sender,
                    message.receiver,
                    is_gradient,
                )
                tried += 1
    assert tried > 20


def test_numbers_are_those_of_the_whole_value() -> None:
    whole = torch.arange(24).reshape(2, 3, 4)
    region = Region((2, 3, 4), (Indices.span(1, 2), Indices.each([0, 2]), Indices.span(1, 3)))
    assert numbers(region).tolist() == whole[1][[0, 2]][:, 1:3].flatten().tolist()
    assert numbers(FlatRegion((2, 3), Indices.each([0, 4, 5]))).tolist() == [0, 4, 5]
    assert numbers(Region.of((4,), (2, 2))).tolist() == []
