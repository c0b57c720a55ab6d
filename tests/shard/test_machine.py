"""Tests of squall.shard.machine: messages in, effects out; no sockets, threads or tensors.

Faults planted, each caught: the set of settled positions not consulted · a resend that writes the buffer again · a
partial overlap applied · the version counted for a repeat · an update for a dead worker answered · a request of a past
life served · a request taken up while an update runs · a refusal that forgets the parts a slice lacks · the books of
a checkpoint shared with the shard.
"""

from typing import Any

import pytest

from squall.blocks import Block, BlockSet, Outcome
from squall.errors import RemoteProtocolError
from squall.shard.books import SliceBook
from squall.shard.events import (
    Answer,
    Applied,
    Apply,
    Attach,
    Close,
    ComeBack,
    Detach,
    FromCoordinator,
    FromWorker,
    NotFinite,
    Record,
    Save,
    Store,
    Tell,
    Worker,
    WriteOut,
)
from squall.shard.machine import Phase, ShardMachine
from squall.wire.messages import Diverged, Fetch, Fetched, Push, Pushed, Refuse, Refused, Returned


def worker(replica: int = 0, incarnation: int = 0, partition: int = 0) -> Worker:
    return Worker(replica=replica, partition=partition, incarnation=incarnation)


def make_shard(*, slices: int = 1, workers: tuple[Worker, ...] = (worker(0), worker(1))) -> ShardMachine:
    books = tuple(SliceBook.new(number, 0) for number in range(slices))
    shard = ShardMachine(shard=0, incarnation=2, books=books)
    for each in workers:
        shard.handle(Attach(worker=each))
    return shard


def push(request: int = 1, first: int = 0, length: int = 1, **facts: Any) -> Push:
    known: dict[str, Any] = {
        "block": Block(0, 0, first, first + length),
        "attempt": 1,
        "minibatches": length,
        "examples": 8 * length,
        "based_on": (0,),
        "absent": (),
        "not_finite": "",
        "into": 0,
        "incarnation": 2,
    }
    return Push(request=request, **(known | facts))


def send(shard: ShardMachine, message: Fetch | Push, sender: Worker | None = None) -> tuple[Any, ...]:
    effects = shard.handle(FromWorker(sender=sender or worker(), message=message))
    shard.check_invariants()
    return effects


def apply(shard: ShardMachine, message: Push, sender: Worker | None = None) -> tuple[Any, ...]:
    """Push, and let the update succeed."""
    (effect,) = send(shard, message, sender)
    assert isinstance(effect, Apply)
    effects = shard.handle(Applied())
    shard.check_invariants()
    return effects


def only(effects: tuple[Any, ...], kind: type) -> Any:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def outcomes(effects: tuple[Any, ...]) -> tuple[Outcome, ...]:
    reply = only(effects, Answer).message
    assert isinstance(reply, Pushed)
    return reply.outcomes


# At most once -------------------------------------------------------------------------------------------


def test_a_new_block_is_applied_then_recorded_then_answered() -> None:
    shard = make_shard()

    (update,) = send(shard, push())
    assert update == Apply(sender=worker(), push=push(), slices=(0,))
    row, answer = shard.handle(Applied())

    assert row == Record(
        sender=worker(),
        slice=0,
        block=Block(0, 0, 0, 1),
        attempt=1,
        minibatches=1,
        examples=8,
        based_on=0,
        version=1,
        staleness=0,
        outcome=Outcome.APPLIED,
    )
    assert answer.message.incarnation == 2
    assert [(state.version, state.minibatches) for state in answer.message.states] == [(1, 1)]


def test_a_resent_push_is_answered_from_memory_without_writing_a_buffer() -> None:
    shard = make_shard()
    first = only(apply(shard, push()), Answer)

    again = send(shard, push())

    assert again == (first,)
    assert shard.books[0].version == 1


def test_a_block_from_someone_else_is_a_repeat_and_the_fetch_is_written_out() -> None:
    shard = make_shard()
    apply(shard, push())

    effects = send(shard, push(based_on=(1,), into=1), worker(1))

    assert outcomes(effects) == (Outcome.REPEATED,)
    assert only(effects, WriteOut) == WriteOut(to=worker(1), slices=(0,), into=1)
    assert only(effects, Record).version == shard.books[0].version == 1


def test_a_block_within_what_is_settled_is_a_repeat_however_it_was_cut() -> None:
    shard = make_shard()
    apply(shard, push(length=4))
    assert outcomes(send(shard, push(2, first=1, length=2))) == (Outcome.REPEATED,)


@pytest.mark.parametrize("first", [1, 3])
def test_a_block_that_meets_the_settled_ones_in_part_is_refused(first: int) -> None:
    shard = make_shard()
    apply(shard, push(first=2, length=2))

    effects = send(shard, push(2, first=first, length=2))

    assert outcomes(effects) == (Outcome.REFUSED,)
    assert shard.books[0].settled.entries() == ((0, 0, 2, 4),)


