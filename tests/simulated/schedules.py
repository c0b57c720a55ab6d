"""Whole clusters under simulated schedules: made from a seed, run, and judged.

`python -m tests.simulated.schedules SEED` replays one and prints what happened; a directed one is replayed by
its name.
"""

import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from squall.blocks import Block, BlockSet, Outcome
from squall.cluster.modelled import ModelledArithmetic
from squall.cluster.world import Outside, Pace, Watch, World
from squall.coordinator.events import Checkpoint
from squall.coordinator.machine import CoordinatorMachine
from squall.coordinator.members import Patience
from squall.coordinator.recovery import Inheritance
from squall.coordinator.work import Rhythm, WorkPlan
from squall.faults import AtStep, AtTime, Chance, Cut, Delay, Drop, Duplicate, Fault, Kill, Pause
from squall.machines import Machine
from squall.replica.downpour import Compute, DownpourLoop, downpour
from squall.shard.books import SliceBook
from squall.shard.events import Apply, Record, Worker
from squall.shard.machine import ShardMachine
from tests.simulated.coordinator_rules import CoordinatorRules, Waiting
from tests.simulated.judge import Judge
from tests.simulated.shard_rules import positions

BOUND_S = 3_000.0
MANY = 400
"""Minibatches that a schedule without bound is not expected to reach."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything that a simulated run depends on."""

    seed: int
    num_replicas: int = 3
    slices: tuple[tuple[int, ...], ...] = ((0,), (1,))
    """By shard, the slices that it holds; those without any come last."""
    partitions: tuple[int, ...] = ()
    """Of each slice, whose it is; not named: the first one's."""
    minibatches_per_epoch: int = 7
    n_fetch: int = 1
    overlaps: bool = False
    max_staleness: int | None = None
    n_push: int = 1
    epochs: int | None = 2
    steps: int | None = None
    warm_start: int = 0
    ahead: int = 1
    has_local_steps: bool = False
    pace: Pace = field(default_factory=Pace)
    faults: tuple[Fault, ...] = ()
    outside: tuple[Outside, ...] = ()
    waiting: Waiting | None = None
    """None: as the coordinator has it if it is not told."""
    poisoned: tuple[tuple[int, int], ...] = ()
    """Minibatches (epoch, position) whose gradient is never finite."""
    sick: tuple[int, ...] = ()
    """Replicas whose gradients are not finite now and then."""
    sick_at: tuple[int, ...] | None = None
    """At which of their minibatches, counted from 1; None: at every third."""
    ruined: tuple[int, int] | None = None
    """(shard, position) of the block whose update leaves a tensor not finite."""
    settled: tuple[tuple[int, int, int, int], ...] = ()
    """Ranges (stage, epoch, first, stop) that a run before this one has done."""
    ahead_of_books: tuple[tuple[int, int, int, int, int], ...] = ()
    """Ranges (slice, stage, epoch, first, stop) that one slice has besides, unknown to the coordinator."""
    incarnation: int = 0
    keeps_every: int = 1
    """A shard that is killed comes back as after its last change but so many; 1: with every change."""
    stop_at: float | None = None
    checkpoints: tuple[float, ...] = ()
    """When checkpoints are asked for."""
    rests: bool = False
    """With one replica: checkpoints and stops wait for a moment that is like a fresh start."""
    linger_s: float = 0.0

    @property
    def num_shards(self) -> int:
        return sum(1 for held in self.slices if held)

    @property
    def has(self) -> set[type[Fault]]:
        return {type(fault) for fault in self.faults}


