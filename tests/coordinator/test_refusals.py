"""Tests of squall.coordinator.refusals: blocks that nobody can compute.

Faults planted, each caught: one finder is enough · twice the same one counts as two · the answer of a shard counted that was not asked ·
one that came back not asked again · what was refused before told again · a row that a good block does not end.
"""

import pytest

from squall.blocks import Block, BlockSet, Outcome
from squall.coordinator.events import ToShard
from squall.coordinator.refusals import TERMINAL_IN_A_ROW, Refusals
from squall.wire.messages import Refuse, Refused

ONE, TWO = Block(0, 0, 0, 1), Block(0, 0, 1, 2)


def refused(block: Block = ONE, outcome: Outcome = Outcome.REFUSED) -> Refused:
    return Refused(request=1, block=block, outcomes=(outcome,))


@pytest.mark.parametrize(
    ("finders", "is_alone", "is_over"),
    [
        ((0,), False, False),
        ((0,), True, False),
        ((0, 0), False, False),
        ((0, 0), True, True),
        ((0, 1), False, True),
    ],
)
def test_two_replicas_or_the_only_one_twice_give_a_block_up(
    finders: tuple[int, ...], is_alone: bool, is_over: bool
) -> None:
    refusals = Refusals(num_shards=1)
    verdicts = [refusals.found(ONE, replica, "weight", is_alone=is_alone) for replica in finders]
    assert verdicts == [False] * (len(finders) - 1) + [is_over]
    assert refusals.has_found(ONE, 0)
    assert not refusals.has_found(ONE, 2)
    assert not refusals.has_found(TWO, 0)


def test_shards_are_asked_until_each_has_answered() -> None:
    refusals = Refusals(num_shards=2)
    asked = refusals.settle(ONE)
    assert asked == tuple(ToShard(shard=shard, message=Refuse(request=1, block=ONE)) for shard in (0, 1))

    assert not refusals.answered(1, refused())
    assert refusals.again() == asked[:1]
    assert list(refusals.waits()) == ["epoch 0, position 0 waits to be settled by shard0"]
    assert not refusals.answered(1, refused()), "it has answered before"
    assert not refusals.answered(0, refused(TWO)), "nobody asked that"
    assert refusals.answered(0, refused())

    assert refusals.end(ONE) == "a shard has a part of it already"
    assert not refusals.settling
    assert not refusals.again()


def test_a_shard_that_has_come_back_without_it_is_asked_again() -> None:
    refusals = Refusals(num_shards=2)
    refusals.settle(ONE)
    refusals.answered(0, refused())
    refusals.shard_returned(0, BlockSet.union([ONE]))
    assert [effect.shard for effect in refusals.again()] == [1]
    refusals.shard_returned(0, BlockSet.union([TWO]))
    assert [effect.shard for effect in refusals.again()] == [0, 1]


def test_why_names_the_tensor_and_slices_that_had_applied_it() -> None:
    refusals = Refusals(num_shards=1)
    refusals.found(ONE, 0, "weight", is_alone=True)
    refusals.settle(ONE)
    assert refusals.tensor(ONE) == "weight"
    refusals.answered(0, refused(outcome=Outcome.REPEATED))
    assert refusals.end(ONE) == "the gradient of 'weight' was not finite; some slices had applied it"
    assert (refusals.tensor(ONE), refusals.has_found(ONE, 0)) == ("", False)


def test_a_shard_that_was_not_asked_says_nothing_of_why() -> None:
    refusals = Refusals(num_shards=2)
    refusals.settle(ONE, (1,))
    refusals.answered(0, refused(outcome=Outcome.REPEATED))
    refusals.answered(1, refused())
    assert refusals.end(ONE) == "a shard has a part of it already"


def test_what_was_refused_before_and_lost_by_a_shard_is_not_told_again() -> None:
    refusals = Refusals(num_shards=2)
    refusals.refused[ONE] = "said"
    assert [effect.shard for effect in refusals.settle(ONE, (1,))] == [1]
    assert not refusals.answered(0, refused())
    assert refusals.answered(1, refused())
    assert refusals.end(ONE) is None
    assert refusals.refused == {ONE: "said"}


@pytest.mark.parametrize(("is_new", "diverges"), [(False, True), (True, False)])
def test_so_many_in_a_row_make_no_sense_and_a_new_good_block_ends_the_row(
    is_new: bool, diverges: bool
) -> None:
    refusals = Refusals(num_shards=1, in_a_row=TERMINAL_IN_A_ROW - 1)
    refusals.found(TWO, 3, "weight", is_alone=False)
    assert refusals.passed(TWO, is_new=is_new) == [3]
    assert refusals.passed(TWO, is_new=is_new) == []
    assert not refusals.is_diverging
    refusals.settle(ONE)
    refusals.answered(0, refused())
    refusals.end(ONE)
    assert refusals.is_diverging is diverges


def test_a_row_begins_with_none() -> None:
    refusals = Refusals(num_shards=1)
    for first in range(TERMINAL_IN_A_ROW):
        assert not refusals.is_diverging
        block = Block(0, 0, first, first + 1)
        refusals.settle(block)
        refusals.answered(0, refused(block))
        refusals.end(block)
    assert refusals.is_diverging
