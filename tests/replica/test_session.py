"""Tests of squall.replica.session: events in, messages out.

Faults planted, each caught: the swap before all shards have answered · a fetch into the buffer in use · a late answer
handed to the loop · nothing sent again at a tick · a recall that does not wait for the push · a recall that lets the
next minibatch begin · a goodbye while a push is open · `Started` illegal after a recall that came first · lines told apart by their shard alone, also where
one has come back · a report that names the latest life of a shard.
"""

from typing import Any

import msgspec
import pytest

from squall.blocks import Block, Outcome
from squall.replica.downpour import Compute, Computed, DownpourLoop, downpour
from squall.replica.session import (
    FromCoordinator,
    FromShard,
    Phase,
    Quit,
    Reconnected,
    ReplicaSession,
    ShardSlices,
    Started,
    Swap,
    Tick,
    ToCoordinator,
    ToShard,
)
from squall.wire.messages import (
    Ask,
    Fetch,
    Fetched,
    Goodbye,
    Lease,
    Leave,
    Push,
    Pushed,
    Recall,
    SliceState,
)

SHARDS = (ShardSlices(shard=0, slices=(0, 1)), ShardSlices(shard=1, slices=(2,)))
COMPUTED = Computed(loss=1.0, examples=4)
LEFT = (ToCoordinator(message=Goodbye()), Quit(why="by hand"))


def states(shard: int, version: int = 0) -> tuple[SliceState, ...]:
    return tuple(SliceState(slice=n, version=version, minibatches=version) for n in SHARDS[shard].slices)


class Talk:
    """A session and the hand that answers it.

    Args:
        ahead: leases asked for ahead of the work.
        length: of every block [minibatches].
        overlaps: push behind the next block's computing.
    """

    def __init__(self, ahead: int = 0, length: int = 1, *, overlaps: bool = False) -> None:
        loop = DownpourLoop(
            n_fetch=length, n_push=length, has_local_steps=False, ahead=ahead, overlaps=overlaps
        )
        self.session = ReplicaSession(loop=downpour(loop), shards=SHARDS)
        self.length = length
        self.sent: list[Any] = []

    def handle(self, event: Any) -> tuple[Any, ...]:
        effects = self.session.handle(event)
        self.session.check_invariants()
        self.sent += [effect.message for effect in effects if isinstance(effect, ToShard | ToCoordinator)]
        return effects

    def fetched(self, shard: int, request: int) -> tuple[Any, ...]:
        return self.handle(
            FromShard(shard=shard, message=Fetched(request=request, incarnation=0, states=states(shard)))
        )

    def pushed(self, shard: int, request: int) -> tuple[Any, ...]:
        reply = Pushed(
            request=request,
            incarnation=0,
            outcomes=(Outcome.APPLIED,) * len(SHARDS[shard].slices),
            states=states(shard, 1),
        )
        return self.handle(FromShard(shard=shard, message=reply))

    def lease(self, request: int, first: int = 0, *, refresh: bool = False) -> tuple[Any, ...]:
        block = Block(0, 0, first, first + self.length)
        lease = Lease(request=request, block=block, attempt=1, refresh=refresh)
        return self.handle(FromCoordinator(message=lease))

    def recall(self) -> tuple[Any, ...]:
        return self.handle(FromCoordinator(message=Recall(why="by hand")))

    def join(self) -> "Talk":
        """Fetch and ask."""
        self.handle(Started())
        self.fetched(0, 1)
        self.fetched(1, 1)
        return self

    def work(self) -> "Talk":
        """Fetch, ask, and begin the first minibatch."""
        self.join().lease(2)
        return self


def test_it_begins_with_a_fetch_from_all_shards_into_the_buffer_that_is_not_in_use() -> None:
    talk = Talk()
    assert talk.session.buffer == 1
    assert talk.handle(Started()) == (
        ToShard(shard=0, message=Fetch(request=1, into=0)),
        ToShard(shard=1, message=Fetch(request=1, into=0)),
    )


def test_it_swaps_only_when_all_shards_have_answered_and_then_asks() -> None:
    talk = Talk()
    talk.handle(Started())

    assert talk.fetched(1, 1) == ()
    assert talk.fetched(0, 1) == (
        Swap(buffer=0),
        ToCoordinator(message=Ask(request=2, finished=None)),
    )
    assert talk.session.phase is Phase.AWAITING


