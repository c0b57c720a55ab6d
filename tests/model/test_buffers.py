"""Buffers as bytes that others read, and one set made of several replicas'.

Planted faults, each seen to fail a test here: the newest set for a checkpoint; sets of joiners passed over; the newest
slot written over; what a joiner begins with not left.
"""

import pytest
import torch
from torch import nn

from squall.errors import ConfigError
from squall.model.buffers import JOINED, BufferSpace, set_buffers


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


def written(space: BufferSpace, places: list[tuple[int, int]]) -> torch.Tensor:
    """Memory with one set after another, each with its number as mean."""
    memory = torch.zeros(space.arena_bytes, dtype=torch.uint8)
    model = Counted()
    for number, place in enumerate(places):
        model.norm.running_mean.fill_(number)  # type: ignore[union-attr]
        space.write(model, memory, after=place)
    return memory


def mean_of(values: dict[str, torch.Tensor] | None) -> float | None:
    return None if values is None else values["norm.running_mean"][0].item()


@pytest.mark.parametrize(
    ("places", "last", "expected"),
    [
        ([(0, 0), (0, 1), (0, 2)], 1, 1),  # a block is on its way, and is not part of the checkpoint
        ([(0, number) for number in range(9)], 6, 6),  # two blocks are
        ([(0, number) for number in range(9)], 1, 5),  # written over: the oldest that is left
        ([(0, 5), (0, 6)], 4, None),
        ([JOINED, (0, 6)], 4, 0),
    ],
)
def test_a_checkpoint_gets_the_buffers_that_are_as_of_it(
    places: list[tuple[int, int]], last: int, expected: float | None
) -> None:
    space = BufferSpace.of(Counted())
    memory = written(space, places)
    assert mean_of(space.read(memory, lambda epoch, position: position <= last)) == expected
    assert mean_of(space.read(memory)) == len(places) - 1


def test_one_that_joins_begins_with_what_others_have_left_and_leaves_it_too() -> None:
    """B40"""
    space, model = BufferSpace.of(Counted()), Counted()
    own = torch.zeros(space.arena_bytes, dtype=torch.uint8)
    space.join(model, [own, own], own)
    assert space.read(own) is None

    space.join(model, [written(space, [(0, 0), (0, 3)]), own, written(space, [(0, 1)])], own)

    assert dict(model.named_buffers())["norm.running_mean"].tolist() == [0.5, 0.5]
    assert mean_of(space.read(own, lambda epoch, position: False)) == 0.5


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
