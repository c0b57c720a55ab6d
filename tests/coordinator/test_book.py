"""Tests of squall.coordinator.book: where each block stands.

Faults planted, each caught: a block handed out twice · one that came back after fresh ones · one that is held taken
back · a warm start that hands out more than its share · what a shard lost not handed out again, or told twice · what was
refused computed again · a refused block that keeps the gate shut · a lease given to two holders.
"""

import pytest

from squall.blocks import Block, BlockSet
from squall.coordinator.book import BlockBook, Handed
from squall.coordinator.events import Found
from squall.coordinator.recovery import Past
from squall.coordinator.work import Rhythm
from tests.coordinator.plans import block, plan_of

KNOWN = Past(is_done=False, is_refused=False, was_told_done=False, why_refused=None)


def book(
    blocks: int = 6, *, warm_start: int = 0, max_staleness: int | None = None, rhythm: Rhythm | None = None
) -> BlockBook:
    return BlockBook(plan_of(blocks, warm_start=warm_start), BlockSet(), max_staleness, rhythm)


def handed(book: BlockBook, num: int) -> list[Block]:
    """Hand out so many, one after the other."""
    blocks = []
    for _ in range(num):
        chosen = book.choose()
        assert chosen is not None
        book.hand_out(chosen)
        blocks.append(chosen)
    return blocks


def test_blocks_go_out_in_order_and_what_comes_back_goes_out_first() -> None:
    one = book()
    assert handed(one, 3) == [block(0), block(1), block(2)]

    one.let_go(block(1))
    one.take_back(block(1), "lost")
    one.take_back(block(2), "it is held")

    assert one.choose() == block(1)
    assert one.hand_out(block(1)) == Handed(2, "lost")
    assert one.choose() == block(3)


def test_who_may_not_try_what_came_back_has_a_fresh_one() -> None:
    one = book()
    handed(one, 1)
    one.let_go(block(0))
    one.take_back(block(0), "lost")
    assert one.choose(lambda chosen: chosen != block(0)) == block(1)


def test_a_settled_block_does_not_come_back_and_the_end_is_when_all_are() -> None:
    one = book(2)
    handed(one, 2)
    for number in range(2):
        assert not one.is_done
        one.let_go(block(number))
        assert one.close(block(number))
        one.take_back(block(number), "too late")
    assert one.is_done
    assert not one.has_work()


def test_a_warm_start_hands_out_its_share_until_it_is_done() -> None:
    one = book(warm_start=2)
    handed(one, 2)
    assert one.choose() is None
    one.close(block(0))
    assert one.choose() is None
    one.refuse(block(1), is_new=True)
    assert not one.is_warm_start
    assert one.choose() == block(2)


@pytest.mark.parametrize("must_rest", [False, True])
def test_nothing_fresh_is_begun_once_the_only_replica_rests_and_must(must_rest: bool) -> None:
    one = book(rhythm=Rhythm(n_fetch=2, n_push=1))
    handed(one, 2)
    assert not one.is_still(), "it computes"
    one.close(block(0))
    one.close(block(1))
    assert one.is_still()
    assert one.has_work()
    assert one.has_work(must_rest=must_rest) is not must_rest
    assert one.choose(must_rest=must_rest) == (None if must_rest else block(2))


def test_what_a_shard_has_lost_is_done_again_and_told_once() -> None:
    one = book()
    handed(one, 3)
    for number in range(3):
        one.let_go(block(number))
        one.close(block(number))

    lost = one.lose(BlockSet.union([block(0)]))
    again = one.reopen({block(2): "why"}, "shard0 came back without it")

    assert lost.num_minibatches == 2
    assert again == [block(2)], "nobody computes it"
    assert one.choose() == block(1)
    assert one.hand_out(block(1)) == Handed(2, "shard0 came back without it")
    assert not one.close(block(1)), "that it is done was told before"
    one.refuse(block(2), is_new=False)
    assert one.settled.num_minibatches == 3
    assert one.choose() == block(3)


def test_a_lost_block_that_is_held_is_done_again_by_its_holder() -> None:
    one = book()
    handed(one, 1)
    one.close(block(0))  # by another, before it was given to whoever holds it now
    one.lose(BlockSet())
    assert one.reopen({}, "lost") == []
    assert one.choose() == block(1)


def test_what_the_one_before_had_handed_out_is_held_by_one_or_comes_back() -> None:
    one = book()
    for number in range(2):
        assert one.take_fresh() == block(number)
        one.inherit(block(number), KNOWN)
        one.take_back(block(number), "the coordinator was lost")

    assert one.resume(block(1), attempt=3)
    assert not one.resume(block(1), attempt=3), "it has one holder"
    assert one.choose() == block(0)
    one.let_go(block(1))
    one.take_back(block(1), "gone")
    assert one.choose() == block(1)
    assert one.hand_out(block(1)).attempt == 4
    assert not one.resume(block(0), attempt=1), "it was chosen for another"