def test_each_slice_decides_by_its_own_set() -> None:
    shard = make_shard(slices=2)
    shard.books[1].settled.add(Block(0, 0, 0, 1))
    shard.books[1].version = shard.books[1].minibatches = 1

    (update,) = send(shard, push(based_on=(0, 0)))
    assert update.slices == (0,)
    effects = shard.handle(Applied())

    assert outcomes(effects) == (Outcome.APPLIED, Outcome.REPEATED)
    assert only(effects, WriteOut).slices == (1,), "the rule wrote the other one through"


def test_staleness_is_the_version_before_less_the_one_it_was_based_on() -> None:
    shard = make_shard()
    for request in range(1, 4):
        apply(shard, push(request, first=request))

    row = only(apply(shard, push(9, first=9, based_on=(1,)), worker(1)), Record)

    assert (row.version, row.staleness) == (4, 2)


def test_a_push_without_a_fetch_writes_no_buffer() -> None:
    shard = make_shard()
    effects = send(shard, push(not_finite="weight", into=None))
    assert not [effect for effect in effects if isinstance(effect, WriteOut)]


# Not finite ---------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_changes_nothing_and_may_come_again() -> None:
    shard = make_shard()

    assert outcomes(send(shard, push(not_finite="weight"))) == (Outcome.NOT_FINITE,)
    assert shard.books[0].version == 0
    assert outcomes(apply(shard, push(), worker(1))) == (Outcome.APPLIED,)


def test_a_block_settled_as_refused_is_refused_for_ever() -> None:
    shard = make_shard()
    refuse = FromCoordinator(message=Refuse(request=4, block=Block(0, 0, 0, 2)))

    row, told = shard.handle(refuse)
    again = shard.handle(refuse)

    assert (row.sender, row.outcome, row.minibatches, row.version) == (None, Outcome.REFUSED, 2, 0)
    assert told == Tell(message=Refused(request=4, block=Block(0, 0, 0, 2), outcomes=(Outcome.REFUSED,)))
    assert again == (told,), "asked again, it says the same and records nothing"
    assert outcomes(send(shard, push(length=2))) == (Outcome.REFUSED,)


def test_a_refusal_says_where_the_block_was_applied_before() -> None:
    shard = make_shard()
    apply(shard, push(length=2))
    (told,) = shard.handle(FromCoordinator(message=Refuse(request=1, block=Block(0, 0, 0, 2))))
    assert told.message.outcomes == (Outcome.REPEATED,)


def test_a_refusal_settles_what_a_slice_lacks_of_the_block() -> None:
    shard = make_shard()
    apply(shard, push(first=2))

    effects = shard.handle(FromCoordinator(message=Refuse(request=1, block=Block(0, 0, 1, 4))))

    parts = [effect.block for effect in effects if isinstance(effect, Record)]
    assert parts == [Block(0, 0, 1, 2), Block(0, 0, 3, 4)]
    assert shard.books[0].settled == BlockSet(((0, 0, 1, 4),))
    assert only(effects, Tell).message.outcomes == (Outcome.REFUSED,)


def test_an_update_that_is_not_finite_ends_all_updates_and_is_told() -> None:
    shard = make_shard()
    send(shard, push())

    effects = shard.handle(NotFinite(tensor=7))

    assert effects[0] == Tell(message=Diverged(block=Block(0, 0, 0, 1), tensor=7))
    assert outcomes(effects) == (Outcome.REFUSED,)
    assert shard.phase is Phase.DIVERGED
    assert outcomes(send(shard, push(2, first=5))) == (Outcome.REFUSED,)
    assert isinstance(send(shard, Fetch(request=3, into=1))[0], WriteOut), "but it can still be read"


# Who talks to it ----------------------------------------------------------------------------------------


def test_a_fetch_is_written_out_and_then_answered() -> None:
    shard = make_shard(slices=2)

    written, answer = send(shard, Fetch(request=1, into=1))

    assert written == WriteOut(to=worker(), slices=(0, 1), into=1)
    assert isinstance(answer.message, Fetched)
    assert [state.slice for state in answer.message.states] == [0, 1]


def test_an_older_request_has_had_its_answer_and_is_dropped() -> None:
    shard = make_shard()
    send(shard, Fetch(request=2, into=1))
    assert send(shard, Fetch(request=1, into=0)) == ()
    assert shard.num_dropped == 1


def test_a_later_life_begins_anew_and_an_earlier_one_is_not_served() -> None:
    shard = make_shard()
    send(shard, Fetch(request=5, into=1))
    shard.handle(Attach(worker=worker(0, incarnation=1)))

    assert send(shard, Fetch(request=6, into=0), worker(0)) == ()
    assert len(send(shard, Fetch(request=1, into=0), worker(0, incarnation=1))) == 2


