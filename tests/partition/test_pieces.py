"""Assembling: every way that pieces can lie in a frame gives what padding and indexing the whole tensor gives."""

import random

import pytest
import torch
from torch.nn.functional import pad

from squall.errors import LocalProtocolError
from squall.partition.pieces import Assembly, Frame, Piece, take
from squall.partition.regions import Region
from tests.partition.cutting import numbers, random_cut
from tests.partition.test_regions import some_region


def test_a_piece_cut_out_holds_the_regions_elements_in_order() -> None:
    rng = random.Random(1)
    for shape in [(6,), (3, 4), (2, 3, 4)]:
        whole = torch.arange(Region.whole(shape).size).reshape(shape)
        for _ in range(60):
            outer = some_region(rng, shape)
            inner = some_region(rng, shape) & outer
            held = Piece(outer, whole.reshape(-1)[numbers(outer)].reshape(outer.sizes))
            assert torch.equal(take(held, inner).reshape(-1), whole.reshape(-1)[numbers(inner)])


def test_a_frame_is_the_whole_tensor_indexed_and_padded() -> None:
    rng = random.Random(2)
    for _ in range(300):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(99)))
        region = some_region(rng, shape)
        edges = [rng.choice([0, 0, 1, 2]) for _ in shape] if isinstance(region, Region) else [0]
        frame = Frame(region, tuple(edges), tuple(reversed(edges)), -3.0)
        held = random_cut(shape, 3, rng)
        tensors = [take(Piece(Region.whole(shape), whole), each) for each in held]
        inside = take(Piece(Region.whole(shape), whole), region)
        sides = [each for pair in zip(edges[::-1], edges, strict=True) for each in pair]
        made = Assembly(frame, region, held, torch.float32)(tensors)
        assert torch.equal(made, pad(inside, sides, value=-3.0))


def test_a_piece_that_is_the_frame_is_not_copied_and_a_part_of_it_is_a_view() -> None:
    held, tensor = Region.of((8, 4), (0, 6), (0, 4)), torch.randn(6, 4)
    same = Assembly(Frame.bare(held), held, [held])([tensor])
    part = Region.of((8, 4), (2, 5), (0, 4))
    view = Assembly(Frame.bare(part), part, [held])([tensor])
    assert same is tensor
    assert Assembly(Frame.bare(held), held, [held]).hands_on
    assert not Assembly(Frame.bare(part), part, [held]).hands_on
    assert not Assembly(Frame(held, (1, 0), (0, 0)), held, [held]).hands_on
    assert view.data_ptr() == tensor[2:].data_ptr()


def test_pieces_that_leave_a_hole_or_overlap_are_refused() -> None:
    whole = Region.whole((6,))
    for held in ([Region.of((6,), (0, 3))], [Region.of((6,), (0, 4)), Region.of((6,), (3, 6))]):
        with pytest.raises(LocalProtocolError, match="disjoint pieces that cover"):
            Assembly(Frame.bare(whole), whole, held)
