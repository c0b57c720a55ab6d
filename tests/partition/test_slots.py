"""Tests of squall.partition.slots: every message of a step has memory of its own, of the right size.

Faults planted by hand, each seen to fail a test here: gradients in the place of the values · one place for all
microbatches · sizes in elements · other partitions' messages among them.
"""

from itertools import combinations, pairwise

import pytest

from squall.partition import planner
from squall.partition.compiler import program_of
from squall.partition.plan import Plan
from squall.partition.slots import Key, slots_between
from squall.partition.together import Together
from tests.partition.whole import case, loss_of


def plans() -> list[tuple[str, Plan]]:
    lenet, resnet = case("lenet")[0].graph, case("resnet")[0].graph
    return [
        ("lenet", planner.vertical(lenet, 2)),
        ("lenet", planner.random(lenet, 3, 1)),
        ("resnet", planner.random(resnet, 3, 2)),
    ]


@pytest.mark.parametrize(("name", "plan"), plans(), ids=["vertical", "random", "batch norm"])
def test_each_message_of_a_step_has_a_place_of_its_size_that_no_other_has(name: str, plan: Plan) -> None:
    captured, model, tensors = case(name)[:3]
    together = Together(captured, model, plan)
    sent = []
    count = together._posted
    together._posted = lambda program, messages: (sent.extend(messages), count(program, messages))[1]  # type: ignore[method-assign,assignment,func-returns-value]

    together.step(tensors)

    program = together.program(captured.batch(tensors))
    assert sent
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for message in sent:
        pair = min(message.sender, message.receiver), max(message.sender, message.receiver)
        slots = slots_between(program, 1, *pair)
        assert slots == slots_between(program, 1, *reversed(pair))
        places = slots.places[Key(message.sender, message.value, message.micro, message.is_gradient)]
        assert [(place.dtype, place.shape) for place in places] == [
            (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in message.tensors
        ]
        for place, tensor in zip(places, message.tensors, strict=True):
            stop = place.start + tensor.numel() * tensor.element_size()
            assert stop <= slots.num_bytes
            taken.setdefault(pair, []).append((place.start, stop))
    for ranges in taken.values():
        ranges.sort()
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))


def test_microbatches_have_places_of_their_own_and_what_lasts_has_one() -> None:
    graph = case("lenet")[0].graph
    plan = planner.random(graph, 3, 1)
    program = program_of(graph, plan, 2, loss_of(graph))
    for pair in combinations(range(3), 2):
        keys = list(slots_between(program, 4, *pair).places)
        assert len(set(keys)) == len(keys)
        for key in keys:
            expected = {None} if program.data[key.value].lasts else set(range(4))
            same = {
                k.micro
                for k in keys
                if (k.sender, k.value, k.is_gradient) == (key.sender, key.value, key.is_gradient)
            }
            assert same == expected
