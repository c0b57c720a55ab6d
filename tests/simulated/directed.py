"""Small hand-written schedules, each with one thing in view that chance brings about too rarely.

Each takes a variant, a number that shifts its times and seeds a little, so that one idea gives many schedules.
"""

from collections.abc import Callable
from dataclasses import replace

from squall.blocks import Block
from squall.cluster.links import Link, Links
from squall.cluster.world import Outside, Pace
from squall.coordinator.events import (
    Checkpoint,
    Copied,
    FromReplica,
    FromShard,
    Joined,
    Lost,
    ShardLost,
    Stop,
)
from squall.faults import AtStep, AtTime, Cut, Delay, Drop, Duplicate, Kill, Pause
from squall.replica import session
from squall.shard.events import Attach, Close, FromCoordinator, FromWorker, Save, Worker
from squall.wire.messages import (
    Ask,
    Diverged,
    Fetch,
    Goodbye,
    Held,
    Hold,
    Inquire,
    Recall,
    Refused,
    Release,
    Released,
)
from tests.simulated.coordinator_rules import Waiting
from tests.simulated.schedules import Schedule

DIRECTED: dict[str, Callable[[int], Schedule]] = {}
SHORT = Waiting(start_s=6.0, first_s=8.0)


def directed(make: Callable[[int], Schedule]) -> Callable[[int], Schedule]:
    DIRECTED[make.__name__] = make
    return make


def _recall(replica: int, at_s: float) -> Outside:
    return Outside(
        at_s=at_s, role=f"replica{replica}", event=session.FromCoordinator(message=Recall(why="by SIGTERM"))
    )


def _stop(at_s: float) -> Outside:
    return Outside(at_s=at_s, role="coordinator", event=Stop(now=at_s, why="stopped"))


def _shift(variant: int, step: float = 0.07) -> float:
    return variant * step


# Nothing goes wrong -----------------------------------------------------------------------------------


@directed
def lone(variant: int) -> Schedule:
    return Schedule(seed=variant, num_replicas=1, slices=((0,),), has_local_steps=True, ahead=variant % 2)


@directed
def fetches_between_pushes(variant: int) -> Schedule:
    """Fetches fall within blocks, or ride on some pushes only; blocks at ends of epochs are short."""
    n_fetch, n_push = ((1, 3), (2, 3), (2, 5), (5, 2), (4, 2), (3, 3), (7, 3), (1, 1), (3, 4))[variant % 9]
    return Schedule(
        seed=variant,
        num_replicas=1 + variant % 2,
        n_fetch=n_fetch,
        n_push=n_push,
        has_local_steps=True,
        minibatches_per_epoch=11,
        epochs=3,
        pace=Pace(speeds=(5.0, 3.0)),
    )


@directed
def pushes_behind_computing(variant: int) -> Schedule:
    """Pushes and fetches overlap with computing, on slow links, with few and with many leases ahead."""
    n_fetch, n_push = ((1, 1), (2, 1), (3, 2), (1, 3), (5, 1))[variant % 5]
    return Schedule(
        seed=variant,
        num_replicas=1 + variant % 3,
        n_fetch=n_fetch,
        n_push=n_push,
        overlaps=True,
        has_local_steps=variant % 2 == 1,
        ahead=variant % 4,
        minibatches_per_epoch=9,
        faults=(Delay(0.4 * (variant % 3), 0.1),) if variant % 2 else (),
        poisoned=((0, 4),) if variant % 4 == 3 else (),
        outside=(_recall(0, 4.3 + _shift(variant)),) if variant % 3 == 2 else (),
        slices=((0, 1), (2,)) if variant % 7 else ((), ()),
        pace=Pace(apply_s=0.3 * (variant % 2)),
    )


@directed
def bounded_staleness(variant: int) -> Schedule:
    """Blocks are begun late rather than pushed stale; one that is lost or refused counts until it is settled."""
    return Schedule(
        seed=variant,
        num_replicas=3 + variant % 2,
        max_staleness=variant % 4,
        n_push=1 + variant % 2,
        minibatches_per_epoch=12,
        epochs=1,
        faults=(Kill("replica1", AtTime(2.5 + _shift(variant)), restart=1.0),) if variant % 2 else (),
        poisoned=((0, 3), (0, 7)) if variant % 4 > 1 else (),
        pace=Pace(speeds=(1.0, 0.7, 2.0, 0.1)),
        waiting=SHORT,
    )


@directed
def unequal_crowd(variant: int) -> Schedule:
    speeds = (1.0, 0.1, 10.0, 3.0, 0.5)
    return Schedule(
        seed=variant,
        num_replicas=5,
        slices=((0, 3), (1,), (2,)),
        minibatches_per_epoch=23,
        ahead=1 + variant % 3,
        pace=Pace(speeds=speeds, apply_s=0.01),
    )


@directed
def no_shard(variant: int) -> Schedule:
    """A model without parameters: blocks are computed, nothing is exchanged."""
    return Schedule(seed=variant, slices=((), ()), n_fetch=1 + variant % 2, n_push=2)


@directed
def bounds(variant: int) -> Schedule:
    """Epochs and steps meet in every order, also in the middle of a block."""
    epochs, steps = ((2, 14), (2, 13), (2, 15), (None, 8), (3, None), (1, 1), (None, 15), (2, 7))[variant % 8]
    return Schedule(seed=variant, epochs=epochs, steps=steps, n_push=1 + variant % 3)


@directed
def bounded_by_time(variant: int) -> Schedule:
    return Schedule(seed=variant, epochs=None, stop_at=6.0 + _shift(variant), n_push=2, linger_s=3.0)