def test_a_replica_of_two_workers_exchanges_by_the_lines_of_both_and_swaps_when_all_have_answered() -> None:
    lines = (
        ShardSlices(shard=0, slices=(0,)),
        ShardSlices(shard=0, slices=(1,), partition=1),
        ShardSlices(shard=1, slices=(2,), partition=1),
    )
    loop = DownpourLoop(n_fetch=1, n_push=1, has_local_steps=False, ahead=0)
    session = ReplicaSession(loop=downpour(loop), shards=lines)

    def fetched(line: ShardSlices) -> tuple[Any, ...]:
        state = SliceState(slice=line.slices[0], version=0, minibatches=0)
        reply = Fetched(request=1, incarnation=0, states=(state,))
        return session.handle(FromShard(shard=line.shard, partition=line.partition, message=reply))

    fetch = Fetch(request=1, into=0)
    assert session.handle(Started()) == tuple(
        ToShard(shard=line.shard, partition=line.partition, message=fetch) for line in lines
    )
    assert fetched(lines[1]) == ()
    assert [(again.partition, again.shard) for again in session.handle(Tick())] == [(0, 0), (1, 1)]
    assert fetched(lines[0]) == fetched(lines[0]) == ()  # the second is late
    assert session.num_dropped == 1
    assert session.handle(Tick()) == (ToShard(shard=1, partition=1, message=fetch),)
    assert fetched(lines[2])[0] == Swap(buffer=0)

    lease = Lease(request=2, block=Block(0, 0, 0, 1), attempt=1, refresh=False)
    session.handle(FromCoordinator(message=lease))
    pushes = session.handle(COMPUTED)
    assert [(effect.partition, effect.shard, effect.message.based_on) for effect in pushes] == [
        (0, 0, (0,)),
        (1, 0, (0,)),
        (1, 1, (0,)),
    ]


def test_a_block_is_computed_then_pushed_to_all_shards_then_reported() -> None:
    talk = Talk(length=2).join()

    (first,) = talk.lease(2)
    (second,) = talk.handle(COMPUTED)
    pushes = talk.handle(COMPUTED)
    talk.pushed(0, 3)
    swap, ask = talk.pushed(1, 3)

    assert [(wish.position, wish.is_first, wish.is_last) for wish in (first, second)] == [
        (0, True, False),
        (1, False, True),
    ]
    assert [type(effect.message) for effect in pushes] == [Push, Push]
    assert [effect.message.based_on for effect in pushes] == [(0, 0), (0,)]
    assert pushes[0].message.into == 1
    assert swap == Swap(buffer=1)
    assert ask.message.finished.outcome is Outcome.APPLIED
    assert ask.message.finished.examples == 8


def test_what_is_open_is_sent_again_at_each_tick_and_nothing_else() -> None:
    talk = Talk(ahead=1)
    opening = talk.handle(Started())
    assert talk.handle(Tick()) == opening
    talk.fetched(0, 1)
    assert talk.handle(Tick()) == opening[1:]
    talk.fetched(1, 1)
    talk.lease(3)

    assert talk.handle(Tick()) == (ToCoordinator(message=Ask(request=2, finished=None)),)


def test_requests_count_up_and_a_resend_keeps_its_number() -> None:
    talk = Talk(ahead=1).work()
    talk.handle(COMPUTED)
    talk.handle(Tick())
    numbers = [message.request for message in talk.sent if isinstance(message, Ask | Fetch | Push)]
    assert numbers == [1, 1, 2, 3, 4, 4, 4, 4, 3]


@pytest.mark.parametrize("request_number", [1, 9])
def test_an_answer_to_what_is_not_open_is_dropped(request_number: int) -> None:
    talk = Talk().work()
    talk.handle(COMPUTED)

    assert talk.fetched(0, request_number) == ()
    assert talk.session.num_dropped == 1
    assert talk.session.phase is Phase.EXCHANGING


def test_a_second_answer_of_one_shard_does_not_stand_for_the_other() -> None:
    talk = Talk()
    talk.handle(Started())
    talk.fetched(0, 1)
    assert talk.fetched(0, 1) == ()
    assert talk.session.phase is Phase.EXCHANGING


def test_it_says_which_shards_hold_its_loop_up_and_with_which_request() -> None:
    talk = Talk()
    assert talk.session.awaits == {}
    talk.handle(Started())
    assert talk.session.awaits == {0: 1, 1: 1}
    talk.fetched(1, 1)
    assert talk.session.awaits == {0: 1}
    talk.fetched(0, 1)
    assert talk.session.awaits == {}


