"""Tests of squall.coordinator.machine: events in, effects out, on a clock that the test moves.

Faults planted, each caught: a lease before all have asked · a block handed out twice · a block lost with its replica ·
a request answered twice · `Closed` told twice · a terminal refusal after one finder · strikes never forgotten · a
deadline that a slow replica misses · `Refuse` not sent again · a goodbye at the end told as `Left` · an older life heard.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from squall.blocks import Block, BlockSet, Outcome
from squall.coordinator.events import (
    Closed,
    Diverging,
    Ended,
    FromReplica,
    FromShard,
    Joined,
    Lost,
    Report,
    ShardLost,
    Stop,
    Tick,
    ToReplica,
    ToShard,
)
from squall.coordinator.machine import CoordinatorMachine, Phase
from squall.coordinator.members import Patience
from squall.coordinator.recovery import Inheritance
from squall.coordinator.work import Rhythm, WorkPlan
from squall.observe import events
from squall.slices import Cover
from squall.wire.messages import (
    Ask,
    Books,
    Diverged,
    Finished,
    Goodbye,
    Lease,
    Leave,
    Recall,
    Refuse,
    Refused,
    Resume,
    Returned,
)


@dataclass
class Run:
    """A coordinator, the requests of its replicas by number, and a clock."""

    replicas: int = 2
    blocks: int = 6
    warm_start: int = 0
    shards: int = 2
    settled: BlockSet = field(default_factory=BlockSet)
    max_staleness: int | None = None
    rhythm: Rhythm | None = None
    now: float = 0.0

    def __post_init__(self) -> None:
        plan = WorkPlan(
            stage=0,
            minibatches_per_epoch=self.blocks,
            block_length=1,
            epochs=1,
            steps=None,
            warm_start=self.warm_start,
        )
        self.machine = CoordinatorMachine(
            plan=plan,
            num_replicas=self.replicas,
            num_shards=self.shards,
            settled=self.settled,
            max_staleness=self.max_staleness,
            rhythm=self.rhythm,
            patience=Patience(start_s=60.0, leave_s=5.0, first_s=30.0, least_s=5.0, factor=10.0),
        )
        self.requests = dict.fromkeys(range(self.replicas), 0)
        self.lives = dict.fromkeys(range(self.replicas), 0)

    def handle(self, event: Any) -> tuple[Any, ...]:
        effects = self.machine.handle(event)
        self.machine.check_invariants()
        return effects

    def join(self, replica: int, incarnation: int = 0) -> tuple[Any, ...]:
        self.requests[replica], self.lives[replica] = 0, incarnation
        return self.handle(Joined(now=self.now, replica=replica, incarnation=incarnation))

    def says(self, replica: int, message: Any, incarnation: int | None = None) -> tuple[Any, ...]:
        life = self.lives[replica] if incarnation is None else incarnation
        return self.handle(FromReplica(now=self.now, replica=replica, incarnation=life, message=message))

    def ask(self, replica: int, finished: Finished | None = None) -> tuple[Any, ...]:
        self.requests[replica] += 1
        return self.says(replica, Ask(request=self.requests[replica], finished=finished))

    def done(self, replica: int, first: int, **facts: Any) -> tuple[Any, ...]:
        return self.ask(replica, finished(first, **facts))

    def bad(self, replica: int, first: int) -> tuple[Any, ...]:
        return self.done(replica, first, outcome=Outcome.NOT_FINITE, not_finite="weight")

    def start(self) -> "Run":
        """All join and ask: each holds one block, as many as there are replicas."""
        for replica in range(self.replicas):
            self.join(replica)
        for replica in range(self.replicas):
            self.ask(replica)
        return self

    def held(self, replica: int) -> int:
        """The first position of the block that it holds."""
        (held,) = self.machine.members[replica].leases
        return held.first

    def tick(self, after_s: float = 0.5) -> tuple[Any, ...]:
        self.now += after_s
        return self.handle(Tick(now=self.now))

    def lose(self, replica: int, incarnation: int = 0) -> tuple[Any, ...]:
        return self.handle(Lost(now=self.now, replica=replica, incarnation=incarnation, why="killed"))

    def settle(self, first: int, *outcomes: Outcome) -> tuple[Any, ...]:
        """All shards answer that the block is settled."""
        effects: tuple[Any, ...] = ()
        for shard in range(self.shards):
            told = Refused(request=1, block=block(first), outcomes=outcomes or (Outcome.REFUSED,))
            effects = self.handle(FromShard(now=self.now, shard=shard, message=told))
        return effects


def block(first: int) -> Block:
    return Block(0, 0, first, first + 1)


def finished(first: int, **facts: Any) -> Finished:
    known: dict[str, Any] = {
        "attempt": 1,
        "outcome": Outcome.APPLIED,
        "not_finite": "",
        "loss_sum": 1.0,
        "examples": 8,
    }
    return Finished(block=block(first), staleness=0.0, **(known | facts))


def leases(effects: tuple[Any, ...]) -> list[tuple[int, int, int]]:
    """(replica, first position, attempt) of each lease."""
    return [
        (effect.replica, effect.message.block.first, effect.message.attempt)
        for effect in effects
        if isinstance(effect, ToReplica) and isinstance(effect.message, Lease)
    ]


def refreshes(effects: tuple[Any, ...]) -> list[bool]:
    """Of each lease, whether it asks for a fetch."""
    messages = [effect.message for effect in effects if isinstance(effect, ToReplica)]
    return [message.refresh for message in messages if isinstance(message, Lease)]


def news(effects: tuple[Any, ...], kind: type) -> list[Any]:
    return [
        effect.event for effect in effects if isinstance(effect, Report) and isinstance(effect.event, kind)
    ]


def told(effects: tuple[Any, ...], kind: type) -> list[int]:
    """To which replicas a message of this kind goes."""
    return [e.replica for e in effects if isinstance(e, ToReplica) and isinstance(e.message, kind)]


# The start ----------------------------------------------------------------------------------------------


def test_no_lease_is_granted_before_all_replicas_have_asked() -> None:
    run = Run(replicas=3)
    for replica in range(3):
        run.join(replica)

    assert leases(run.ask(0)) == leases(run.ask(1)) == []
    assert run.machine.waits(0.0) == ("the start waits for replica2",)
    assert leases(run.ask(2)) == [(0, 0, 1), (1, 1, 1), (2, 2, 1)]


def test_after_the_time_out_the_start_goes_on_and_names_the_missing() -> None:
    run = Run(replicas=3)
    for replica in (0, 2):
        run.join(replica)
    run.ask(2)

    assert run.tick(59.9) == ()
    effects = run.tick(0.1)

    assert [(left.role, left.why) for left in news(effects, events.Left)] == [
        (name, "did not fetch within 60 s; the run starts without it") for name in ("replica0", "replica1")
    ]
    assert leases(effects) == [(2, 0, 1)]
    assert leases(run.ask(0)) == [(0, 1, 1)], "who comes late gets work all the same"


def test_nobody_at_all_is_waited_for_beyond_the_time_out() -> None:
    run = Run()
    run.join(0)
    run.tick(100.0)
    assert run.machine.phase is Phase.STARTING


def test_a_replica_that_dies_before_the_start_is_not_waited_for_unless_it_comes_back() -> None:
    run = Run(replicas=3)
    for replica in range(3):
        run.join(replica)
    run.lose(1)
    run.join(1, incarnation=1)
    run.lose(2)

    assert leases(run.ask(0)) == []
    assert leases(run.ask(1)) == [(0, 0, 1), (1, 1, 1)]


# Leases -------------------------------------------------------------------------------------------------


def test_each_block_is_handed_out_once_and_closed_once() -> None:
    run = Run().start()

    first = run.done(0, 0)
    again = run.done(0, 0)

    assert [effect for effect in first if isinstance(effect, Closed)] == [
        Closed(replica=0, report=finished(0))
    ]
    assert leases(first) == [(0, 2, 1)]
    assert not [effect for effect in again if isinstance(effect, Closed)]
    assert leases(again) == [(0, 3, 1)]


def test_a_resent_request_gets_the_same_answer_and_no_second_lease() -> None:
    run = Run().start()
    answer = run.says(0, Ask(request=1, finished=None))
    assert leases(answer) == [(0, 0, 1)]
    assert leases(run.done(1, 1)) == [(1, 2, 1)]


def test_requests_of_long_ago_are_not_answered_again() -> None:
    run = Run(replicas=1, blocks=60).start()
    for first in range(40):
        run.done(0, first)
    assert leases(run.says(0, Ask(request=9, finished=None))) == []
    assert leases(run.says(0, Ask(request=10, finished=None))) == [(0, 9, 1)]


def test_only_who_has_waited_is_told_to_fetch_first() -> None:
    run = Run(blocks=2).start()
    run.done(0, 0)  # all is handed out: it waits

    assert refreshes(run.lose(1)) == [True]
    assert refreshes(Run().start().done(0, 0)) == [False]


def test_blocks_that_came_back_go_first_and_their_attempts_count_up() -> None:
    run = Run().start()
    run.lose(1)

    effects = run.done(0, 0)

    assert leases(effects) == [(0, 1, 2)]
    (redone,) = news(effects, events.Redone)
    assert (redone.block, redone.attempt, redone.replica) == (block(1), 2, 0)
    assert redone.why == "replica1: killed"


def test_a_block_that_its_first_holder_finishes_late_is_not_done_again() -> None:
    run = Run(blocks=3).start()
    run.tick(31.0)  # both are silent
    run.done(0, 0)

    effects = run.done(1, 1)

    assert [effect.report.block for effect in effects if isinstance(effect, Closed)] == [block(1)]
    assert run.machine.settled.num_minibatches == 2


def test_during_a_warm_start_one_replica_works_alone() -> None:
    run = Run(warm_start=2).start()
    assert leases(run.tick()) == []

    assert leases(run.done(0, 0)) == [(0, 1, 1)]
    assert leases(run.done(0, 1)) == [(1, 2, 1), (0, 3, 1)]  # who has waited longer comes first


def test_a_warm_start_passes_to_the_next_when_its_replica_is_lost() -> None:
    run = Run(warm_start=2).start()
    assert leases(run.lose(0)) == [(1, 0, 2)]


def test_what_a_resumed_run_has_is_not_handed_out() -> None:
    run = Run(settled=BlockSet(((0, 0, 0, 4),))).start()
    assert [block for member in run.machine.members.values() for block in member.leases] == [
        block(4),
        block(5),
    ]


@pytest.mark.parametrize(("bound", "num_held"), [(0, 1), (1, 2), (2, 3), (None, 3)])
def test_no_more_blocks_are_out_than_the_bound_on_staleness_lets_overtake_one(
    bound: int | None, num_held: int
) -> None:
    run = Run(replicas=3, max_staleness=bound).start()
    assert sum(len(member.leases) for member in run.machine.members.values()) == num_held


def test_a_block_that_is_out_for_long_holds_up_those_that_would_make_it_too_stale() -> None:
    run = Run(replicas=2, max_staleness=2).start()

    assert leases(run.done(0, 0)) == [(0, 2, 1)], "one has overtaken it, another may"
    assert leases(run.done(0, 2)) == [], "a third might"
    assert leases(run.done(1, 1)) == [(0, 3, 1), (1, 4, 1)]


def test_a_block_that_was_lost_counts_as_out_until_it_is_settled() -> None:
    run = Run(replicas=2, max_staleness=1).start()
    run.lose(1)
    assert leases(run.done(0, 0)) == [(0, 1, 2)], "the lost one itself may be started again"


# Who is lost, silent or replaced ------------------------------------------------------------------------


def test_a_silent_replica_loses_its_lease_and_is_heard_again() -> None:
    run = Run(blocks=2).start()
    run.done(0, 0)

    assert leases(run.tick(30.0)) == []
    effects = run.tick(0.5)

    assert leases(effects) == [(0, 1, 2)]
    assert news(effects, events.Redone)[0].why == "replica1 has been silent for 30 s"
    assert "replica1 has been silent for 30 s" in run.machine.waits(run.now)
    run.done(1, 1)
    assert not [wait for wait in run.machine.waits(run.now) if "replica1 has been silent" in wait]


def test_a_replica_ten_times_slower_keeps_its_lease() -> None:
    run = Run(blocks=60).start()
    held = [0, 1]
    for second in range(1, 41):
        run.now = float(second)
        assert leases(run.tick(0.0)) == []
        for replica in (0, 1) if second % 10 == 0 else (0,):
            ((_, held[replica], _),) = leases(run.done(replica, held[replica]))
    assert not [wait for wait in run.machine.waits(run.now) if "silent" in wait]


def test_a_deadline_is_learned_from_the_replicas_own_blocks() -> None:
    run = Run(replicas=1, blocks=9).start()
    for first in range(3):
        run.now += 2.0
        run.done(0, first)
    run.tick(20.0)
    assert not run.machine.members[0].is_overdue
    run.tick(0.5)
    assert run.machine.members[0].is_overdue


def test_a_later_life_replaces_the_earlier_whose_words_are_ignored() -> None:
    run = Run().start()

    effects = run.join(1, incarnation=1)

    assert [left.why for left in news(effects, events.Left)] == ["replaced by a later start"]
    assert news(effects, events.Joined)[0].incarnation == 1
    assert run.lose(1, incarnation=0) == ()
    assert run.says(1, Goodbye(), incarnation=0) == ()
    late = run.says(1, Ask(request=9, finished=finished(1)), incarnation=0)
    assert told(late, Leave) == [1]
    assert not [effect for effect in late if isinstance(effect, Closed)]
    assert leases(run.ask(1)) == [(1, 1, 2)]


@pytest.mark.parametrize("incarnation", [0, 1])
def test_a_life_that_is_no_later_changes_nothing(incarnation: int) -> None:
    run = Run().start()
    run.join(1, incarnation=1)
    assert run.handle(Joined(now=0.0, replica=1, incarnation=incarnation)) == ()


# Gradients that are not finite --------------------------------------------------------------------------


def test_a_block_not_finite_from_two_replicas_is_settled_on_all_shards() -> None:
    run = Run().start()
    assert leases(run.bad(0, 0)) == [(0, 2, 1)], "not again to who found it so"
    assert leases(run.done(1, 1)) == [(1, 0, 2)]

    effects = run.bad(1, 0)

    asked = [(effect.shard, effect.message) for effect in effects if isinstance(effect, ToShard)]
    assert asked == [(shard, Refuse(request=1, block=block(0))) for shard in (0, 1)]
    (refused,) = news(run.settle(0), events.Refused)
    assert (refused.block, refused.why) == (block(0), "the gradient of 'weight' was not finite")
    assert run.machine.refused == {block(0): refused.why}


def test_twice_from_the_only_live_replica_is_terminal_too() -> None:
    run = Run(replicas=1).start()
    assert leases(run.bad(0, 0)) == [(0, 0, 2)]
    assert [effect.shard for effect in run.bad(0, 0) if isinstance(effect, ToShard)] == [0, 1]


def test_shards_that_have_not_answered_are_asked_again_at_each_tick() -> None:
    run = Run(replicas=1).start()
    run.bad(0, 0)
    run.bad(0, 0)
    run.handle(
        FromShard(now=0.0, shard=0, message=Refused(request=1, block=block(0), outcomes=(Outcome.REFUSED,)))
    )

    assert [effect.shard for effect in run.tick() if isinstance(effect, ToShard)] == [1]
    assert "epoch 0, position 0 waits to be settled by shard1" in run.machine.waits(run.now)


def test_a_block_that_some_slices_have_is_listed_as_a_mix() -> None:
    run = Run(replicas=1).start()
    run.done(0, 0, outcome=Outcome.REFUSED)
    (refused,) = news(run.settle(0, Outcome.REPEATED, Outcome.REFUSED), events.Refused)
    assert refused.why == "a shard has a part of it already; some slices had applied it"


def test_three_terminal_refusals_in_a_row_mean_that_the_run_diverges() -> None:
    run = Run(replicas=1, blocks=9).start()
    for first in range(3):
        run.bad(0, first)
        run.bad(0, first)
        effects = run.settle(first)
        assert bool([effect for effect in effects if isinstance(effect, Diverging)]) == (first == 2)

    assert run.machine.phase is Phase.LEAVING
    assert Diverging(what="the gradient", tensor="weight", block=block(2)) in effects


def test_a_block_that_is_done_breaks_the_row() -> None:
    run = Run(replicas=1, blocks=9).start()
    for first in range(5):
        if first == 2:
            run.done(0, first)
            continue
        run.bad(0, first)
        run.bad(0, first)
        run.settle(first)
    assert run.machine.phase is Phase.RUNNING


def test_who_keeps_sending_what_others_find_finite_is_quarantined() -> None:
    run = Run(blocks=20).start()
    run.bad(1, 1)
    effects: tuple[Any, ...] = ()
    for _ in range(3):
        run.done(0, run.held(0))
        effects = run.done(0, run.held(0))  # what the other could not
        if 1 in run.machine.members:
            run.bad(1, run.held(1))

    assert 1 not in run.machine.members
    assert told(effects, Recall) == [1]
    assert news(effects, events.Left)[0].why.startswith("quarantined: 3 blocks were not finite from it")


def test_twenty_good_blocks_in_a_row_forgive_what_was_not_finite() -> None:
    for good, is_forgiven in ((19, False), (20, True)):
        run = Run(blocks=60).start()
        for _ in range(2):
            _found_finite_by_the_other(run)
        for _ in range(good):
            run.done(1, run.held(1))
        _found_finite_by_the_other(run)
        assert (1 in run.machine.members) is is_forgiven


def _found_finite_by_the_other(run: Run) -> None:
    """Replica 1 finds its block not finite, and replica 0 does it."""
    bad = run.held(1)
    run.bad(1, bad)
    while run.held(0) != bad:
        run.done(0, run.held(0))
    run.done(0, bad)


def test_a_shard_that_diverges_ends_the_run() -> None:
    run = Run().start()
    effects = run.handle(FromShard(now=1.0, shard=0, message=Diverged(block=block(1), tensor=4)))
    assert effects[0] == Diverging(what="the update", tensor=4, block=block(1))
    assert told(effects, Recall) == [0, 1]
    assert run.machine.why == "diverged"


# The end ------------------------------------------------------------------------------------------------


def test_when_all_is_done_everyone_is_answered_with_leave() -> None:
    run = Run(blocks=2).start()
    assert told(run.done(0, 0), Leave) == []

    effects = run.done(1, 1)

    assert told(effects, Leave) == [0, 1]
    assert run.machine.why == "epochs"


def test_a_goodbye_at_the_end_is_no_news_and_the_last_one_ends_the_stage() -> None:
    run = Run(blocks=2).start()
    run.done(0, 0)
    run.done(1, 1)

    assert run.says(0, Goodbye()) == ()
    assert run.says(1, Goodbye()) == (Ended(why="epochs"),)


def test_a_goodbye_before_the_end_is_told_and_its_block_goes_to_others() -> None:
    run = Run(blocks=2).start()
    run.done(0, 0)

    effects = run.says(1, Goodbye())

    assert [left.why for left in news(effects, events.Left)] == ["asked to leave"]
    assert leases(effects) == [(0, 1, 2)]


def test_a_stop_recalls_who_works_and_answers_who_waits() -> None:
    run = Run(blocks=2).start()
    run.done(0, 0)

    effects = run.handle(Stop(now=1.0, why="time"))

    assert told(effects, Recall) == [1]
    assert told(effects, Leave) == [0]
    assert leases(run.ask(0)) == []
    assert run.handle(Stop(now=2.0, why="again")) == ()
    assert run.machine.why == "time"


def test_who_does_not_leave_is_recalled_again_and_given_up_at_last() -> None:
    run = Run().start()
    run.handle(Stop(now=0.0, why="time"))
    run.says(0, Goodbye())

    assert told(run.tick(4.9), Recall) == [1]
    effects = run.tick(0.1)

    assert [left.why for left in news(effects, events.Left)] == ["did not leave within 5 s"]
    assert effects[-1] == Ended(why="time")


def test_who_is_lost_while_leaving_is_told_and_may_be_the_last() -> None:
    run = Run(replicas=1).start()
    run.handle(Stop(now=0.0, why="time"))
    effects = run.lose(0)
    assert [left.why for left in news(effects, events.Left)] == ["killed"]
    assert effects[-1] == Ended(why="time")


def test_who_joins_too_late_is_recalled() -> None:
    run = Run().start()
    run.handle(Stop(now=0.0, why="time"))
    assert told(run.join(5), Recall) == [5]


def test_with_nobody_left_the_run_waits_and_says_so() -> None:
    run = Run().start()
    run.lose(0)
    run.lose(1)
    assert run.machine.waits(0.0) == ("the run waits for a replica: none is left",)
    run.join(0, incarnation=1)
    assert leases(run.ask(0)) == [(0, 0, 2)]


# Shards that were killed --------------------------------------------------------------------------------


def returned(run: Run, shard: int, incarnation: int, *firsts: int) -> tuple[Any, ...]:
    """A shard has come back, with these blocks."""
    everywhere = BlockSet.union(block(first) for first in firsts).blocks()
    message = Returned(incarnation=incarnation, everywhere=everywhere)
    return run.handle(FromShard(now=run.now, shard=shard, message=message))


def closes(effects: tuple[Any, ...]) -> bool:
    return any(isinstance(effect, Closed) for effect in effects)


def test_what_a_shard_has_lost_is_handed_out_again_first_and_closed_without_a_second_word() -> None:
    run = Run(replicas=1, blocks=4).start()
    for first in range(2):
        run.done(0, first, lives=((0, 0), (1, 0)))

    effects = returned(run, 1, 1, 1)

    (event,) = news(effects, events.Recovered)
    assert (event.role, event.incarnation, event.lost) == ("shard1", 1, 1)
    effects = run.done(0, 2, lives=((0, 0), (1, 1)))
    assert leases(effects) == [(0, 0, 2)]
    assert news(effects, events.Redone)[0].why == "shard1 came back without it"
    assert not closes(run.done(0, 0, attempt=2, lives=((0, 0), (1, 1))))
    run.done(0, 3, lives=((0, 0), (1, 1)))
    assert run.machine.settled.num_minibatches == 4


def test_a_shard_that_has_lost_nothing_has_nothing_done_again() -> None:
    run = Run(replicas=1, blocks=4).start()
    run.done(0, 0, lives=((0, 0), (1, 0)))

    effects = returned(run, 0, 1, 0)

    assert news(effects, events.Recovered)[0].lost == 0
    assert leases(effects) == []
    assert run.machine.settled.num_minibatches == 1


def test_a_word_of_a_past_life_counts_only_for_what_came_back() -> None:
    """The replica was told by the shard, the shard died, and the replica's report comes last."""
    run = Run(replicas=1, blocks=4).start()
    returned(run, 0, 1)

    effects = run.done(0, 0, lives=((0, 0), (1, 0)))

    assert leases(effects) == [(0, 0, 2)]
    assert closes(run.done(0, 0, attempt=2, lives=((0, 1), (1, 0))))