def test_what_is_done_and_was_not_told_is_told_once_nobody_holds_it() -> None:
    one = book()
    for number in range(2):
        one.take_fresh()
        one.inherit(block(number), KNOWN._replace(is_done=True))
    assert one.resume(block(1), attempt=1)
    assert not one.resume(block(1), attempt=1), "it has one holder, though it is done"
    assert one.tell_found() == (Found(blocks=(block(0),)),)
    assert one.tell(block(1))
    assert not one.tell(block(1))
    one.let_go(block(1))
    assert one.tell_found() == ()


def test_all_blocks_before_one_that_somebody_speaks_of_were_handed_out() -> None:
    one = book()
    one.reach(block(2))
    assert one.num_handed_out == 3
    assert [one.choose() for _ in range(4)] == [block(0), block(1), block(2), block(3)]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_block_that_is_refused_after_a_recovery_does_not_keep_the_gate_shut(is_new: bool) -> None:
    one = book(max_staleness=1)
    one.take_fresh()
    one.inherit(block(0), KNOWN._replace(is_refused=True, why_refused=None if is_new else "not finite"))
    assert one.choose() is None, "nobody knows since when it has been out"
    one.refuse(block(0), is_new=is_new)
    assert one.choose() == block(1)


def test_rest_is_counted_in_minibatches_where_fetches_fall_within_blocks() -> None:
    one = book(rhythm=Rhythm(n_fetch=2, n_push=3))
    handed(one, 1)
    assert one.choose(must_rest=True) == block(1)
    assert one.choose(must_rest=True) is None


@pytest.mark.parametrize("is_applied", [False, True])
def test_a_refused_block_is_no_update_that_makes_another_stale(is_applied: bool) -> None:
    one = book(max_staleness=1)
    handed(one, 2)
    assert not one.has_work()
    if is_applied:
        one.close(block(0))
    else:
        one.refuse(block(0), is_new=True)
    assert one.has_work() is not is_applied


def test_a_short_block_counts_in_full_where_fetches_ride_on_pushes() -> None:
    one = book(rhythm=Rhythm(n_fetch=2, n_push=2))
    handed(one, 1)
    assert one.choose(must_rest=True) is None


def test_attempts_are_counted_also_over_what_a_shard_has_lost() -> None:
    one = book()
    for attempt, why in ((1, ""), (2, "lost")):
        assert one.choose() == block(0)
        assert one.hand_out(block(0)) == Handed(attempt, why)
        one.let_go(block(0))
        one.take_back(block(0), "lost")
    one.close(block(0))
    one.lose(BlockSet())
    assert one.reopen((), "lost by a shard") == []
    assert one.choose() == block(0)
    assert one.hand_out(block(0)) == Handed(3, "lost by a shard")


def test_what_the_one_before_had_handed_out_has_had_one_attempt() -> None:
    one = book()
    one.take_fresh()
    one.inherit(block(0), KNOWN)
    one.take_back(block(0), "lost")
    assert one.choose() == block(0)
    assert one.hand_out(block(0)).attempt == 2


@pytest.mark.parametrize(
    "past", [KNOWN._replace(is_done=True), KNOWN._replace(was_told_done=True)], ids=["done", "told"]
)
def test_each_block_that_was_done_before_is_one_of_the_warm_start(past: Past) -> None:
    one = book(warm_start=2)
    one.take_fresh()
    one.inherit(block(0), past)
    assert one.is_warm_start


def test_what_was_told_done_and_is_lost_and_held_has_been_out_since_nobody_knows_when() -> None:
    one = book(max_staleness=1)
    one.take_fresh()
    one.inherit(block(0), KNOWN._replace(was_told_done=True))
    one.take_back(block(0), "lost")
    assert one.resume(block(0), 1)
    assert one.choose() is None


def test_what_somebody_speaks_of_late_has_been_out_since_nobody_knows_when_and_had_no_attempt_here() -> None:
    one = book(max_staleness=1)
    one.reach(block(0))
    assert one.choose(lambda chosen: chosen != block(0)) is None
    assert one.choose() == block(0)
    assert one.hand_out(block(0)).attempt == 1


def test_who_speaks_late_keeps_the_number_of_the_attempt() -> None:
    one = book()
    one.reach(block(0))
    assert one.resume(block(0), 3)
    one.let_go(block(0))
    one.take_back(block(0), "lost")
    assert one.choose() == block(0)
    assert one.hand_out(block(0)).attempt == 4