def test_a_lease_that_comes_early_waits_for_its_turn() -> None:
    talk = Talk(ahead=1).join()
    assert talk.lease(3, first=5) == ()
    (begun,) = talk.lease(2, first=1)
    assert begun.position == 1
    assert talk.lease(2, first=7) == (), "a second answer to one request is late"

    talk.handle(COMPUTED)
    talk.pushed(0, 4)
    effects = talk.pushed(1, 4)

    assert [type(effect) for effect in effects] == [Swap, ToCoordinator, Compute]
    assert effects[-1].position == 5


def test_a_lease_that_asks_for_it_is_preceded_by_a_fetch() -> None:
    talk = Talk().join()
    effects = talk.lease(2, refresh=True)
    assert [effect.message for effect in effects] == [Fetch(request=3, into=1)] * 2


def test_who_is_told_to_leave_says_goodbye() -> None:
    talk = Talk().join()
    effects = talk.handle(FromCoordinator(message=Leave(request=2, why="steps")))
    assert effects == (ToCoordinator(message=Goodbye()), Quit(why="the work is done"))
    assert talk.session.phase is Phase.LEFT


def test_a_leave_that_came_early_is_taken_after_the_last_report() -> None:
    talk = Talk(ahead=1).work()
    talk.handle(FromCoordinator(message=Leave(request=3, why="steps")))
    talk.handle(COMPUTED)
    talk.pushed(0, 4)

    effects = talk.pushed(1, 4)

    assert isinstance(effects[1].message, Ask)
    assert effects[2:] == (ToCoordinator(message=Goodbye()), Quit(why="the work is done"))


def test_a_recall_while_idle_is_obeyed_at_once() -> None:
    assert Talk().join().recall() == LEFT
    assert Talk().recall() == LEFT


def test_a_recall_before_the_beginning_leaves_nothing_to_begin() -> None:
    talk = Talk()
    talk.recall()
    assert talk.handle(Started()) == ()


def test_a_recall_within_a_block_abandons_it_after_the_minibatch() -> None:
    talk = Talk(length=3).work()
    assert talk.recall() == ()
    assert talk.handle(COMPUTED) == LEFT


def test_a_recall_waits_for_the_acknowledgement_of_a_push_and_reports_it() -> None:
    talk = Talk().work()
    talk.handle(COMPUTED)
    assert talk.recall() == ()
    assert talk.pushed(0, 3) == ()

    swap, report, *left = talk.pushed(1, 3)

    assert isinstance(swap, Swap)
    assert report.message.finished.outcome is Outcome.APPLIED
    assert tuple(left) == LEFT


def test_with_overlap_the_next_block_begins_before_the_push_is_answered() -> None:
    talk = Talk(ahead=1, overlaps=True).work()
    talk.lease(3, first=1)

    first, second, begun = talk.handle(COMPUTED)

    assert [effect.message.block.first for effect in (first, second)] == [0, 0]
    assert (begun.position, begun.buffer) == (1, 1), "into the gradient buffer that is not being read"
    assert talk.session.phase is Phase.COMPUTING


def test_with_overlap_parameters_are_swapped_between_two_minibatches_only() -> None:
    talk = Talk(ahead=1, overlaps=True).work()
    talk.lease(3, first=1)
    talk.handle(COMPUTED)
    assert talk.pushed(0, 4) == talk.pushed(1, 4) == ()

    effects = talk.handle(COMPUTED)

    assert [type(effect) for effect in effects] == [Swap, ToCoordinator, ToShard, ToShard]
    assert effects[1].message.finished.block == Block(0, 0, 0, 1)
    assert effects[2].message.based_on == (0, 0), "it was computed before the fetch came"


def test_with_overlap_a_replica_without_other_work_waits_for_its_push() -> None:
    talk = Talk(ahead=1, overlaps=True).work()
    talk.handle(COMPUTED)
    assert talk.session.phase is Phase.EXCHANGING
    talk.pushed(0, 4)
    assert [type(effect) for effect in talk.pushed(1, 4)] == [Swap, ToCoordinator]


def test_with_overlap_a_recall_collects_and_reports_what_is_under_way() -> None:
    talk = Talk(ahead=1, overlaps=True).work()
    talk.lease(3, first=1)
    talk.handle(COMPUTED)
    talk.recall()

    assert talk.handle(COMPUTED) == ()
    talk.pushed(0, 4)
    _, report, *left = talk.pushed(1, 4)

    assert report.message.finished.block == Block(0, 0, 0, 1)
    assert tuple(left) == LEFT


def test_who_has_left_hears_nothing_any_more() -> None:
    talk = Talk().join()
    talk.recall()
    assert talk.handle(Tick()) == talk.lease(2) == talk.fetched(0, 1) == talk.recall() == ()
    assert talk.session.num_dropped == 4