def random_schedule(seed: int) -> Schedule:
    """A schedule drawn from a seed: sizes, paces and a few faults of every kind that does not end a run."""
    draw = random.Random(seed)
    num_replicas = draw.randint(1, 4)
    slices = draw.choice((((0,),), ((0,), (1,)), ((0, 1),), ((0, 1), (2,)), ((0,), (1,), (2,))))
    n_push = draw.choice((1, 1, 2, 3))
    faults = _random_faults(draw, num_replicas, len(slices))
    schedule = Schedule(
        seed=seed,
        num_replicas=num_replicas,
        slices=slices,
        minibatches_per_epoch=draw.randint(1, 9),
        n_push=n_push,
        n_fetch=draw.choice((1, n_push, 2, 5)),
        epochs=draw.choice((1, 2, None)),
        steps=draw.choice((5, 11)),
        warm_start=draw.choice((0, 0, 2)),
        pace=Pace(
            speeds=tuple(draw.choice((1.0, 1.0, 0.1, 3.0)) for _ in range(num_replicas)),
            jitter=draw.choice((0.0, 0.3, 1.0)),
            apply_s=draw.choice((0.0, 0.0, 0.2)),
        ),
        faults=tuple(faults),
        waiting=Waiting(start_s=20.0, first_s=30.0),
        poisoned=((0, draw.randrange(9)),) if draw.random() < 0.2 else (),
        sick=(num_replicas - 1,) if num_replicas > 1 and draw.random() < 0.15 else (),
        ahead=draw.choice((1, 1, 0, 2)),
        has_local_steps=draw.random() < 0.5,
        overlaps=draw.random() < 0.2,
    )
    if draw.random() < 0.2:
        bounded = {"max_staleness": draw.randrange(5), "n_fetch": min(schedule.n_fetch, n_push)}
        schedule = replace(schedule, overlaps=False, **bounded)  # type: ignore[arg-type]
    if draw.random() < 0.5:
        times = sorted(draw.uniform(0.0, 12.0) for _ in range(draw.randint(1, 4)))
        rests = num_replicas == 1 and draw.random() < 0.5
        schedule = replace(schedule, checkpoints=tuple(times), rests=rests)
    if draw.random() < 0.4:
        schedule = _with_killed_shards(draw, schedule)
    if draw.random() < 0.3:
        kills = [
            Kill("coordinator", AtTime(draw.uniform(0, 12)), draw.uniform(0.05, 3))
            for _ in range(draw.randint(1, 3))
        ]
        schedule = replace(schedule, faults=(*schedule.faults, *kills))
    cut = random.Random(f"cut {seed}")  # of its own, so that what is drawn above stays what it was
    if cut.random() < 0.3:
        owners = tuple(cut.randrange(2) for held in slices for _ in held)
        schedule = replace(schedule, partitions=owners)
    return schedule


def _with_killed_shards(draw: random.Random, schedule: Schedule) -> Schedule:
    kills = [
        Kill(
            f"shard{draw.randrange(len(schedule.slices))}", AtTime(draw.uniform(0, 10)), draw.uniform(0.1, 4)
        )
        for _ in range(draw.randint(1, 3))
    ]
    every = draw.choice((1, 1, 2, 5))
    return replace(schedule, faults=(*schedule.faults, *kills), keeps_every=every)


def _random_faults(draw: random.Random, num_replicas: int, num_shards: int) -> list[Fault]:
    faults: list[Fault] = []
    if draw.random() < 0.6:
        faults.append(Delay(draw.choice((0.01, 0.3)), draw.choice((0.0, 0.01, 0.3))))
    kinds = ("push", "push.reply", "fetch.reply", "ask", "ask.reply", "refuse", "goodbye", "*")
    for kind in draw.sample(kinds, 2):
        if draw.random() < 0.5:
            faults.append(Drop(kind, draw.choice((0.05, 0.3))))
        if draw.random() < 0.4:
            faults.append(Duplicate(kind, draw.choice((0.1, 0.5))))
    if draw.random() < 0.4:
        one, other = f"replica{draw.randrange(num_replicas)}", draw.choice(("shard0", "coordinator"))
        faults.append(Cut(one, other, draw.uniform(1, 20), AtTime(draw.uniform(0, 5))))
    if draw.random() < 0.4:
        replica, shard = f"replica{draw.randrange(num_replicas)}", f"shard{draw.randrange(num_shards)}"
        role = draw.choice((replica, shard, "coordinator"))
        faults.append(Pause(role, draw.uniform(1, 80), AtTime(draw.uniform(0, 8))))
    for number in range(num_replicas):
        if draw.random() < 0.3:
            when = draw.choice((AtStep(draw.randrange(4)), AtTime(draw.uniform(0, 8)), Chance(0.05)))
            may_stay_dead = number > 0
            restart = None if may_stay_dead and draw.random() < 0.5 else draw.uniform(0.1, 5)
            faults.append(Kill(f"replica{number}", when, restart))
    return faults


@dataclass
class Result:
    """A finished schedule, for judging."""

    schedule: Schedule
    world: World
    arithmetic: ModelledArithmetic
    judge: Judge
    why: str
    told: list[object]