def test_the_first_word_of_a_life_is_heard_once() -> None:
    run = Run(replicas=1, blocks=4).start()
    run.done(0, 0, lives=((0, 0), (1, 0)))
    assert returned(run, 0, 1)

    assert returned(run, 0, 1) == ()
    assert returned(run, 0, 0) == ()


def test_a_refused_block_that_a_shard_has_lost_is_settled_again_by_it_alone_and_not_told_again() -> None:
    run = Run(replicas=2, blocks=3).start()
    first = run.held(0)
    run.bad(0, first)
    run.bad(1, run.held(1))
    while run.machine.refused == {}:
        (held,) = [
            replica for replica, member in run.machine.members.items() if block(first) in member.leases
        ]
        run.bad(held, first)
        run.settle(first)

    effects = returned(run, 1, 1)

    asked = [(effect.shard, effect.message.block.first) for effect in effects if isinstance(effect, ToShard)]
    assert (1, first) in asked
    assert (0, first) not in asked
    message = Refused(request=9, block=block(first), outcomes=(Outcome.REFUSED,))
    effects = run.handle(FromShard(now=run.now, shard=1, message=message))
    assert not news(effects, events.Refused)
    assert run.machine.settled.cover(block(first)) is Cover.CONTAINED


def test_while_a_shard_is_gone_nobody_is_overdue_and_the_wait_is_told() -> None:
    run = Run(replicas=1).start()
    run.handle(ShardLost(now=run.now, shard=1))

    run.tick(100.0)

    assert not run.machine.members[0].is_overdue
    assert "the run waits for shard1 to come back, since 100 s" in run.machine.waits(run.now)
    returned(run, 1, 1)
    run.tick(29.0)
    assert not run.machine.members[0].is_overdue
    assert not any("shard1" in wait for wait in run.machine.waits(run.now))
    run.tick(2.0)
    assert run.machine.members[0].is_overdue