@pytest.mark.parametrize("incarnation", [0, 1])
def test_attaching_a_life_that_is_no_later_changes_nothing(incarnation: int) -> None:
    shard = make_shard(workers=(worker(0, incarnation=1),))
    send(shard, Fetch(request=5, into=1), worker(0, incarnation=1))

    shard.handle(Attach(worker=worker(0, incarnation)))

    assert send(shard, Fetch(request=4, into=0), worker(0, incarnation=1)) == ()


def test_the_end_of_an_earlier_life_does_not_end_the_later_one() -> None:
    shard = make_shard(workers=(worker(0, incarnation=1),))
    shard.handle(Detach(worker=worker(0)))
    assert len(send(shard, Fetch(request=1, into=0), worker(0, incarnation=1))) == 2


def test_an_update_of_a_worker_that_died_is_recorded_and_not_answered() -> None:
    shard = make_shard()
    send(shard, push())
    shard.handle(Detach(worker=worker()))

    (row,) = shard.handle(Applied())

    assert isinstance(row, Record)
    assert outcomes(send(shard, push(based_on=(1,)), worker(1))) == (Outcome.REPEATED,)


def test_requests_wait_for_a_running_update_in_the_order_of_arrival() -> None:
    shard = make_shard(workers=(worker(0), worker(1), worker(2)))
    send(shard, push())

    assert send(shard, push(first=1), worker(1)) == ()
    assert send(shard, Fetch(request=1, into=0), worker(2)) == ()
    first = shard.handle(Applied())
    second = shard.handle(Applied())

    assert [type(effect) for effect in first] == [Record, Answer, Apply]
    assert [type(effect) for effect in second] == [Record, Answer, WriteOut, Answer]
    assert second[-1].message.states[0].version == 2


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (Fetch(request=1, into=2), "buffer 0 or 1"),
        (push(into=2), "buffer 0 or 1"),
        (push(based_on=()), "expected 1 versions, but got 0"),
        (push(based_on=(1,)), "at version 0, not 1"),
        (push(based_on=(-1,)), "at version 0, not -1"),
        (push(minibatches=2), "expected 1 minibatches, got 2"),
    ],
)
def test_what_no_sound_worker_sends_is_refused_at_the_door(message: Fetch | Push, what: str) -> None:
    shard = make_shard()

    with pytest.raises(RemoteProtocolError, match=f"replica 0.0: .*{what}"):
        send(shard, message)

    assert len(send(shard, Fetch(request=1, into=0))) == 2, "the number is still free"


# Checkpoint and end -------------------------------------------------------------------------------------


def test_a_checkpoint_holds_copies_of_the_books() -> None:
    shard = make_shard()
    apply(shard, push())

    (store,) = shard.handle(Save(name="half"))
    apply(shard, push(2, first=1))

    assert isinstance(store, Store)
    assert (store.name, store.books[0].version, store.books[0].settled.entries()) == (
        "half",
        1,
        ((0, 0, 0, 1),),
    )


def test_a_closed_shard_answers_nobody() -> None:
    shard = make_shard()
    shard.handle(Close())
    assert send(shard, push()) == send(shard, Fetch(request=2, into=0)) == ()
    assert shard.handle(FromCoordinator(message=Refuse(request=1, block=Block(0, 0, 0, 1)))) == ()


# A later life -------------------------------------------------------------------------------------------


def came_back(version: int) -> ShardMachine:
    """A shard that came back with so many blocks, and one worker."""
    book = SliceBook.new(0, 0)
    for first in range(version):
        book.take(Block(0, 0, first, first + 1), 1)
    shard = ShardMachine(shard=0, incarnation=3, books=(book,))
    shard.handle(Attach(worker=worker()))
    return shard


def test_a_shard_that_comes_back_says_what_all_its_slices_have() -> None:
    books = [SliceBook.new(number, 0) for number in range(2)]
    for book, first in ((books[0], 0), (books[1], 0), (books[1], 5)):
        book.take(Block(0, 0, first, first + 2), 2)

    (tell,) = ShardMachine(shard=0, incarnation=3, books=tuple(books)).handle(ComeBack())

    assert tell == Tell(message=Returned(incarnation=3, everywhere=(Block(0, 0, 0, 2),)))


def test_a_shard_without_slices_that_comes_back_has_lost_nothing() -> None:
    (tell,) = ShardMachine(shard=0, incarnation=1, books=()).handle(ComeBack())

    assert tell.message.everywhere is None


def test_a_push_based_on_an_earlier_life_counts_from_what_is_left_of_it() -> None:
    shard = came_back(4)
    apply(shard, push(1, first=10, based_on=(4,), incarnation=3))

    rows = [
        only(apply(shard, push(number, first=number + 10, based_on=(told,), incarnation=2)), Record)
        for number, told in ((2, 9), (3, 2))
    ]

    assert [(row.version, row.based_on, row.staleness) for row in rows] == [(6, 4, 1), (7, 2, 4)]


def test_a_push_of_this_life_may_not_be_ahead_of_it() -> None:
    with pytest.raises(RemoteProtocolError, match="at version 4, not 9"):
        send(came_back(4), push(1, first=10, based_on=(9,), incarnation=3))