@directed
def warm_start(variant: int) -> Schedule:
    return Schedule(seed=variant, warm_start=1 + variant % 4, n_push=1 + variant % 2, n_fetch=2)


@directed
def resumed(variant: int) -> Schedule:
    settled = (
        ((0, 0, 0, 3), (0, 0, 5, 7)),
        ((0, 0, 0, 7), (0, 1, 2, 4)),
        ((0, 0, 1, 2), (0, 0, 3, 4), (0, 1, 6, 7)),
        ((0, 0, 0, 7), (0, 1, 0, 7)),
    )[variant % 4]
    return Schedule(
        seed=variant,
        settled=settled,
        incarnation=1,
        n_push=1 + variant % 3,
        steps=None if variant % 2 else 12,
    )


# Gradients that are not finite ------------------------------------------------------------------------


@directed
def poisoned(variant: int) -> Schedule:
    """Nobody can compute one block: two replicas find so, and every slice is told."""
    return Schedule(
        seed=variant,
        num_replicas=2 + variant % 2,
        poisoned=((0, variant % 7),),
        n_fetch=1 + variant % 3,
        has_local_steps=True,
        pace=Pace(jitter=0.5),
    )


@directed
def poisoned_alone(variant: int) -> Schedule:
    return Schedule(
        seed=variant, num_replicas=1, poisoned=((0, 1 + variant % 3), (1, 2)), ahead=variant % 3, n_fetch=3
    )


@directed
def poisoned_warm_start(variant: int) -> Schedule:
    return Schedule(seed=variant, warm_start=2 + 3 * (variant % 2), poisoned=((0, variant % 2),))


@directed
def poisoned_alone_and_silent(variant: int) -> Schedule:
    """The only replica stands still over a block that it cannot compute, until that has been taken back."""
    return Schedule(
        seed=variant,
        num_replicas=1,
        poisoned=((0, 0),),
        faults=(Pause("replica0", 30.0 + variant, AtStep(1)),),
        waiting=SHORT,
        ahead=0,
    )


@directed
def poisoned_and_lossy(variant: int) -> Schedule:
    """Requests to settle are lost and sent again; shards are busy when they come."""
    return Schedule(
        seed=variant,
        slices=((0, 1), (2,)),
        poisoned=((0, 2), (0, 5)),
        faults=(Drop("refuse", 0.5), Drop("refuse.reply", 0.5), Duplicate("refuse", 0.5), Delay(0.1, 0.1)),
        pace=Pace(apply_s=0.3, jitter=1.0),
        linger_s=5.0,
    )


@directed
def three_in_a_row(variant: int) -> Schedule:
    """Three blocks in a row that nobody can compute end the run; four with good ones between do not."""
    poisoned = (((0, 2), (0, 3), (0, 4)), ((0, 0), (0, 2), (0, 4), (0, 6)))[variant % 2]
    return Schedule(
        seed=variant,
        num_replicas=1 + variant // 2 % 2,
        poisoned=poisoned,
        ahead=0,
        pace=Pace(jitter=0.0),
    )


@directed
def quarantined(variant: int) -> Schedule:
    return Schedule(
        seed=variant,
        num_replicas=2 + variant % 2,
        sick=(1,),
        sick_at=tuple(range(2 + variant % 3, 100)),
        minibatches_per_epoch=13,
    )


@directed
def forgiven(variant: int) -> Schedule:
    """Two strikes, many good blocks, two more strikes: twenty good ones in a row forgive, fewer do not."""
    again = 23 + variant % 2
    return Schedule(
        seed=1 + variant // 2,
        num_replicas=2,
        sick=(1,),
        sick_at=(1, 2, again, again + 1),
        minibatches_per_epoch=70,
        epochs=1,
        pace=Pace(jitter=0.1),
    )


@directed
def sick_one_is_left(variant: int) -> Schedule:
    """The healthy one dies while the other has found blocks not finite: those end as refused."""
    return Schedule(
        seed=variant,
        num_replicas=2,
        sick=(1,),
        sick_at=(2, 3, 5),
        faults=(Kill("replica0", AtTime(1.5 + _shift(variant))),),
        waiting=SHORT,
    )


# A shard that diverges, or has a part already ---------------------------------------------------------


@directed
def ruined(variant: int) -> Schedule:
    """An update leaves a tensor not finite; others push and fetch meanwhile, come and go."""
    return Schedule(
        seed=variant,
        slices=((0, 1), (2,)),
        ruined=(0, 1 + variant % 3),
        faults=(
            Kill("replica1", AtTime(1.7 + _shift(variant)), restart=0.2),
            Duplicate("refuse.reply", 1.0),
            Delay(0.1, 0.09),
        ),
        pace=Pace(apply_s=0.1 * (variant % 2)),
        linger_s=6.0,
    )


@directed
def ruined_unheard(variant: int) -> Schedule:
    """What the shard says of it is lost: its slices apply nothing any more, whoever comes."""
    return Schedule(
        seed=variant,
        num_replicas=3,
        slices=((0, 1), (2,)),
        ruined=(0, 1),
        faults=(
            Drop("refuse.reply", 1.0),
            Kill("replica1", AtTime(4.0 + _shift(variant)), restart=0.5),
            Kill("replica2", AtTime(6.0 + _shift(variant)), restart=0.5),
        ),
        outside=(
            Outside(at_s=9.0, role="shard0", event=Close()),
            Outside(at_s=9.1, role="shard0", event=FromWorker(sender=_worker(0), message=_fetch(99))),
            _stop(10.0),
        ),
        minibatches_per_epoch=40,
        pace=Pace(apply_s=0.2),
    )


