"""Opaque calls: shapes learned from two runs, and the op itself.

Faults planted here by hand, each seen to fail a test: the fixed part of a size left out · buffers lent without a copy.
"""

import pytest
import torch
from torch import Tensor, nn

from squall.errors import ModelError
from squall.model.capture import capture
from squall.model.opaque import OpaqueCall, Output, Recorder, Shapes, is_marked, opaque
from squall.model.stand_in import calls_wrapped
from squall.model.structure import Structure


def call(inputs: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...]) -> OpaqueCall:
    leaf = Structure(None)
    cpu = torch.device("cpu")
    return OpaqueCall(
        key="m#0",
        module="m",
        arguments=leaf,
        result=leaf,
        inputs=inputs,
        outputs=tuple(Output(shape, torch.float32, cpu) for shape in outputs),
        parameters=(),
        buffers=(),
        is_random=False,
    )


@pytest.mark.parametrize(
    ("inputs", "outputs", "given", "expected"),
    [
        (((2, 5), (4, 5)), ((2, 7), (4, 7)), (6, 5), (6, 7)),  # grows with the batch
        (((2, 5), (4, 5)), ((6, 7), (12, 7)), (5, 5), (15, 7)),  # three times it
        (((3, 2), (3, 4)), ((1, 3), (1, 5)), (3, 9), (1, 10)),  # one more than it, in another dimension
        (((6, 5), (12, 5)), ((2, 5), (4, 5)), (21, 5), (7, 5)),  # the input had it merged with another
        (((5, 5), (5, 5)), ((4, 3), (4, 3)), (5, 5), (4, 3)),  # does not follow it
    ],
)
def test_output_sizes_follow_the_batch_as_two_runs_say(
    inputs: tuple[tuple[int, ...], ...],
    outputs: tuple[tuple[int, ...], ...],
    given: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    shapes = Shapes((2, 4), *(call((i,), (o,)) for i, o in zip(inputs, outputs, strict=True)))
    (made,) = shapes.fake([torch.zeros(given)])
    assert tuple(made.shape) == expected


def test_a_size_that_does_not_grow_evenly_is_refused() -> None:
    shapes = Shapes((2, 4), call(((2, 5),), ((3,),)), call(((4, 5),), ((4,),)))
    with pytest.raises(ModelError, match="'m': expected sizes that are fixed or grow evenly"):
        shapes.fake([torch.zeros(6, 5)])


class Smoothed(nn.Module):
    """A branch on values, and a buffer: in place or set anew."""

    def __init__(self, assigned: bool) -> None:
        super().__init__()
        self.assigned = assigned
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        mean = y.detach().mean(0)
        if mean.sum() > 0:
            mean = -mean
        if self.assigned:
            self.mean = 0.5 * self.mean + mean
        else:
            self.mean.mul_(0.5).add_(mean)
        return y - self.mean


@pytest.mark.parametrize("assigned", [True, False])
def test_the_buffers_of_an_opaque_module_go_in_and_come_out(assigned: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), opaque(Smoothed(assigned)))
    captured = capture(model, (torch.randn(4, 3),))
    assert [name for name, _ in captured.graph.mutations] == ["1.mean"]
    bound = captured.bind(model)
    x = torch.randn(5, 3)
    before = model[1].mean.clone()

    got = bound(x)
    after = model[1].mean.clone()
    model[1].mean.copy_(before)
    wanted = model(x)

    assert torch.equal(got, wanted)
    assert torch.equal(after, model[1].mean)


def test_an_opaque_op_computes_with_the_parameters_it_is_given() -> None:
    lstm = nn.LSTM(3, 4)
    recorder = Recorder([""])
    x = torch.randn(2, 5, 3)
    with calls_wrapped(lstm, recorder.wrap):
        lstm(x)
    run = recorder.calls[0].bind(lstm)
    others = [torch.randn_like(p).requires_grad_() for p in lstm.parameters()]
    reference = nn.LSTM(3, 4)
    reference.load_state_dict(dict(zip(dict(lstm.named_parameters()), others, strict=True)))

    outputs = run("#0", [x], others, [])

    assert torch.equal(outputs[0], reference(x)[0])
    outputs[0].sum().backward()
    reference(x)[0].sum().backward()
    for ours, theirs in zip(others, reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert all(p.grad is None for p in lstm.parameters())


def test_a_result_of_another_form_is_refused() -> None:
    class Moody(nn.Module):
        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            return x if x.shape[0] < 3 else (x, x)

    recorder = Recorder([""])
    with calls_wrapped(module := Moody(), recorder.wrap):
        module(torch.zeros(2))
    with pytest.raises(ModelError, match="a result of the same form as on the example"):
        recorder.calls[0].bind(module)("#0", [torch.zeros(3)], [], [])


def test_only_a_marked_module_is_marked() -> None:
    inside = nn.Linear(2, 2)
    outside = opaque(nn.Sequential(inside))
    assert is_marked(outside)
    assert not is_marked(inside)
