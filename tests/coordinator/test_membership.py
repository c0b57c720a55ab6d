"""Tests of squall.coordinator.membership and members: who is there, and whose turn it is.

Faults planted, each caught: an earlier life found · the line taken from its end · who is overdue left in it, or left out
once heard again · the lowest that is overdue · strikes that a good block takes away, or that twenty do not · the finisher
blamed · who waits for the coordinator called late.
"""

from squall.blocks import Block
from squall.coordinator.members import Patience
from squall.coordinator.membership import FORGIVEN_AFTER, STRIKES, Membership
from squall.wire.messages import Lease, Recall

PATIENCE = Patience(first_s=30.0, least_s=5.0, factor=10.0)


def block(first: int) -> Block:
    return Block(0, 0, first, first + 1)


def joined(num: int, *, asking: bool = True) -> Membership:
    membership = Membership(range(num))
    for replica in range(num):
        member = membership.join(replica, incarnation=0, now=0.0)
        if asking:
            member.remember(1)
            membership.asked(member, 1, 0.0)
    return membership


def test_a_life_is_found_by_its_incarnation() -> None:
    membership = joined(1)
    later = membership.join(0, incarnation=2, now=1.0)
    assert membership.find(0, 2) is later
    assert membership.find(0, 0) is None
    membership.remove(later)
    assert membership.find(0, 2) is None


def test_the_start_waits_for_who_is_expected_until_it_has_asked_or_is_gone() -> None:
    membership = joined(3, asking=False)
    members = membership.members
    members[0].remember(1)
    membership.asked(members[0], 1, 1.0)
    assert membership.missing(4) == [1, 2, 3]
    membership.remove(members[1])
    assert not membership.all_have_asked()
    membership.asked(members[2], 1, 1.0)
    assert membership.all_have_asked()
    membership.remove(members[0])
    membership.remove(members[2])
    assert not membership.all_have_asked(), "nobody is there"


def test_the_line_is_of_who_holds_least_then_of_who_came_first() -> None:
    membership = joined(3)
    zero = membership.members[0]
    zero.grant(block(0), 1, now=1.0)
    membership.take_place(zero)
    order = [membership.next_waiting() for _ in range(4)]
    assert [member and member.replica for member in order] == [1, 2, 0, None]


def test_who_is_overdue_is_out_of_the_line_and_not_the_lowest_until_it_is_heard_again() -> None:
    membership = joined(2)
    zero, one = membership.members.values()
    zero.grant(block(0), 1, now=0.0)
    membership.take_place(zero)

    assert list(membership.late(30.0, PATIENCE)) == []
    assert list(membership.late(30.5, PATIENCE)) == [zero], "the other waits for the coordinator"
    assert list(membership.late(31.0, PATIENCE)) == [], "told once"
    assert list(membership.overdue_waits(31.0)) == ["replica0 has been silent for 31 s"]
    assert membership.lowest() is one
    assert membership.is_alone(one, is_warm_start=False)
    assert list(membership.in_hand()) == []
    assert [membership.next_waiting(), membership.next_waiting()] == [one, None]

    membership.heard_again(zero)

    assert membership.lowest() is zero
    assert membership.next_waiting() is zero
    assert not membership.is_alone(one, is_warm_start=False)
    assert membership.is_alone(zero, is_warm_start=True)
    assert not membership.is_alone(one, is_warm_start=True)
    assert list(membership.in_hand()) == [block(0)]


def test_patience_is_learned_from_a_replica_s_own_blocks_but_not_from_those_it_held_before() -> None:
    membership = joined(1)
    member = membership.members[0]
    member.resume(block(0), 1)
    assert member.finish(block(0), now=20.0)
    assert member.deadline_s(PATIENCE) == 30.0
    member.grant(block(1), 1, now=20.0)
    member.grant(block(2), 1, now=21.0)
    assert member.finish(block(1), now=22.0)
    assert not member.finish(block(1), now=23.0)
    assert member.deadline_s(PATIENCE) == 20.0


def test_an_answer_is_kept_for_who_asks_again_and_a_recall_is_none() -> None:
    member = joined(1).members[0]
    lease = Lease(request=1, block=block(0), attempt=1, refresh=False)
    assert member.tell(lease).message == lease
    member.tell(Recall(why=""))
    assert member.replies == {1: lease}
    assert member.has_asked(1)
    assert not member.has_asked(2)
    member.remember(33)
    assert member.replies == {}
    assert member.has_asked(1), "it is so old that it must be a resend"


def test_enough_strikes_are_enough_and_enough_good_blocks_make_up_for_them() -> None:
    membership = joined(2)
    culprit, finisher = membership.members.values()
    for _ in range(STRIKES - 1):
        assert list(membership.blame([0, 1, 7], finisher)) == []
    for _ in range(FORGIVEN_AFTER - 1):
        membership.praise(culprit)
    assert culprit.strikes == STRIKES - 1
    membership.praise(culprit)
    assert (culprit.strikes, finisher.strikes) == (0, 0)
    verdicts = [list(membership.blame([0], finisher)) for _ in range(STRIKES)]
    assert verdicts == [[]] * (STRIKES - 1) + [[culprit]]