def test_without_shards_blocks_are_computed_and_reported_all_the_same() -> None:
    loop = DownpourLoop(n_fetch=1, n_push=1, has_local_steps=False, ahead=0)
    session = ReplicaSession(loop=downpour(loop), shards=())
    (ask,) = session.handle(Started())
    lease = Lease(request=1, block=Block(0, 0, 0, 1), attempt=1, refresh=False)
    session.handle(FromCoordinator(message=lease))

    (report,) = session.handle(COMPUTED)

    assert ask.message.finished is None
    assert report.message.finished.outcome is Outcome.APPLIED


def test_what_a_shard_that_has_come_back_has_not_answered_is_sent_to_it_again() -> None:
    talk = Talk().work()
    talk.handle(COMPUTED)
    pushes = [message for message in talk.sent if isinstance(message, Push)]
    talk.pushed(0, pushes[0].request)

    assert talk.handle(Reconnected(shard=0)) == ()
    assert talk.handle(Reconnected(shard=1)) == (ToShard(shard=1, message=pushes[1]),)


def two_workers() -> tuple[ReplicaSession, dict[tuple[int, int], Push]]:
    """A session of two workers that both have lines to one shard, and what it has pushed over each, by partition and shard."""
    lines = (ShardSlices(shard=0, slices=(0,)), ShardSlices(shard=0, slices=(1,), partition=1))
    loop = DownpourLoop(n_fetch=1, n_push=1, has_local_steps=False, ahead=0)
    session = ReplicaSession(loop=downpour(loop), shards=lines)
    session.handle(Started())
    for line in lines:
        reply = Fetched(request=1, incarnation=0, states=(_state_of(line.slices[0]),))
        session.handle(FromShard(shard=0, partition=line.partition, message=reply))
    lease = Lease(request=2, block=Block(0, 0, 0, 1), attempt=1, refresh=False)
    session.handle(FromCoordinator(message=lease))
    effects = session.handle(COMPUTED)
    return session, {(effect.partition, effect.shard): effect.message for effect in effects}


def _state_of(number: int) -> SliceState:
    return SliceState(slice=number, version=0, minibatches=0)


def test_a_shard_that_has_come_back_is_sent_again_by_each_worker_what_it_has_not_answered_him() -> None:
    session, pushes = two_workers()

    again = session.handle(Reconnected(shard=0, partition=1))

    assert again == (ToShard(shard=0, partition=1, message=pushes[1, 0]),)
    assert session.handle(Reconnected(shard=0)) == (ToShard(shard=0, message=pushes[0, 0]),)


@pytest.mark.parametrize("first", [0, 1])
def test_a_report_names_the_earliest_life_of_a_shard_that_answered_any_of_its_workers(first: int) -> None:
    """The later one may have lost what the earlier one acknowledged to the other worker."""
    session, pushes = two_workers()
    sent = []
    for partition, life in ((first, 0), (1 - first, 1)):
        reply = Pushed(
            request=pushes[partition, 0].request,
            incarnation=life,
            outcomes=(Outcome.APPLIED,),
            states=(_state_of(partition),),
        )
        sent += session.handle(FromShard(shard=0, partition=partition, message=reply))

    (report,) = [e.message.finished for e in sent if isinstance(e, ToCoordinator)]
    assert report.lives == ((0, 0),)


def test_a_push_names_the_life_whose_versions_it_is_based_on_and_a_report_the_lives_that_answered() -> None:
    talk = Talk()
    talk.handle(Started())
    for shard, life in ((0, 3), (1, 0)):
        known = tuple(msgspec.structs.replace(state, incarnation=life) for state in states(shard, 7))
        reply = Fetched(request=1, incarnation=life, states=known)
        talk.handle(FromShard(shard=shard, message=reply))
    talk.lease(2)
    talk.handle(COMPUTED)
    pushes = [message for message in talk.sent if isinstance(message, Push)]
    assert [push.incarnation for push in pushes] == [3, 0]
    for shard, life in ((1, 1), (0, 3)):
        outcomes = (Outcome.APPLIED,) * len(SHARDS[shard].slices)
        reply = Pushed(request=3, incarnation=life, outcomes=outcomes, states=states(shard, 2))
        talk.handle(FromShard(shard=shard, message=reply))

    (report,) = [m.finished for m in talk.sent if isinstance(m, Ask) and m.finished is not None]
    assert dict(report.lives) == {0: 3, 1: 1}
    assert report.staleness == 0.0, "versions went back, staleness does not"
