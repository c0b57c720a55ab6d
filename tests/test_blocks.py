"""Tests of squall.blocks: sets of blocks against plain Python sets of positions.

Faults planted, each caught: epochs of a stage mixed up · `entries` unsorted · `missing` not cut at the block's
first position · `str` naming `stop` · `Block` accepting an empty one · `num_minibatches` counting ranges.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.blocks import Block, BlockSet, Outcome
from squall.observe import ledger
from squall.slices import Cover
from squall.wire import messages


def block(stage: int, epoch: int, first: int, length: int) -> Block:
    return Block(stage, epoch, first, first + length)


blocks = st.builds(block, st.integers(0, 1), st.integers(0, 2), st.integers(0, 12), st.integers(1, 4))


def positions(block: Block) -> set[tuple[int, int, int]]:
    return {(block.stage, block.epoch, position) for position in range(block.first, block.stop)}


def filled(wanted: list[Block]) -> tuple[BlockSet, set[tuple[int, int, int]]]:
    held, places = BlockSet(), set[tuple[int, int, int]]()
    for each in wanted:
        if places.isdisjoint(positions(each)):
            held.add(each)
            places |= positions(each)
    return held, places


@given(st.lists(blocks), blocks)
def test_a_block_is_covered_as_its_positions_are(wanted: list[Block], asked: Block) -> None:
    held, places = filled(wanted)

    cover = held.cover(asked)

    assert (cover is Cover.CONTAINED) == (positions(asked) <= places)
    assert (cover is Cover.DISJOINT) == positions(asked).isdisjoint(places)


@given(st.lists(blocks), blocks)
def test_what_is_missing_of_a_block_is_what_the_set_does_not_hold(wanted: list[Block], asked: Block) -> None:
    held, places = filled(wanted)

    missing = held.missing(asked)

    assert [place for part in missing for place in sorted(positions(part))] == sorted(
        positions(asked) - places
    )


@given(st.lists(blocks))
def test_a_set_is_stored_as_sorted_entries_and_comes_back(wanted: list[Block]) -> None:
    held, places = filled(wanted)
    entries = held.entries()

    assert list(entries) == sorted(entries)
    assert {place for entry in entries for place in positions(Block(*entry))} == places
    assert BlockSet(entries) == held
    assert held.num_minibatches == len(places)


def test_sets_that_differ_in_an_epoch_are_not_equal() -> None:
    assert BlockSet(((0, 0, 0, 2),)) != BlockSet(((0, 1, 0, 2),))
    assert BlockSet() != "nothing"


def test_the_positions_of_an_epoch_that_was_never_touched_are_none() -> None:
    assert list(BlockSet().of(0, 3)) == []


@pytest.mark.parametrize("wrong", [(-1, 0, 0, 1), (0, -1, 0, 1), (0, 0, -1, 1), (0, 0, 2, 2), (0, 0, 3, 2)])
def test_a_block_is_never_empty_and_never_negative(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(
        ValueError, match=f"stage={wrong[0]}, epoch={wrong[1]}, first={wrong[2]}, stop={wrong[3]}"
    ):
        Block(*wrong)


def test_a_block_names_its_first_and_its_last_position() -> None:
    assert str(Block(0, 2, 10, 15)) == "epoch 2, positions 10 to 14"
    assert str(Block(0, 2, 10, 11)) == "epoch 2, position 10"
    assert Block(0, 2, 10, 15).num_minibatches == 5


def test_shards_and_ledger_have_one_word_for_each_outcome() -> None:
    assert messages.Outcome is ledger.Outcome is Outcome
    assert f"{Outcome.NOT_FINITE}" == Outcome.NOT_FINITE.value == "not_finite"