def run(schedule: Schedule, also: Watch | None = None) -> Result:
    """Run a schedule to its end; every effect of every decider is judged on the way.

    Args:
        also: watches too, after the judge.

    Raises:
        NoEndError: it has not ended after `BOUND_S` virtual seconds.
        AssertionError: a decider broke a rule.
    """
    told: list[object] = []
    arithmetic = _arithmetic(schedule)
    books = _books(schedule)
    loop = DownpourLoop(
        n_fetch=schedule.n_fetch,
        n_push=schedule.n_push,
        has_local_steps=schedule.has_local_steps,
        ahead=schedule.ahead if schedule.max_staleness is None else 0,
        overlaps=schedule.overlaps,
        fetches_at_start=schedule.max_staleness is not None,
    )
    judge = Judge(
        rules=_rules(schedule),
        loop=loop,
        slices=schedule.slices,
        books=books,
        incarnation=schedule.incarnation,
    )

    def watch(name: str, machine: Machine, event: Any, effects: tuple[Any, ...]) -> None:
        judge.watch(name, machine, event, effects)
        survivors.watch(machine, effects)
        if also is not None:
            also(name, machine, event, effects)

    survivors = _Survivors(schedule, books, arithmetic, judge)
    world = World(
        directs=_coordinator(schedule),
        shards=[
            ShardMachine(shard=shard, incarnation=schedule.incarnation, books=tuple(books[shard]))
            for shard in range(len(schedule.slices))
        ],
        slices=schedule.slices,
        num_replicas=schedule.num_replicas,
        loop=lambda: downpour(loop),
        arithmetic=arithmetic,
        tell=lambda now, effect: told.append(effect),
        pace=schedule.pace,
        faults=schedule.faults,
        outside=(*schedule.outside, *_wishes(schedule)),
        seed=schedule.seed,
        come_back=survivors.come_back,
        follow=lambda inheritance: _coordinator(schedule, judge.followed_by(inheritance)),
        watch=watch,
    )

    def may_go_on() -> str | None:
        return "stopped" if schedule.stop_at is not None and world.now >= schedule.stop_at else None

    why = world.run(bound_s=BOUND_S, linger_s=schedule.linger_s, may_go_on=may_go_on)
    judge.end(world.directs, world.shards)
    return Result(schedule, world, arithmetic, judge, why, told)


class _Survivors:
    """What each shard would come back with, if it were killed now."""

    def __init__(
        self,
        schedule: Schedule,
        books: Mapping[int, Sequence[SliceBook]],
        arithmetic: ModelledArithmetic,
        judge: Judge,
    ) -> None:
        self._every = schedule.keeps_every
        self._kept = {shard: [book.copy() for book in held] for shard, held in books.items()}
        self._began = {book.slice: book.version for held in books.values() for book in held}
        self._changes: Counter[int] = Counter()
        self._arithmetic, self._judge = arithmetic, judge

    def watch(self, machine: Machine, effects: tuple[Any, ...]) -> None:
        rows = [effect for effect in effects if isinstance(effect, Record)]
        if not isinstance(machine, ShardMachine) or not any(
            row.outcome is Outcome.APPLIED or row.sender is None for row in rows
        ):
            return
        self._changes[machine.shard] += 1
        if self._changes[machine.shard] % self._every == 0:
            self._kept[machine.shard] = [book.copy() for book in machine.books.values()]

    def come_back(self, shard: int, dead: ShardMachine) -> ShardMachine:
        """The next life of a shard; what is lost is taken out of what was applied, and of the ledger."""
        books, incarnation = tuple(book.copy() for book in self._kept[shard]), dead.incarnation + 1
        arithmetic = self._arithmetic
        for book in books:
            del arithmetic.applied.get(book.slice, [])[book.version - self._began[book.slice] :]
        versions = {book.slice: book.version for book in books}
        arithmetic.rows = [
            entry
            for entry in arithmetic.rows
            if entry[2].slice not in versions or entry[2].version <= versions[entry[2].slice]
        ]
        self._judge.came_back(shard, incarnation, books)
        return ShardMachine(shard=shard, incarnation=incarnation, books=books)


def _wishes(schedule: Schedule) -> list[Outside]:
    """The launcher's wishes for checkpoints, which are called by their number."""
    return [
        Outside(at_s=at_s, role="coordinator", event=Checkpoint(now=at_s, name=str(number)))
        for number, at_s in enumerate(schedule.checkpoints)
    ]


def _arithmetic(schedule: Schedule) -> ModelledArithmetic:
    sick_counts: Counter[int] = Counter()

    def not_finite(worker: Worker, wish: Compute) -> str:
        if (wish.epoch, wish.position) in schedule.poisoned:
            return f"weight{wish.position}"
        if worker.replica in schedule.sick:
            sick_counts[worker.replica] += 1
            count = sick_counts[worker.replica]
            is_bad = count % 3 == 0 if schedule.sick_at is None else count in schedule.sick_at
            return "weight" if is_bad else ""
        return ""

    def ruins(shard: int, effect: Apply) -> int | None:
        is_ruined = (shard, effect.push.block.first) == schedule.ruined
        return 5 if is_ruined else None

    return ModelledArithmetic(not_finite, ruins)


