"""Buffers as bytes that others read, and one set made of several replicas'."""

import pytest
import torch
from torch import nn

from squall.errors import ConfigError
from squall.model.buffers import BufferSpace, set_buffers


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("flag", torch.tensor(False))


def sets() -> list[dict[str, torch.Tensor]]:
    low = {name: value.clone() for name, value in Counted().named_buffers()}
    high = {name: value + 3 if value.dtype != torch.bool else ~value for name, value in low.items()}
    return [low, high]


def test_what_was_written_is_read_and_nothing_before() -> None:
    model, other = Counted(), Counted()
    space = BufferSpace.of(model)
    memory = torch.zeros(space.arena_bytes, dtype=torch.uint8)
    assert space.read(memory) is None
    model.norm(torch.randn(5, 2))

    space.write(model, memory)

    values = space.read(memory)
    assert values is not None
    set_buffers(other, values)
    for name, value in model.named_buffers():
        assert torch.equal(dict(other.named_buffers())[name], value)


def test_a_write_under_way_is_not_read() -> None:
    model = Counted()
    space = BufferSpace.of(model)
    memory = torch.zeros(space.arena_bytes, dtype=torch.uint8)
    space.write(model, memory)
    memory[0] += 1
    assert space.read(memory) is None


def test_by_default_floats_are_averaged_integers_the_largest_and_others_the_first() -> None:
    """B40"""
    one = BufferSpace.of(Counted()).merge(sets())
    assert one["norm.running_mean"].tolist() == [1.5, 1.5]
    assert one["norm.num_batches_tracked"].item() == 3
    assert one["norm.num_batches_tracked"].dtype == torch.int64
    assert one["flag"].item() is False


def test_a_policy_by_name_holds() -> None:
    one = BufferSpace.of(Counted(), {"*.running_mean": "first", "*.running_var": "max"}).merge(sets())
    assert one["norm.running_mean"].tolist() == [0.0, 0.0]
    assert one["norm.running_var"].tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"*": "average"}, "expected one of mean, max, first"),
        ({"nothing": "mean"}, "fits none"),
        ({"norm.num_batches_tracked": "mean"}, "'mean' is for floating-point buffers"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(policies: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BufferSpace.of(Counted(), policies)