@directed
def ruined_while_others_wait(variant: int) -> Schedule:
    """A checkpoint, a fetch and the end come while the update runs that ruins the slice."""
    at_s = 1.55 + _shift(variant, 0.02)
    return Schedule(
        seed=variant,
        ruined=(0, 1),
        outside=(
            Outside(at_s=at_s, role="shard0", event=Save(name="in between")),
            Outside(at_s=at_s, role="shard0", event=FromWorker(sender=_worker(2), message=_fetch(99))),
            Outside(at_s=at_s, role="shard0", event=Close()),
            Outside(at_s=at_s, role="shard0", event=FromWorker(sender=_worker(1), message=_fetch(99))),
        ),
        pace=Pace(apply_s=0.5, jitter=0.0),
        linger_s=3.0,
    )


def _worker(replica: int, incarnation: int = 0) -> Worker:
    return Worker(replica=replica, partition=0, incarnation=incarnation)


def _fetch(request: int) -> Fetch:
    return Fetch(request=request, into=0)


@directed
def ahead_of_the_books(variant: int) -> Schedule:
    """One slice has more than the coordinator knows: a whole block, a part of one, or the edge of one."""
    more = (
        ((1, 0, 0, 2, 3),),
        ((1, 0, 0, 2, 4),),
        ((0, 0, 0, 0, 2), (1, 0, 0, 4, 5)),
        ((0, 0, 0, 1, 3), (1, 0, 1, 5, 6)),
    )[variant % 4]
    return Schedule(seed=variant, ahead_of_books=more, n_push=2, incarnation=2, num_replicas=1 + variant % 2)


# Replicas that are late, lost or replaced --------------------------------------------------------------


@directed
def missing_at_the_start(variant: int) -> Schedule:
    """One is not there: the start waits for it, but not for ever, and says who was missing."""
    return Schedule(
        seed=variant,
        faults=(Pause(f"replica{variant % 3}", 100.0, AtTime(0.0)),),
        waiting=None if variant % 2 else SHORT,
        pace=Pace(tick_s=0.5 if variant % 4 < 2 else 0.3),
    )


@directed
def slow_to_begin(variant: int) -> Schedule:
    """Ticks come before the first step; a start time-out finds nobody at first."""
    return Schedule(
        seed=variant,
        pace=Pace(begin_s=3.0 + 2.0 * (variant % 4)),
        waiting=SHORT,
        faults=(Kill(f"replica{variant % 3}", AtTime(2.1), restart=1.0),) if variant % 2 else (),
    )


@directed
def gone_before_the_start(variant: int) -> Schedule:
    """Who dies, is recalled or says goodbye before the start is not waited for."""
    outside = (_recall(1, 1.0 + _shift(variant)),) if variant % 2 else ()
    faults = () if variant % 2 else (Kill("replica1", AtTime(1.0 + _shift(variant))),)
    return Schedule(
        seed=variant, pace=Pace(begin_s=4.0), faults=faults, outside=outside, waiting=SHORT, num_replicas=2
    )


@directed
def back_before_the_start(variant: int) -> Schedule:
    """One dies before the start and comes back before it: then the start waits for it again."""
    return Schedule(
        seed=variant,
        pace=Pace(begin_s=4.0),
        faults=(Kill("replica1", AtTime(1.0 + _shift(variant)), restart=0.5),),
        waiting=Waiting(start_s=30.0),
    )


@directed
def goodbye_before_the_start(variant: int) -> Schedule:
    """The start waits for one that is silent; another one, which has asked already, is told to leave."""
    return Schedule(
        seed=variant,
        faults=(Pause("replica0", 4.0, AtTime(0.0)),),
        outside=(_recall(1, 1.0 + _shift(variant)),),
        waiting=SHORT,
    )


@directed
def stopped_before_the_start(variant: int) -> Schedule:
    return Schedule(
        seed=variant,
        pace=Pace(begin_s=2.0),
        outside=(_stop(0.4 + _shift(variant)),),
        linger_s=2.0,
    )


@directed
def diverged_before_the_start(variant: int) -> Schedule:
    """A shard that a run before this one left diverged says so."""
    told = FromShard(now=0.5, shard=0, message=Diverged(block=Block(0, 0, 1, 2), tensor=3))
    return Schedule(
        seed=variant,
        pace=Pace(begin_s=2.0),
        ruined=(9, 9),
        outside=(Outside(at_s=0.5, role="coordinator", event=told),),
    )


@directed
def recalled(variant: int) -> Schedule:
    """Notices at every moment: before the first step, in an exchange, in a minibatch, while waiting, at the end."""
    outside = (
        _recall(0, 0.25 if variant % 2 else 1.2 + _shift(variant)),
        _recall(1, 1.5 + _shift(variant, 0.11)),
        _recall(1, 2.0 + _shift(variant, 0.11)),
        _recall(2, 90.0),
    )
    return Schedule(
        seed=variant,
        outside=outside,
        n_push=1 + variant % 2,
        faults=(Delay(0.2, 0.1),),
        pace=Pace(begin_s=0.5, apply_s=0.2 * (variant % 2)),
        linger_s=2.0,
    )


