"""Tests of squall.coordinator.takeover and recovery: the book of a coordinator that follows one that was lost.

Faults planted, each caught: what is done handed out again · what was told to be done told again · what is refused and
was not told taken for done · a block that is held handed to another · one that left believed · a shard's loss that was
told before told again · an older word of a shard heard · what only some slices have taken for done.
"""

import pytest

from squall.blocks import Block, BlockSet
from squall.coordinator.book import BlockBook
from squall.coordinator.events import Found, Report
from squall.coordinator.lives import ShardLives
from squall.coordinator.membership import Membership
from squall.coordinator.recovery import Inheritance, Past, Recovery
from squall.coordinator.refusals import Refusals
from squall.coordinator.takeover import make_book, shards_found
from squall.coordinator.work import WorkPlan
from squall.observe.events import Recovered
from squall.wire.messages import Books, Refuse, Resume

PLAN = WorkPlan(stage=0, minibatches_per_epoch=8, block_length=1, epochs=1, steps=None, warm_start=0)


def block(first: int) -> Block:
    return Block(0, 0, first, first + 1)


def blocks(*firsts: int) -> tuple[Block, ...]:
    return tuple(map(block, firsts))


def books(
    everywhere: tuple[Block, ...],
    *,
    some: tuple[Block, ...] = (),
    refused: tuple[Block, ...] = (),
    life: int = 0,
) -> Books:
    return Books(
        epoch=1, incarnation=life, anywhere=(*everywhere, *some), everywhere=everywhere, refused=refused
    )


def heard(inheritance: Inheritance, *told: Books) -> Recovery:
    """A recovery that is over: each shard has said so much."""
    recovery = Recovery(inheritance, num_shards=len(told), patience_s=5.0)
    for shard, one in enumerate(told):
        recovery.heard(shard, one)
    for replica in inheritance.expected:
        recovery.resumed(replica, Resume(leases=(), done=()))
    assert recovery.is_over(0.0)
    return recovery


@pytest.mark.parametrize(
    ("told_done", "told_refused", "shard", "past"),
    [
        ((), {}, books(blocks(0)), Past(True, False, False, None)),
        (blocks(0), {}, books(blocks(0)), Past(True, False, True, None)),
        ((), {}, books((), some=blocks(0)), Past(False, False, False, None)),
        (blocks(0), {}, books(()), Past(False, False, True, None)),
        ((), {}, books(blocks(0), refused=blocks(0)), Past(False, True, False, None)),
        ((), {block(0): "why"}, books(blocks(0), refused=blocks(0)), Past(True, True, False, "why")),
        ((), {block(0): "why"}, books(()), Past(False, True, False, "why")),
    ],
)
def test_what_became_of_a_block_is_what_shards_and_launcher_know(
    told_done: tuple[Block, ...], told_refused: dict[Block, str], shard: Books, past: Past
) -> None:
    inheritance = Inheritance(epoch=1, told=BlockSet.union(told_done), refused=told_refused)
    assert heard(inheritance, shard).past_of(block(0)) == past


def test_a_block_is_done_only_if_every_shard_has_it_on_every_slice() -> None:
    recovery = heard(Inheritance(epoch=1), books(blocks(0, 1)), books(blocks(1, 2)))
    assert [recovery.past_of(block(first)).is_done for first in range(3)] == [False, True, False]


def test_all_must_speak_or_be_late_and_a_word_of_another_epoch_is_none() -> None:
    recovery = Recovery(Inheritance(epoch=2, expected=(0, 1)), num_shards=1, patience_s=5.0)
    recovery.resumed(0, Resume(leases=(), done=()))
    recovery.left(1)
    recovery.heard(0, books(()))
    assert not recovery.is_over(0.0)
    assert list(recovery.waits()) == ["the new coordinator waits for shard0"]
    recovery.heard(0, Books(epoch=2, incarnation=0, anywhere=(), everywhere=(), refused=()))
    assert recovery.is_over(0.0)
    recovery.forget(0)
    assert not recovery.is_over(100.0), "without shards nothing is known"
    assert [effect.shard for effect in recovery.ask()] == [0]


def test_the_book_has_what_is_done_what_is_held_and_what_comes_back() -> None:
    inheritance = Inheritance(
        epoch=1, told=BlockSet.union(blocks(0)), refused={block(2): "why", block(7): "known"}
    )
    recovery = Recovery(inheritance, num_shards=1, patience_s=5.0)
    recovery.heard(0, books(blocks(0, 1, 3, 7), some=blocks(4), refused=blocks(3, 7)))
    recovery.resumed(0, Resume(leases=((block(5), 2),), done=()))
    recovery.resumed(1, Resume(leases=((block(5), 1), (block(4), 1)), done=()))
    recovery.resumed(2, Resume(leases=((block(6), 1),), done=()))
    recovery.left(2)
    assert recovery.is_over(0.0)
    membership = Membership(())
    for replica in range(3):
        membership.join(replica, 0, 0.0)
    book, refusals = BlockBook(PLAN, BlockSet()), Refusals(num_shards=1)

    effects = list(make_book(recovery, membership, book, refusals))

    assert [effect.message for effect in effects] == [
        Refuse(request=1, block=block(2)),  # told to be refused, and lost by the shard
        Refuse(request=2, block=block(3)),  # why, was not told
    ]
    assert refusals.refused == inheritance.refused
    assert book.settled.blocks() == (Block(0, 0, 0, 2), block(7))
    assert book.tell_found() == (Found(blocks=blocks(1)),)
    leases = [member.leases for member in membership.members.values()]
    assert leases == [{block(5): 2}, {block(4): 1}, {}]
    assert book.choose() == block(6), "whoever holds it is about to leave"


def test_each_shard_that_came_back_unheard_is_told_of_once() -> None:
    inheritance = Inheritance(epoch=1, told=BlockSet.union(blocks(0, 1)), lives={0: 1})
    without_slices = Books(epoch=1, incarnation=1, anywhere=(), everywhere=None, refused=())
    recovery = heard(inheritance, books(blocks(0, 1), life=1), books(blocks(0), life=1), without_slices)
    lives = ShardLives()

    told = list(shards_found(recovery, lives, now=7.0))

    assert told == [
        Report(event=Recovered(time_s=7.0, role=f"shard{shard}", incarnation=1, lost=lost))
        for shard, lost in ((1, 1), (2, 0))
    ]
    assert [lives.vouch(block(1), [(shard, 0)]) for shard in (0, 1)] == [True, False]
    assert lives.vouch(block(0), [(1, 0)])
    assert lives.returned(0, 1, BlockSet()) is None, "it is known"


def test_replicas_that_stay_silent_are_waited_for_no_longer_than_patience_lasts() -> None:
    recovery = Recovery(Inheritance(epoch=1, expected=(0,)), num_shards=1, patience_s=5.0)
    recovery.heard(0, books(()))
    assert [recovery.is_over(now) for now in (2.0, 7.0, 7.5)] == [False, False, True]
