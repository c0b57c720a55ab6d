"""Tests of squall.slices: sets of ranges against plain Python sets.

Faults planted, each caught: `add` without joining on the left · on the right · `cover` looking at the range at or
after the start only · `gaps` forgetting the last gap · `Range` accepting an empty one · `__len__` counting ranges.
"""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.slices import Cover, Range, RangeSet

ranges = st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def filled(wanted: list[tuple[int, int]]) -> tuple[RangeSet, set[int]]:
    """A set of those ranges that meet none before them, and the numbers in it."""
    held, numbers = RangeSet(), set[int]()
    for start, stop in wanted:
        if numbers.isdisjoint(range(start, stop)):
            held.add(start, stop)
            numbers.update(range(start, stop))
    return held, numbers


@given(st.lists(ranges), ranges)
def test_a_range_is_covered_as_its_numbers_are(wanted: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    held, numbers = filled(wanted)
    asked_for = set(range(*asked))

    cover = held.cover(*asked)

    assert (cover is Cover.CONTAINED) == (asked_for <= numbers)
    assert (cover is Cover.DISJOINT) == asked_for.isdisjoint(numbers)


@given(st.lists(ranges))
def test_a_set_holds_what_was_added_as_few_sorted_ranges(wanted: list[tuple[int, int]]) -> None:
    held, numbers = filled(wanted)
    as_ranges = list(held)

    assert {number for start, stop in as_ranges for number in range(start, stop)} == numbers
    assert all(stop < start for (_, stop), (start, _) in pairwise(as_ranges))
    assert len(held) == len(numbers)
    assert held == RangeSet(reversed(as_ranges))


@given(st.lists(ranges), st.integers(0, 40))
def test_gaps_are_the_numbers_that_are_missing(wanted: list[tuple[int, int]], stop: int) -> None:
    held, numbers = filled(wanted)

    gaps = list(held.gaps(stop))

    assert [number for gap in gaps for number in range(*gap)] == sorted(set(range(stop)) - numbers)
    assert all(start < end for start, end in gaps)


@given(st.lists(ranges), ranges)
def test_what_meets_the_set_cannot_be_added_and_changes_nothing(
    wanted: list[tuple[int, int]], more: tuple[int, int]
) -> None:
    held, numbers = filled(wanted)
    before = list(held)
    if numbers.isdisjoint(range(*more)):
        return

    with pytest.raises(ValueError, match="meets"):
        held.add(*more)

    assert list(held) == before


def test_an_empty_range_cannot_be_added() -> None:
    with pytest.raises(ValueError, match="empty"):
        RangeSet().add(3, 3)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 2)])
def test_a_range_is_never_empty_and_begins_at_0_or_later(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"start={start}, stop={stop}"):
        Range(start, stop)


def test_a_range_says_its_size_and_sorts_by_its_start() -> None:
    assert Range(2, 6).size == 4
    assert sorted([Range(3, 4), Range(0, 9)])[0] == Range(0, 9)
