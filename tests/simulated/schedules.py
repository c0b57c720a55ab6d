"""Whole clusters under simulated schedules: made from a seed, run, and judged.

`python -m tests.simulated.schedules SEED` replays one and prints what happened.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from squall.blocks import Block, BlockSet
from squall.cluster.faults import AtStep, AtTime, Chance, Cut, Delay, Drop, Duplicate, Fault, Kill, Pause
from squall.cluster.modelled import ModelledArithmetic
from squall.cluster.world import Pace, World
from squall.coordinator.machine import CoordinatorMachine, Patience
from squall.coordinator.work import WorkPlan
from squall.machines import Machine, key_of
from squall.replica.downpour import DownpourLoop, downpour
from squall.shard.machine import ShardMachine, SliceBook
from squall.slices import Cover
from squall.wire.messages import Outcome

BOUND_S = 3_000.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything that a simulated run depends on."""

    seed: int
    num_replicas: int = 3
    num_shards: int = 2
    minibatches_per_epoch: int = 7
    n_fetch: int = 1
    n_push: int = 1
    epochs: int | None = 2
    steps: int | None = None
    warm_start: int = 0
    ahead: int = 1
    pace: Pace = field(default_factory=Pace)
    faults: tuple[Fault, ...] = ()
    poisoned: tuple[tuple[int, int], ...] = ()
    """Minibatches (epoch, position) whose gradient is never finite."""
    sick: tuple[int, ...] = ()
    """Replicas whose gradients are not finite every third time."""
    stop_at: float | None = None


def random_schedule(seed: int) -> Schedule:
    """A schedule drawn from a seed: sizes, paces and a few faults of every kind that does not end a run."""
    draw = random.Random(seed)
    num_replicas = draw.randint(1, 4)
    num_shards = draw.randint(1, 3)
    n_push = draw.choice((1, 1, 2, 3))
    faults: list[Fault] = []
    if draw.random() < 0.6:
        faults.append(Delay(draw.choice((0.01, 0.3)), draw.choice((0.0, 0.01, 0.3))))
    for kind in draw.sample(("push", "push.reply", "fetch.reply", "ask", "ask.reply", "refuse", "goodbye", "*"), 2):
        if draw.random() < 0.5:
            faults.append(Drop(kind, draw.choice((0.05, 0.3))))
        if draw.random() < 0.4:
            faults.append(Duplicate(kind, draw.choice((0.1, 0.5))))
    if draw.random() < 0.4:
        one, other = f"replica{draw.randrange(num_replicas)}", draw.choice(("shard0", "coordinator"))
        faults.append(Cut(one, other, draw.uniform(1, 20), AtTime(draw.uniform(0, 5))))
    if draw.random() < 0.4:
        role = draw.choice((f"replica{draw.randrange(num_replicas)}", f"shard{draw.randrange(num_shards)}"))
        faults.append(Pause(role, draw.uniform(1, 80), AtTime(draw.uniform(0, 8))))
    for number in range(num_replicas):
        if draw.random() < 0.3:
            when = draw.choice((AtStep(draw.randrange(4)), AtTime(draw.uniform(0, 8)), Chance(0.05)))
            may_stay_dead = number > 0
            restart = None if may_stay_dead and draw.random() < 0.5 else draw.uniform(0.1, 5)
            faults.append(Kill(f"replica{number}", when, restart))
    return Schedule(
        seed=seed,
        num_replicas=num_replicas,
        num_shards=num_shards,
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
        poisoned=((0, draw.randrange(9)),) if draw.random() < 0.2 else (),
        sick=(num_replicas - 1,) if num_replicas > 1 and draw.random() < 0.15 else (),
        ahead=draw.choice((1, 1, 0, 2)),
    )


@dataclass
class Result:
    """A finished schedule, for judging."""

    schedule: Schedule
    world: World
    arithmetic: ModelledArithmetic
    why: str
    told: list[object]
    pairs: Counter[tuple[str, str, str]]


def build(schedule: Schedule, told: list[object], watch: Callable[[str, Machine, object], None]) -> World:
    plan = WorkPlan(
        stage=0,
        minibatches_per_epoch=schedule.minibatches_per_epoch,
        block_length=schedule.n_push,
        epochs=schedule.epochs,
        steps=schedule.steps,
        warm_start=schedule.warm_start,
    )
    sick_counts: Counter[int] = Counter()

    def not_finite(worker, wish):  # type: ignore[no-untyped-def]
        if (wish.epoch, wish.position) in schedule.poisoned:
            return "weight"
        if worker.replica in schedule.sick:
            sick_counts[worker.replica] += 1
            return "weight" if sick_counts[worker.replica] % 3 == 0 else ""
        return ""

    directs = CoordinatorMachine(
        plan=plan,
        num_replicas=schedule.num_replicas,
        num_shards=schedule.num_shards,
        settled=BlockSet(),
        patience=Patience(start_s=20.0, first_s=30.0),
    )
    shards = [
        ShardMachine(shard=index, incarnation=0, books=(SliceBook.new(index, 0),))
        for index in range(schedule.num_shards)
    ]
    loop = DownpourLoop(
        n_fetch=schedule.n_fetch, n_push=schedule.n_push, has_local_steps=False, ahead=schedule.ahead
    )
    return World(
        directs=directs,
        shards=shards,
        slices=[(index,) for index in range(schedule.num_shards)],
        num_replicas=schedule.num_replicas,
        loop=lambda: downpour(loop),
        arithmetic=ModelledArithmetic(not_finite),
        tell=lambda now, effect: told.append(effect),
        pace=schedule.pace,
        faults=schedule.faults,
        seed=schedule.seed,
        watch=watch,
    )