@directed
def stands_still(variant: int) -> Schedule:
    """One stands still beyond its deadline: its block goes to another, and it comes back."""
    return Schedule(
        seed=variant,
        faults=(Pause(f"replica{variant % 2}", 70.0 + _shift(variant, 3.0), AtStep(variant % 4)),),
        waiting=(None, SHORT, None, Waiting(least_s=2.0, factor=4.0))[variant // 2 % 4],
        warm_start=(0, 3)[variant // 2 % 2],
        minibatches_per_epoch=15,
        linger_s=60.0 if variant % 2 else 0.0,
        pace=Pace(tick_s=0.25, speeds=(1.0, 4.0)),
    )


@directed
def stands_still_late(variant: int) -> Schedule:
    """What its last sixteen blocks took says when it is overdue."""
    return Schedule(
        seed=variant,
        num_replicas=2,
        minibatches_per_epoch=60,
        epochs=1,
        faults=(Pause("replica1", 40.0, AtStep(20 + variant % 3)),),
        pace=Pace(tick_s=0.1, jitter=1.0, speeds=(1.0, 1.0)),
        ahead=0,
    )


@directed
def all_stand_still(variant: int) -> Schedule:
    """Nobody is heard for long: blocks come back, and are done when somebody wakes up."""
    return Schedule(
        seed=variant,
        num_replicas=2,
        faults=(Pause("replica0", 90.0, AtStep(2)), Pause("replica1", 95.0 + _shift(variant), AtStep(1))),
        poisoned=((0, 3),) if variant % 2 else (),
        waiting=SHORT,
    )


@directed
def slow_but_alive(variant: int) -> Schedule:
    """Ten times slower than the rest is not silent."""
    return Schedule(seed=variant, num_replicas=2, pace=Pace(speeds=(1.0, 0.1), jitter=0.1), epochs=3)


@directed
def replaced(variant: int) -> Schedule:
    """A restart is known before the death is; what comes from the life before is late."""
    late = 1.6 + _shift(variant)
    stale = FromReplica(now=late, replica=1, incarnation=0, message=Ask(request=7, finished=None))
    gone = FromReplica(now=late, replica=1, incarnation=0, message=Goodbye())
    return Schedule(
        seed=variant,
        faults=(Kill("replica1", AtTime(1.4 + _shift(variant)), restart=0.001), Delay(0.05, 0.05)),
        outside=(
            Outside(at_s=late, role="coordinator", event=stale),
            Outside(at_s=late, role="coordinator", event=gone),
            Outside(at_s=late, role="coordinator", event=Joined(now=late, replica=1, incarnation=0)),
            Outside(at_s=late, role="coordinator", event=Joined(now=late, replica=0, incarnation=0)),
            Outside(at_s=late, role="shard0", event=Attach(worker=_worker(0))),
            Outside(at_s=late, role="shard0", event=FromWorker(sender=_worker(0), message=_fetch(1))),
            Outside(
                at_s=late, role="coordinator", event=Lost(now=late, replica=2, incarnation=5, why="foreign")
            ),
            Outside(at_s=late, role="shard0", event=FromWorker(sender=_worker(1), message=_fetch(50))),
            Outside(at_s=late, role="shard0", event=FromWorker(sender=_worker(8), message=_fetch(1))),
        ),
        pace=Pace(apply_s=0.3),
    )


@directed
def replaced_when_all_is_handed_out(variant: int) -> Schedule:
    """The slowest dies, is recalled or is replaced with the last block: who waits gets it at once."""
    at_s = 2.5 + _shift(variant)
    gone = (
        {"faults": (Kill("replica1", AtTime(at_s), restart=0.001),)},
        {"outside": (_recall(1, at_s),)},
        {"faults": (Kill("replica1", AtTime(at_s)),)},
    )[variant % 3]
    return Schedule(
        seed=variant,
        num_replicas=2,
        minibatches_per_epoch=4,
        epochs=1,
        pace=Pace(speeds=(4.0, 0.2), jitter=0.0, tick_s=50.0),
        ahead=0,
        **gone,
    )


@directed
def crashes_while_a_shard_works(variant: int) -> Schedule:
    """Workers come and go while an update runs."""
    return Schedule(
        seed=variant,
        faults=(
            Kill("replica0", AtTime(1.35 + _shift(variant, 0.05)), restart=0.02),
            Kill("replica2", AtTime(2.1 + _shift(variant, 0.05))),
        ),
        pace=Pace(apply_s=0.8, jitter=0.3),
    )


@directed
def nobody_is_left(variant: int) -> Schedule:
    faults = tuple(Kill(f"replica{number}", AtTime(1.5 + number + _shift(variant))) for number in range(3))
    return Schedule(seed=variant, faults=faults, waiting=SHORT)


@directed
def last_one_dies(variant: int) -> Schedule:
    """The only replica dies when all else is said: while it leaves, while its block is being settled, or ruins."""
    facts = (
        {
            "outside": (_stop(2.5),),
            "faults": (Pause("replica0", 9.0, AtTime(2.2)), Kill("replica0", AtTime(4.0))),
        },
        {"poisoned": ((0, 0),), "faults": (Delay(0.3), Kill("replica0", AtTime(5.5)))},
        {"ruined": (0, 0), "faults": (Kill("replica0", AtTime(1.2)),)},
    )[variant % 3]
    return Schedule(
        seed=variant,
        num_replicas=1,
        minibatches_per_epoch=1 if variant % 3 else 9,
        epochs=1,
        slices=((0,),),
        ahead=0,
        pace=Pace(jitter=0.0, tick_s=30.0, apply_s=0.5 if variant % 3 == 2 else 0.0),
        **facts,
    )


@directed
def unheard_recall(variant: int) -> Schedule:
    """Recalls are lost: who works finishes its block, reports it, and leaves with the answer."""
    return Schedule(
        seed=variant,
        epochs=None,
        stop_at=3.2 + _shift(variant, 0.03),
        num_replicas=4,
        faults=(Drop("recall", 1.0), Delay(0.2, 0.1)),
        ahead=1 + variant % 2,
        pace=Pace(speeds=(2.0, 0.5, 0.9), apply_s=0.4 * (variant % 2)),
    )


@directed
def notice_in_the_first_second(variant: int) -> Schedule:
    """Leases and copies of the first fetch are on their way to one that leaves at once."""
    return Schedule(
        seed=variant,
        num_replicas=2,
        outside=tuple(_recall(replica, 0.9 + _shift(variant, 0.01)) for replica in (0, 1)),
        faults=(Duplicate("fetch.reply", 1.0), Delay(0.2, 0.15)),
        linger_s=2.0,
    )


@directed
def old_requests(variant: int) -> Schedule:
    """Long after, every request of a run comes once more: only the youngest are still remembered."""
    late = [
        Outside(
            at_s=30.0 + 0.001 * request,
            role="coordinator",
            event=FromReplica(
                now=30.0, replica=0, incarnation=0, message=Ask(request=request, finished=None)
            ),
        )
        for request in range(1, 80)
    ]
    late += [
        Outside(at_s=31.0, role="shard0", event=FromWorker(sender=_worker(0), message=_fetch(number)))
        for number in (1, 2, 5)
    ]
    return Schedule(
        seed=variant,
        num_replicas=1,
        minibatches_per_epoch=30 + variant % 3,
        epochs=1,
        outside=tuple(late),
        pace=Pace(jitter=0.05),
        faults=(Pause("replica0", 3.0, AtTime(29.5)),),
        linger_s=1.0,
        ahead=1,
    )


# The launcher's wishes, and the end -------------------------------------------------------------------


@directed
def saved_and_closed(variant: int) -> Schedule:
    """Checkpoints while updates run and while not, and a shard that is closed under working replicas."""
    saves = tuple(
        Outside(at_s=0.3 * number + _shift(variant, 0.02), role="shard0", event=Save(name=str(number)))
        for number in range(10)
    )
    at_s = 3.0 + _shift(variant)
    closes = (
        Outside(at_s=at_s, role="shard0", event=Close()),
        Outside(at_s=at_s + 0.1, role="shard1", event=Close()) if variant % 2 else _stop(at_s + 6.0),
        _stop(at_s + 8.0),
    )
    return Schedule(
        seed=variant,
        outside=saves + closes,
        poisoned=((0, 2), (0, 3)),
        faults=(
            Kill("replica1", AtTime(at_s + 2.0)),
            Drop("refuse.reply", 0.6),
            Duplicate("fetch", 0.5),
            Delay(0.1, 0.1),
        ),
        pace=Pace(apply_s=0.4 * (variant % 3), speeds=(2.0,)),
        epochs=5,
        waiting=SHORT,
        linger_s=4.0,
    )


@directed
def closed_when_fetching(variant: int) -> Schedule:
    """A shard is closed while a replica joins it."""
    return Schedule(
        seed=variant,
        outside=(Outside(at_s=0.0005, role="shard0", event=Close()), _stop(3.0 + _shift(variant))),
        linger_s=1.0,
    )


@directed
def stopped_twice(variant: int) -> Schedule:
    """Stopped while everybody works, and again; some do not hear of it and are given up, and come late."""
    at_s = 3.0 + _shift(variant)
    ended = at_s + 15.0
    foreign = FromShard(now=ended, shard=0, message=Diverged(block=Block(0, 0, 1, 2), tensor=3))
    return Schedule(
        seed=variant,
        num_replicas=4,
        epochs=None,
        outside=(
            _stop(at_s),
            _stop(at_s + 0.2),
            _stop(ended),
            Outside(at_s=ended, role="coordinator", event=foreign),
        ),
        faults=(
            Pause("replica0", 10.0, AtTime(at_s - 0.5)),
            Pause("replica1", 60.0, AtTime(at_s - 0.5)),
            Kill("replica1", AtTime(ended), restart=0.5),
            Pause("replica2", 60.0, AtTime(at_s - 0.5)),
            Kill("replica2", AtTime(at_s + 0.6), restart=0.5),
        ),
        pace=Pace(links=Links(Link(0.0 if variant % 2 else 0.05))),
        waiting=(None, Waiting(leave_s=2.0))[variant // 2 % 2],
        linger_s=20.0,
    )


@directed
def late_after_the_end(variant: int) -> Schedule:
    """Everything comes twice and late, so that it meets those who have left."""
    return Schedule(
        seed=variant,
        poisoned=((0, 6), (1, 6)),
        faults=(Duplicate("*", 0.9), Delay(0.8, 0.8)),
        linger_s=4.0,
    )


@directed
def lossy(variant: int) -> Schedule:
    return Schedule(seed=variant, faults=(Drop("*", 0.3), Delay(0.1, 0.1)), n_push=2, linger_s=3.0)


# Checkpoints of a run that goes on ---------------------------------------------------------------------


def _late_words_of_holds(at_s: float, request: int = 1) -> tuple[Outside, ...]:
    """What belongs to a hold, at a time when nobody waits for it."""
    told = (
        Checkpoint(now=at_s, name="99"),
        Copied(now=at_s, request=request),
        FromShard(now=at_s, shard=0, message=Held(request=request, anywhere=(), everywhere=())),
        FromShard(now=at_s, shard=0, message=Released(request=request)),
    )
    return tuple(Outside(at_s=at_s, role="coordinator", event=event) for event in told)


@directed
def held(variant: int) -> Schedule:
    """One checkpoint after another, while updates run and pushes are on their way to some shards only."""
    return Schedule(
        seed=variant,
        num_replicas=2 + variant % 3,
        slices=((0, 1), (2,), (3,)),
        n_push=1 + variant % 2,
        overlaps=variant % 3 == 1,
        minibatches_per_epoch=24,
        epochs=1,
        checkpoints=tuple(0.9 + 0.7 * number + _shift(variant) for number in range(9)),
        pace=Pace(apply_s=0.2 * (variant % 2), speeds=(3.0, 2.0)),
        faults=(Delay(0.15, 0.14),),
        poisoned=((0, 7),) if variant % 4 == 3 else (),
    )


@directed
def held_while_pushes_are_lost(variant: int) -> Schedule:
    """Every message of a hold may be lost or come twice, and so may the pushes that it waits for."""
    return Schedule(
        seed=variant,
        slices=((0, 1), (2,)),
        minibatches_per_epoch=30,
        epochs=1,
        checkpoints=(1.0, 3.0, 6.0, 9.0),
        pace=Pace(speeds=(2.0,), apply_s=0.1 * (variant % 2)),
        faults=(
            *(Drop(kind, 0.3) for kind in ("push", "hold", "hold.reply", "release", "release.reply")),
            *(Duplicate(kind, 0.3) for kind in ("push", "hold", "hold.reply", "release", "release.reply")),
            Delay(0.2, 0.2),
        ),
        linger_s=5.0,
    )


@directed
def held_while_one_dies(variant: int) -> Schedule:
    """A push reaches one shard and not the other, and its sender dies or stands still: the hold is called off."""
    at_s = 1.5 + _shift(variant, 0.11)
    gone = (
        Kill("replica1", AtTime(at_s + 0.3), restart=4.0),
        Pause("replica1", 30.0, AtTime(at_s)),
        Kill("replica1", AtTime(at_s + 0.3)),
    )[variant % 3]
    return Schedule(
        seed=variant,
        slices=((0,), (1,)),
        minibatches_per_epoch=20,
        epochs=1,
        checkpoints=(at_s + 0.1, at_s + 4.0, at_s + 8.0),
        faults=(gone, Cut("replica1", "shard1", 9.0, AtTime(at_s - 1.0))),
        pace=Pace(speeds=(1.0, 2.0, 1.0), apply_s=0.1 * (variant % 2)),
        waiting=SHORT,
    )


@directed
def held_too_long(variant: int) -> Schedule:
    """A shard stands still: holds are called off, each after twice the time, until it answers again."""
    return Schedule(
        seed=variant,
        minibatches_per_epoch=30,
        epochs=1,
        checkpoints=(2.0, 2.5),
        faults=(Pause("shard1", 5.0 + 3.0 * (variant % 4), AtTime(2.1 + _shift(variant))),),
        outside=(Outside(at_s=2.7, role="coordinator", event=Copied(now=2.7, request=1)),),
        waiting=Waiting(hold_s=1.0 + variant % 2),
    )


@directed
def held_unheard(variant: int) -> Schedule:
    """What shards say of a hold is lost: each is called off later than the last, and the run goes on between."""
    return Schedule(
        seed=variant,
        minibatches_per_epoch=60,
        epochs=1,
        checkpoints=(1.0 + _shift(variant),),
        faults=(Drop("hold.reply", 1.0 if variant % 2 else 0.9),),
        waiting=Waiting(hold_s=0.6 + 0.1 * variant),
    )


@directed
def held_at_the_start(variant: int) -> Schedule:
    """A checkpoint is asked for before the first lease, and none is needed when there are no slices."""
    return Schedule(
        seed=variant,
        checkpoints=(0.2 + _shift(variant, 0.02), 0.3),
        pace=Pace(begin_s=1.0),
        slices=((0,), (1,)) if variant % 2 else ((), ()),
    )


@directed
def held_at_the_end(variant: int) -> Schedule:
    """A hold is on when the run is stopped; what belongs to it comes while all leave, and after."""
    at_s = 3.0 + _shift(variant, 0.03)
    return Schedule(
        seed=variant,
        epochs=None,
        checkpoints=(at_s - 0.2,),
        stop_at=at_s,
        outside=(
            *_late_words_of_holds(at_s + 0.01),
            *_late_words_of_holds(at_s + 0.02),
            *_late_words_of_holds(at_s + 30.0),
        ),
        faults=(Delay(0.1, 0.09), Pause("replica1", 4.0, AtTime(at_s - 0.5)), Drop("release", 0.3)),
        linger_s=40.0,
    )


@directed
def held_and_settled(variant: int) -> Schedule:
    """A block that nobody can compute is settled while a hold is on, which is called off for it."""
    return Schedule(
        seed=variant,
        slices=((0,), (1, 2)),
        minibatches_per_epoch=16,
        epochs=1,
        poisoned=((0, 3), (0, 6), (0, 9)),
        checkpoints=tuple(1.0 + 0.45 * number + _shift(variant, 0.03) for number in range(12)),
        faults=(Delay(0.2, 0.15),),
        pace=Pace(jitter=0.5),
    )


@directed
def held_and_ruined(variant: int) -> Schedule:
    """A shard diverges in a hold, or is closed, and hears of it all the same; what it says of it is lost."""
    at_s = 2.0 + _shift(variant, 0.05)
    request = 1 + variant % 2
    words = (
        FromCoordinator(message=Hold(request=request, admitted=())),
        FromCoordinator(message=Release(request=request, name="0" if variant % 2 else "")),
    )
    return Schedule(
        seed=variant,
        slices=((0, 1), (2,)),
        ruined=(0, 1),
        checkpoints=(1.2 + _shift(variant, 0.05), 4.0),
        faults=(Drop("refuse.reply", 1.0), Delay(0.1, 0.09)),
        outside=(
            *(Outside(at_s=at_s, role="shard0", event=word) for word in words),
            *(Outside(at_s=8.0, role="shard0", event=word) for word in words),
            Outside(at_s=9.0, role="shard0", event=Close()),
            *(Outside(at_s=9.1, role="shard0", event=word) for word in words),
            _stop(10.0),
        ),
        minibatches_per_epoch=40,
        pace=Pace(apply_s=0.3),
    )


@directed
def rests(variant: int) -> Schedule:
    """The only replica is waited for until it has just fetched: before a checkpoint, and before a stop."""
    n_fetch, n_push = ((5, 1), (5, 2), (2, 3), (3, 3), (4, 2), (7, 3))[variant % 6]
    return Schedule(
        seed=variant,
        num_replicas=1,
        rests=True,
        n_fetch=n_fetch,
        n_push=n_push,
        ahead=variant % 3,
        has_local_steps=True,
        minibatches_per_epoch=17,
        epochs=3,
        checkpoints=(1.0 + _shift(variant), 6.5),
        stop_at=9.0 + _shift(variant, 0.31) if variant % 2 else None,
        faults=(Kill("replica0", AtTime(4.2), restart=2.0),) if variant % 5 == 4 else (),
        poisoned=((0, 4),) if variant % 4 == 3 else (),
        pace=Pace(speeds=(2.0,)),
        waiting=SHORT,
    )


@directed
def stopped_without_rest(variant: int) -> Schedule:
    """The only replica fetches so seldom, or stands still, that a stop does not wait until it does."""
    return Schedule(
        seed=variant,
        num_replicas=1,
        rests=True,
        n_fetch=200,
        minibatches_per_epoch=100,
        epochs=3,
        stop_at=3.0 + _shift(variant),
        outside=(_stop(4.0),),
        faults=(Pause("replica0", 20.0, AtTime(2.5)),) if variant % 2 else (),
    )


# Shards are killed, and come back ------------------------------------------------------------------------


def _killed(shard: int, at_s: float, back_after_s: float = 0.15) -> Kill:
    return Kill(f"shard{shard}", AtTime(at_s), back_after_s)


@directed
def shards_killed(variant: int) -> Schedule:
    """One after the other, again and again, while updates run; with all that was done, or with less."""
    return Schedule(
        seed=variant,
        num_replicas=2 + variant % 3,
        slices=((0, 1), (2,)),
        n_push=1 + variant % 2,
        n_fetch=(1, 2, 3)[variant % 3],
        overlaps=variant % 4 == 3,
        minibatches_per_epoch=24,
        epochs=1,
        keeps_every=(1, 3, 7)[variant % 3],
        pace=Pace(apply_s=0.2 * (variant % 2), speeds=(3.0, 2.0)),
        faults=tuple(_killed(n % 2, 1.0 + 0.61 * n + _shift(variant), 0.1 + 0.3 * (n % 2)) for n in range(5)),
    )


@directed
def shards_of_cut_replicas_killed(variant: int) -> Schedule:
    """A worker of each has a long way to the shards: one life of a shard answers its lead, and the next one answers it."""
    return replace(
        shards_killed(variant),
        partitions=(0, 1, 1),
        pace=Pace(speeds=(3.0, 2.0), links=Links(special={("replica*.1", "shard*"): Link(0.4)})),
    )


@directed
def shard_killed_while_nobody_has_work(variant: int) -> Schedule:
    """Two replicas wait for a lease while a third computes the last block, and slowly."""
    return Schedule(
        seed=variant,
        num_replicas=3,
        minibatches_per_epoch=1 + variant % 2,
        epochs=1,
        keeps_every=1 + variant % 2,
        pace=Pace(speeds=(0.2,), jitter=0.0),
        faults=tuple(_killed(variant % 2, 1.0 + 0.5 * n + _shift(variant, 0.02)) for n in range(3)),
    )


@directed
def shard_killed_before_the_start(variant: int) -> Schedule:
    return Schedule(
        seed=variant,
        pace=Pace(begin_s=1.0),
        faults=tuple(_killed(variant % 2, 0.1 + 0.3 * n) for n in range(3)),
    )


@directed
def shard_killed_while_all_leave(variant: int) -> Schedule:
    """What is lost then nobody does again, and the end says so."""
    return Schedule(
        seed=variant,
        epochs=None,
        keeps_every=1 + variant % 3,
        pace=Pace(speeds=(0.3,), jitter=0.0),
        stop_at=6.0,
        outside=(_stop(6.0 + _shift(variant, 0.02)),),
        faults=tuple(_killed(variant % 2, 6.1 + 0.4 * n) for n in range(3)),
    )


@directed
def shard_killed_after_the_end(variant: int) -> Schedule:
    return Schedule(
        seed=variant,
        minibatches_per_epoch=2,
        epochs=1,
        linger_s=30.0,
        faults=tuple(_killed(variant % 2, 20.0 + 0.5 * n) for n in range(3)),
    )


@directed
def shard_killed_in_a_hold(variant: int) -> Schedule:
    """Whatever a hold has come to: it is tried again, or the cut is given up; none is stored in halves."""
    return Schedule(
        seed=variant,
        num_replicas=2 + variant % 2,
        slices=((0, 1), (2,), (3,)),
        minibatches_per_epoch=24,
        epochs=1,
        keeps_every=1 + variant % 3,
        checkpoints=(1.0, 2.5, 4.0, 5.5),
        pace=Pace(speeds=(3.0, 2.0)),
        faults=(
            Delay(0.05, 0.04),
            *(_killed((variant + n) % 3, 1.0 + 0.53 * n + _shift(variant, 0.03)) for n in range(8)),
        ),
    )


@directed
def shard_killed_when_blocks_are_refused(variant: int) -> Schedule:
    """What was settled as refused and is lost is settled again; nobody computes it a third time."""
    return Schedule(
        seed=variant,
        num_replicas=2,
        slices=((0,), (1,), ()),
        minibatches_per_epoch=9,
        epochs=2,
        keeps_every=4,
        poisoned=((0, 1 + variant % 3), (1, 5)),
        pace=Pace(speeds=(2.0,)),
        faults=tuple(_killed(n % 3, 2.0 + 0.4 * n + _shift(variant, 0.1)) for n in range(9)),
    )


@directed
def shard_killed_under_a_bound(variant: int) -> Schedule:
    return Schedule(
        seed=variant,
        num_replicas=3,
        minibatches_per_epoch=14,
        max_staleness=variant % 3,
        keeps_every=1 + variant % 4,
        pace=Pace(speeds=(3.0, 1.0)),
        faults=tuple(_killed(n % 2, 1.0 + 1.3 * n + _shift(variant)) for n in range(4)),
    )


# Coordinators that follow one that was killed ---------------------------------------------------------------


def _of_other_epochs(until_s: float) -> tuple[Outside, ...]:
    """What only those say who know of another coordinator, at every moment; the first one is not moved by it."""
    return tuple(
        outside
        for at in range(int(until_s / 0.35))
        for number in range(3)
        for outside in (
            Outside(at_s=0.05 + 0.35 * at, role=f"replica{number}", event=session.Redirected()),
            Outside(
                at_s=0.05 + 0.35 * at,
                role=f"shard{number % 2}",
                event=FromCoordinator(message=Inquire(epoch=-(number > 1))),
            ),
        )
    )


@directed
def spoken_to_in_vain(variant: int) -> Schedule:
    makers = (
        ruined_unheard,
        saved_and_closed,
        recalled,
        held_at_the_end,
        stopped_before_the_start,
        slow_to_begin,
    )
    schedule = makers[variant % len(makers)](variant)
    return replace(schedule, outside=(*schedule.outside, *_of_other_epochs(20.0)), linger_s=12.0)


def _while_recovering(at_s: float) -> tuple[Outside, ...]:
    strangers = {"replica": 0, "incarnation": 9}
    events = (
        Joined(now=at_s, replica=0, incarnation=0),
        FromReplica(now=at_s, message=Ask(request=1, finished=None), **strangers),
        FromReplica(now=at_s, message=Goodbye(), **strangers),
        Lost(now=at_s, why="killed", **strangers),
        ShardLost(now=at_s, shard=1),
        FromShard(now=at_s, shard=0, message=Refused(request=1, block=Block(0, 0, 0, 1), outcomes=())),
        *(outside.event for outside in _late_words_of_holds(at_s)),
    )
    return tuple(Outside(at_s=at_s, role="coordinator", event=event) for event in events)


@directed
def followed(variant: int) -> Schedule:
    """A shard is killed with the coordinator, so that the next one has to wait; meanwhile everybody speaks."""
    at_s = 1.2 + _shift(variant, 0.13)
    return Schedule(
        seed=variant,
        minibatches_per_epoch=9,
        n_push=1 + variant % 2,
        keeps_every=1 + variant % 3,
        checkpoints=(at_s - 0.1, at_s + 0.5),
        outside=_while_recovering(at_s + 1.0),
        faults=(
            Kill("coordinator", AtTime(at_s), 0.1),
            Kill("coordinator", AtTime(at_s + 9.0), 0.1),
            Kill("shard0", AtTime(at_s), 3.0),
            Kill("shard1", AtTime(at_s + 9.0), 1.0),
            Kill("replica1", AtTime(at_s + 1.5), 2.0),
        ),
        waiting=SHORT,
        linger_s=1.0,
    )


@directed
def followed_and_stopped(variant: int) -> Schedule:
    """The run is stopped, or diverges, before the next coordinator knows how it stands."""
    at_s = 1.2 + _shift(variant, 0.13)
    told = FromShard(now=at_s + 1.0, shard=1, message=Diverged(block=Block(0, 0, 1, 2), tensor=3))
    diverged = Outside(at_s=at_s + 1.0, role="coordinator", event=told)
    return Schedule(
        seed=variant,
        epochs=None,
        ruined=(9, 9),
        outside=(diverged, diverged) if variant % 2 else (_stop(at_s + 1.0), _stop(at_s + 1.1)),
        faults=(Kill("coordinator", AtTime(at_s), 0.1), Kill("shard0", AtTime(at_s), 3.0)),
        linger_s=1.0,
    )


@directed
def followed_before_the_start(variant: int) -> Schedule:
    return Schedule(
        seed=variant,
        pace=Pace(begin_s=2.0),
        faults=(Kill("coordinator", AtTime(0.5 + _shift(variant)), 0.2), Kill("replica1", AtTime(1.0), 1.0)),
        waiting=SHORT,
    )


@directed
def silent_after_the_coordinator(variant: int) -> Schedule:
    """A replica that stands still is not waited for; what it says when it wakes is late."""
    return Schedule(
        seed=variant,
        minibatches_per_epoch=20,
        max_staleness=(None, 3)[variant % 2],
        n_push=1 + variant % 3,
        n_fetch=1,
        faults=(
            Pause("replica1", 12.0 + _shift(variant, 0.3), AtTime(1.0 + _shift(variant))),
            Kill("coordinator", AtTime(1.5 + _shift(variant)), 0.2),
        ),
    )
