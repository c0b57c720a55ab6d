"""One worker: what it refuses, and that it waits for what it needs."""

import pytest

from squall.errors import LocalProtocolError
from squall.model.graph import Source
from squall.partition import planner
from squall.partition.engine import Message, inputs_for
from squall.partition.together import Together
from tests.partition.whole import case


def begun() -> tuple[Together, list[list[Message]]]:
    captured, model, minibatch = case("mlp")
    together = Together(captured, model, planner.horizontal(captured.graph, 2))
    made = together.program(4)
    names = dict(zip(captured.graph.from_outside(Source.INPUT), minibatch, strict=True))
    sent = [worker.begin(made, [inputs_for(made, worker.partition, names)]) for worker in together.workers]
    return together, sent


def test_a_worker_runs_nothing_before_its_inputs_are_here() -> None:
    together, sent = begun()
    assert sent == [[], []]
    first, second = together.workers
    assert second.run_one() is None
    (message,) = first.run_one() or ()
    assert (message.sender, message.receiver, message.is_gradient) == (0, 1, False)
    assert first.run_one() is None
    second.receive(message)
    assert second.run_one() == []
    (back,) = second.run_one() or ()
    assert back.is_gradient
    assert back.num_bytes == message.num_bytes
    assert second.is_finished
    assert not first.is_finished
    first.receive(back)
    assert first.run_one() == []
    assert first.is_finished


def test_a_value_that_comes_twice_is_refused() -> None:
    together, _ = begun()
    first, second = together.workers
    (message,) = first.run_one() or ()
    second.receive(message)
    with pytest.raises(LocalProtocolError, match="each value once"):
        second.receive(message)
    second.run_one()
    (back,) = second.run_one() or ()
    first.receive(back)
    with pytest.raises(LocalProtocolError, match="each value once"):
        first.receive(back)


def test_messages_hold_memory_of_their_own_layout() -> None:
    captured, model, minibatch = case("lenet")
    together = Together(captured, model, planner.random(captured.graph, 3, 3))
    made = together.program(4)
    names = dict(zip(captured.graph.from_outside(Source.INPUT), minibatch, strict=True))
    for worker in together.workers:
        for message in worker.begin(made, [inputs_for(made, worker.partition, names)]):
            regions = made.sent[message.value][message.sender, message.receiver]
            assert [tuple(tensor.shape) for tensor in message.tensors] == [region.sizes for region in regions]
            assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in message.tensors)


def test_nothing_is_kept_of_a_microbatch_that_is_done_but_results() -> None:
    captured, model, minibatch = case("lenet")
    together = Together(captured, model, planner.vertical(captured.graph, 2))
    together.step(minibatch, microbatches=2)
    results = together.program(2).results
    for worker in together.workers:
        for context in worker._micros:
            assert set(context.slots) <= results
            assert not context.traces
            assert not context.back