def test_what_is_lost_when_all_leave_is_said_to_be_the_end() -> None:
    run = Run(replicas=1, blocks=4).start()
    run.done(0, 0, lives=((0, 0), (1, 0)))
    run.handle(Stop(now=run.now, why="stopped"))

    returned(run, 0, 1)
    effects = run.says(0, Goodbye())

    assert [effect.why for effect in effects if isinstance(effect, Ended)] == [
        "stopped, and a shard came back without 1 minibatches that were not done again"
    ]


def test_what_was_lost_before_a_stop_is_said_too_unless_it_was_done_again() -> None:
    for does_it_again, why in (
        (False, "stopped, and a shard came back without 1 minibatches that were not done again"),
        (True, "stopped"),
    ):
        run = Run(replicas=1, blocks=4).start()
        run.done(0, 0, lives=((0, 0), (1, 0)))
        returned(run, 0, 1)
        if does_it_again:
            run.done(0, 0, lives=((0, 1), (1, 0)))
        run.handle(Stop(now=run.now, why="stopped"))
        effects = run.says(0, Goodbye())

        assert [effect.why for effect in effects if isinstance(effect, Ended)] == [why]


def test_a_stop_that_waits_for_rest_ends_the_run_when_the_last_block_is_refused_and_nobody_is_left() -> None:
    run = Run(replicas=1, shards=1, rhythm=Rhythm(n_fetch=1, n_push=1)).start()
    assert run.handle(Stop(now=run.now, why="asked")) == ()
    run.bad(0, 0)
    run.bad(0, 0)
    run.lose(0)
    assert run.machine.phase is Phase.RUNNING
    effects = run.settle(0)
    assert effects[-1] == Ended(why="asked")


def test_a_stop_that_waits_too_long_for_rest_ends_the_run_at_once_if_nobody_is_left() -> None:
    run = Run(replicas=1, rhythm=Rhythm(n_fetch=2, n_push=1)).start()
    run.handle(Stop(now=run.now, why="asked"))
    run.lose(0)
    assert run.tick(4.5) == ()
    assert run.tick(0.5) == (Ended(why="asked"),)


def test_one_that_follows_goes_on_as_soon_as_all_have_said_what_they_hold() -> None:
    run = Run(replicas=1, shards=1)
    run.machine = CoordinatorMachine(
        plan=run.machine.plan,
        num_replicas=1,
        num_shards=1,
        settled=BlockSet(),
        inheritance=Inheritance(epoch=1, expected=(0,)),
    )
    run.join(0)
    nothing = Books(epoch=1, incarnation=0, anywhere=(), everywhere=(), refused=())
    run.handle(FromShard(now=0.0, shard=0, message=nothing))
    assert run.machine.phase is Phase.RECOVERING
    run.says(0, Resume(leases=((block(0), 1),), done=()))
    assert run.machine.phase is Phase.RUNNING
    assert run.held(0) == 0