def run(schedule: Schedule) -> Result:
    """Run a schedule to its end, checking every decider's invariants after every event."""
    told: list[object] = []
    pairs: Counter[tuple[str, str, str]] = Counter()

    def watch(name: str, machine: Machine, event: object) -> None:
        machine.check_invariants()
        phase, last = machine.story[-1]
        pairs[type(machine).__name__, phase.name, key_of(last).__name__] += 1

    world = build(schedule, told, watch)

    def may_go_on() -> str | None:
        return "stopped" if schedule.stop_at is not None and world.now >= schedule.stop_at else None

    why = world.run(bound_s=BOUND_S, may_go_on=may_go_on)
    arithmetic = world._arithmetic
    assert isinstance(arithmetic, ModelledArithmetic)
    return Result(schedule, world, arithmetic, why, told, pairs)


def expected_blocks(schedule: Schedule) -> list[Block]:
    """The blocks of a schedule, cut here on their own, not by `WorkPlan`."""
    blocks: list[Block] = []
    left = schedule.steps if schedule.steps is not None else 10**9
    epoch = 0
    while left > 0 and (schedule.epochs is None or epoch < schedule.epochs):
        first = 0
        while first < schedule.minibatches_per_epoch and left > 0:
            length = min(schedule.n_push, schedule.minibatches_per_epoch - first, left)
            blocks.append(Block(0, epoch, first, first + length))
            first, left = first + length, left - length
        epoch += 1
    return blocks


def faults_of(result: Result) -> list[str]:
    """Everything that is wrong with a finished schedule; empty if nothing is."""
    wrong: list[str] = []
    schedule, directs = result.schedule, result.world.directs
    if result.why == "no replica is left":
        return [] if any(isinstance(fault, Kill) for fault in schedule.faults) else ["lost every replica for no reason"]
    if result.why == "diverged" and schedule.sick:
        return []  # the sick one was all that was left
    if result.why not in ("steps", "epochs"):
        wrong.append(f"ended because of {result.why!r}")
    blocks = expected_blocks(schedule)
    refused = set(directs.refused)
    for number in range(schedule.num_shards):
        counts = Counter(result.arithmetic.applied.get(number, []))
        for block in blocks:
            allowed = (0, 1) if block in refused else (1,)
            if counts[block] not in allowed:
                wrong.append(f"slice {number} applied {block} {counts[block]} times")
        for block in set(counts) - set(blocks):
            wrong.append(f"slice {number} applied {block}, which is not in the plan")
        book = result.world.shards[number].books[number]
        for block in blocks:
            if book.settled.cover(block) is not Cover.CONTAINED:
                wrong.append(f"slice {number} has not settled {block}")
    if refused and not schedule.poisoned and not schedule.sick:
        wrong.append(f"refused {refused} though every gradient was finite")
    wrong.extend(_wrong_rows(result))
    return wrong


def _wrong_rows(result: Result) -> list[str]:
    """The ledger agrees with what was applied, and its versions count the updates of each slice."""
    wrong: list[str] = []
    for number, blocks in result.arithmetic.applied.items():
        rows = [row for _, _, row in result.arithmetic.rows if row.slice == number]
        applied = [row for row in rows if row.outcome is Outcome.APPLIED]
        if [row.block for row in applied] != blocks:
            wrong.append(f"the ledger of slice {number} lists other blocks than were applied")
        if [row.version for row in applied] != list(range(1, len(applied) + 1)):
            wrong.append(f"the versions of slice {number} do not count its updates")
        if any(row.staleness != row.version - 1 - row.based_on or row.staleness < 0 for row in applied):
            wrong.append(f"a staleness of slice {number} is not version before less based_on")
        if result.schedule.n_fetch in (1, result.schedule.n_push):
            wrong.extend(_reads_not_own_writes(number, applied))
    return wrong


def _reads_not_own_writes(number: int, applied: Sequence[object]) -> list[str]:
    produced: dict[object, int] = {}
    wrong = []
    for row in applied:
        previous = produced.get(row.sender, 0)  # type: ignore[attr-defined]
        if row.based_on < previous:  # type: ignore[attr-defined]
            wrong.append(f"slice {number}: {row} is based on less than its sender's previous push")
        produced[row.sender] = row.version  # type: ignore[attr-defined]
    return wrong


def command(seed: int) -> str:
    return f"python -m tests.simulated.schedules {seed}"


if __name__ == "__main__":
    outcome = run(random_schedule(int(sys.argv[1])))
    print(outcome.schedule)
    for item in outcome.told:
        print(item)
    print("ended:", outcome.why, "| wrong:", faults_of(outcome) or "nothing")
