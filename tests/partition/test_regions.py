"""Regions against plain Python sets of index tuples.

Faults planted by hand are listed in `tests/partition/test_rules.py`.
"""

import itertools
import random

import pytest

from squall.partition.indices import Indices
from squall.partition.regions import (
    AnyRegion,
    FlatRegion,
    Region,
    flat_of,
    nothing,
    product_of,
    tiles,
    uncovered,
)
from tests.partition.cutting import random_cut

SHAPES = [(5,), (1,), (4, 3), (2, 3, 4), (3, 1, 2, 2)]
Elements = set[tuple[int, ...]]


def elements(region: AnyRegion) -> Elements:
    """The index tuples of a region, by looking at each element of its tensor."""
    everything = list(itertools.product(*(range(size) for size in region.shape)))
    if isinstance(region, FlatRegion):
        return {everything[at] for at in range(len(everything)) if at in set(region.indices)}
    return {
        index
        for index in everything
        if all(i in set(axis) for i, axis in zip(index, region.axes, strict=True))
    }


def some_indices(rng: random.Random, size: int) -> Indices:
    if rng.random() < 0.5:
        return Indices.span(*sorted((rng.randint(0, size), rng.randint(0, size))))
    return Indices.each(at for at in range(size) if rng.random() < 0.5)


def some_region(rng: random.Random, shape: tuple[int, ...], flat: float = 0.3) -> AnyRegion:
    region = Region(shape, tuple(some_indices(rng, size) for size in shape))
    if rng.random() < flat:
        return FlatRegion(shape, some_indices(rng, len(list(Region.whole(shape).flat()))))
    return region


@pytest.mark.parametrize("shape", SHAPES)
def test_regions_behave_like_sets_of_elements(shape: tuple[int, ...]) -> None:
    rng = random.Random(f"sets {shape}")
    for _ in range(100):
        one, other = some_region(rng, shape), some_region(rng, shape)
        mine, theirs = elements(one), elements(other)
        assert elements(one & other) == mine & theirs
        left = one - other
        assert set().union(*map(elements, left)) == mine - theirs
        assert sum(each.size for each in left) == len(mine - theirs)
        assert all(not each.is_empty for each in left)
        assert one.covers(other) == (theirs <= mine)
        assert one.size == len(mine)
        assert mine <= elements(one.bounding())
        assert one.is_whole == (len(mine) == Region.whole(shape).size)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_position_is_where_an_element_stands_in_the_compact_tensor(shape: tuple[int, ...]) -> None:
    rng = random.Random(f"positions {shape}")
    for _ in range(50):
        outer = some_region(rng, shape, flat=0)
        inner = outer & some_region(rng, shape, flat=0)
        assert isinstance(outer, Region)
        assert isinstance(inner, Region)
        for mine, theirs, place in zip(inner.axes, outer.axes, inner.within(outer), strict=True):
            assert [list(theirs)[at] for at in place] == list(mine)


@pytest.mark.parametrize("shape", SHAPES)
def test_flat_numbers_are_row_major_and_a_product_is_found_again(shape: tuple[int, ...]) -> None:
    rng = random.Random(f"flat {shape}")
    everything = list(itertools.product(*(range(size) for size in shape)))
    for _ in range(50):
        region = some_region(rng, shape, flat=0)
        assert isinstance(region, Region)
        flat = flat_of(region.axes, shape)
        assert {everything[at] for at in flat} == elements(region)
        again = product_of(flat, shape)
        assert again is not None
        assert elements(Region(shape, again)) == elements(region)


def test_what_is_no_product_is_not_taken_for_one() -> None:
    rng = random.Random(4)
    for _ in range(200):
        numbers = some_indices(rng, 12)
        axes = product_of(numbers, (3, 2, 2))
        region = FlatRegion((3, 2, 2), numbers)
        is_product = region.bounding().size == region.size or region.is_empty
        assert (axes is not None) == is_product


def test_regions_join_only_into_a_product() -> None:
    rng = random.Random(5)
    joined = 0
    for _ in range(300):
        one, other = some_region(rng, (3, 4), flat=0), some_region(rng, (3, 4), flat=0)
        assert isinstance(one, Region)
        assert isinstance(other, Region)
        union, box = elements(one) | elements(other), one.joined(other)
        if box is not None:
            joined += 1
            assert elements(box) == union
        elif not one.is_empty and not other.is_empty:
            assert FlatRegion((3, 4), Indices.each(r * 4 + c for r, c in union)).bounding().size > len(union)
    assert joined > 50


def test_random_cuts_tile_their_tensor_and_a_hole_or_an_overlap_is_seen() -> None:
    rng = random.Random(6)
    for shape in SHAPES:
        for _ in range(20):
            parts, whole = random_cut(shape, 4, rng), Region.whole(shape)
            assert tiles(parts, whole)
            largest = max(parts, key=lambda part: part.size)
            rest = [part for part in parts if part is not largest]
            assert set().union(*map(elements, uncovered(whole, rest))) == elements(largest)
            assert not tiles(rest, whole)
            assert not tiles([*parts, largest], whole)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 2)])
def test_nothing_is_legal_everywhere(shape: tuple[int, ...]) -> None:
    none, whole = nothing(shape), Region.whole(shape)
    assert none.is_empty
    assert (none & whole).is_empty
    assert (whole & none).is_empty
    assert whole.covers(none)
    assert none - whole == ()
    assert sum(each.size for each in whole - none) == whole.size
    assert none.flat().size == 0


def test_a_region_beyond_its_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="expected indices within it"):
        Region.of((3, 4), (0, 3), (2, 5))
    with pytest.raises(ValueError, match="expected indices within it"):
        Region.of((3, 4), (0, 3))
    with pytest.raises(ValueError, match="expected indices within it"):
        FlatRegion((2, 2), Indices.span(0, 5))
    with pytest.raises(ValueError, match="expected one shape"):
        Region.whole((2,)).joined(Region.whole((3,)))
    with pytest.raises(ValueError, match="got no index 3"):
        Indices.span(2, 4).positions_in(Indices.span(0, 3))