def _books(schedule: Schedule) -> dict[int, list[SliceBook]]:
    books = {
        shard: [SliceBook.new(n, schedule.partitions[n] if schedule.partitions else 0) for n in held]
        for shard, held in enumerate(schedule.slices)
    }
    if not schedule.settled and not schedule.ahead_of_books:
        return books
    for book in (book for held in books.values() for book in held):
        more = tuple(place for number, *place in schedule.ahead_of_books if number == book.slice)
        book.settled = BlockSet((*schedule.settled, *more))  # type: ignore[arg-type]
        book.version = book.minibatches = book.settled.num_minibatches
    return books


def _coordinator(schedule: Schedule, inheritance: Inheritance | None = None) -> CoordinatorMachine:
    plan = WorkPlan(
        stage=0,
        minibatches_per_epoch=schedule.minibatches_per_epoch,
        block_length=schedule.n_push,
        epochs=schedule.epochs,
        steps=schedule.steps,
        warm_start=schedule.warm_start,
    )
    waiting = schedule.waiting
    return CoordinatorMachine(
        plan=plan,
        num_replicas=schedule.num_replicas,
        num_shards=schedule.num_shards,
        settled=BlockSet(schedule.settled),
        max_staleness=schedule.max_staleness,
        patience=None
        if waiting is None
        else Patience(
            start_s=waiting.start_s,
            leave_s=waiting.leave_s,
            first_s=waiting.first_s,
            least_s=waiting.least_s,
            factor=waiting.factor,
            hold_s=waiting.hold_s,
        ),
        rhythm=Rhythm(n_fetch=schedule.n_fetch, n_push=schedule.n_push) if schedule.rests else None,
        inheritance=inheritance,
    )


def _rules(schedule: Schedule) -> CoordinatorRules:
    return CoordinatorRules(
        blocks=expected_blocks(schedule),
        why_done="steps" if _ends_by_steps(schedule) else "epochs",
        num_replicas=schedule.num_replicas,
        num_shards=schedule.num_shards,
        warm_start=schedule.warm_start,
        waiting=schedule.waiting or Waiting(),
        settled=[place for entry in schedule.settled for place in positions(Block(*entry))],
        max_staleness=schedule.max_staleness,
        rests_at=_rests(schedule),
    )


def _rests(schedule: Schedule) -> frozenset[int] | None:
    """After how many blocks the only replica has just fetched, counted by doing as it does."""
    if not schedule.rests:
        return None
    rests, since = {0}, 0
    for number, block in enumerate(expected_blocks(schedule), start=1):
        steps = block.num_minibatches if schedule.n_fetch < schedule.n_push else schedule.n_push
        for _ in range(steps):
            since = (since + 1) % schedule.n_fetch
        if since == 0:
            rests.add(number)
    return frozenset(rests)


def _ends_by_steps(schedule: Schedule) -> bool:
    if schedule.steps is None:
        return False
    return schedule.epochs is None or schedule.steps <= schedule.epochs * schedule.minibatches_per_epoch


def expected_blocks(schedule: Schedule) -> list[Block]:
    """The blocks of a schedule, cut here on their own, not by `WorkPlan`."""
    done = {(epoch, at) for _, epoch, first, stop in schedule.settled for at in range(first, stop)}
    left = (schedule.steps if schedule.steps is not None else MANY) - len(done)
    blocks: list[Block] = []
    epoch = 0
    while left > 0 and (schedule.epochs is None or epoch < schedule.epochs):
        first = 0
        while first < schedule.minibatches_per_epoch and left > 0:
            stop = first
            while (
                stop < min(first + schedule.n_push, schedule.minibatches_per_epoch, first + left)
                and (epoch, stop) not in done
            ):
                stop += 1
            if stop > first:
                blocks.append(Block(0, epoch, first, stop))
                left -= stop - first
            first = max(stop, first + 1)
        epoch += 1
    return blocks


def command(name: object) -> str:
    return f"python -m tests.simulated.schedules {name}"


def replay(name: str) -> None:
    from tests.simulated.directed import DIRECTED
    from tests.simulated.facts import faults_of

    schedule = (
        random_schedule(int(name))
        if name.isdigit()
        else DIRECTED[name.split("/")[0]](int(name.split("/")[1]))
    )
    print(schedule)
    result = run(schedule)
    for effect in result.told:
        print(effect)
    print("ended:", result.why, "| wrong:", faults_of(result) or "nothing")


if __name__ == "__main__":
    replay(sys.argv[1])
