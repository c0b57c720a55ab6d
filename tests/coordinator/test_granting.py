"""Tests of squall.coordinator.granting: who is given which block.

Faults planted, each caught: a second one works during a warm start · who found a block not finite tries it again beside
another · the only one does not · one that waited not told to fetch first · an attempt that is not told as redone.
"""

from typing import Any

from squall.blocks import Block, BlockSet
from squall.coordinator.book import BlockBook
from squall.coordinator.events import Report
from squall.coordinator.granting import Granting
from squall.coordinator.membership import Membership
from squall.coordinator.refusals import Refusals
from squall.observe.events import Redone
from squall.wire.messages import Lease
from tests.coordinator.plans import block, plan_of


class Desk:
    """All that granting needs, with so many replicas that have joined."""

    def __init__(self, replicas: int, blocks: int = 6, warm_start: int = 0) -> None:
        self.membership = Membership(())
        self.book = BlockBook(plan_of(blocks, warm_start=warm_start), BlockSet())
        self.refusals = Refusals(num_shards=1)
        self.granting = Granting(self.membership, self.book, self.refusals)
        self.requests = 0
        for replica in range(replicas):
            self.membership.join(replica, 0, 0.0)

    def park(self, replica: int) -> None:
        self.requests += 1
        self.membership.asked(self.membership.members[replica], self.requests, 0.0)

    def grant(self, asked_now: int | None = None) -> list[tuple[int, Block]]:
        return [
            (effect.replica, effect.message.block)
            for effect in self.effects(asked_now)
            if not isinstance(effect, Report) and isinstance(effect.message, Lease)
        ]

    def effects(self, asked_now: int | None = None) -> tuple[Any, ...]:
        asker = None if asked_now is None else (self.membership.members[asked_now], self.requests)
        return self.granting.grant(1.0, asker, must_rest=False)

    def fails(self, replica: int, first: int) -> None:
        """A replica finds its block not finite."""
        self.membership.members[replica].finish(block(first), 1.0)
        self.book.let_go(block(first))
        self.refusals.found(block(first), replica, "weight", is_alone=False)
        self.book.take_back(block(first), "not finite")


def test_each_that_waits_has_a_block_as_long_as_there_is_one() -> None:
    desk = Desk(replicas=3, blocks=4)
    for replica in (2, 0, 1, 2, 2):
        desk.park(replica)
    assert desk.grant() == [(2, block(0)), (0, block(1)), (1, block(2)), (2, block(3))]
    assert desk.grant() == []


def test_the_lowest_works_alone_during_a_warm_start() -> None:
    desk = Desk(replicas=2, warm_start=1)
    desk.park(1)
    assert desk.grant() == []
    desk.park(0)
    assert desk.grant() == [(0, block(0))]
    desk.book.close(block(0))
    assert desk.grant() == [(1, block(1))]


def test_another_tries_what_was_not_finite_unless_there_is_none() -> None:
    desk = Desk(replicas=2)
    desk.park(0)
    assert desk.grant() == [(0, block(0))]
    desk.fails(0, 0)
    desk.park(0)
    assert desk.grant() == [(0, block(1))]
    desk.park(1)
    assert desk.grant() == [(1, block(0))]

    desk.fails(1, 0)
    desk.membership.remove(desk.membership.members[0])
    desk.park(1)
    assert desk.grant() == [(1, block(0))]


def test_who_waited_idle_is_told_to_fetch_first_and_a_second_attempt_is_told() -> None:
    desk = Desk(replicas=1)
    desk.park(0)
    (to_replica,) = desk.effects(asked_now=0)
    assert not to_replica.message.refresh
    desk.fails(0, 0)
    desk.park(0)
    to_replica, report = desk.effects()
    assert (to_replica.message.refresh, to_replica.message.attempt) == (True, 2)
    assert report.event == Redone(time_s=1.0, block=block(0), attempt=2, replica=0, why="not finite")
