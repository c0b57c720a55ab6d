"""The simulated suite in one fixed order, for the mutants: the ground, the door, parts, schedules."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from squall.blocks import Block, BlockSet
from squall.coordinator.members import Patience
from squall.coordinator.recovery import Inheritance
from squall.errors import RemoteProtocolError
from squall.replica.downpour import Computed, DownpourLoop
from squall.shard.books import SliceBook
from squall.shard.events import Attach, FromWorker, Worker, WriteOut
from squall.shard.machine import ShardMachine
from squall.slices import Cover, Range, RangeSet
from squall.wire.messages import Fetch, Push
from tests.simulated.directed import DIRECTED
from tests.simulated.facts import faults_of
from tests.simulated.parts import parts
from tests.simulated.schedules import Schedule, command, random_schedule, run
from tests.simulated.shard_rules import positions

NUM_RANDOM = 60
NUM_VARIANTS = 4


def check(schedule: Schedule, name: object) -> None:
    """Run one schedule and complain of whatever is wrong, with the command that replays it."""
    try:
        wrong = faults_of(run(schedule))
    except Exception as error:
        raise AssertionError(f"replay with: {command(name)}") from error
    assert not wrong, f"{wrong[:5]}; replay with: {command(name)}"


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Everything that a mutant must get past, by name, what is quick to see through it first."""
    yield "ground", ground
    yield "door", door
    yield "defaults", defaults
    yield from parts()
    for variant in range(NUM_VARIANTS):
        for name, make in DIRECTED.items():
            yield f"{name}/{variant}", partial(check, make(variant), f"{name}/{variant}")
        share = NUM_RANDOM // NUM_VARIANTS
        for seed in range(share * variant, share * (variant + 1)):
            yield str(seed), partial(check, random_schedule(seed), seed)


def ground() -> None:
    """Sets of ranges and of blocks, which all books are kept in, against plain sets of numbers."""
    draw = random.Random(0)
    for _ in range(40):
        ranges, numbers = RangeSet(), set[int]()
        for _ in range(12):
            start = draw.randrange(14)
            stop = start + draw.randrange(1, 5)
            new = set(range(start, stop))
            covers = {0: Cover.DISJOINT, len(new): Cover.CONTAINED}
            assert ranges.cover(start, stop) is covers.get(len(new & numbers), Cover.PARTIAL)
            if new & numbers:
                _must_raise(ValueError, partial(ranges.add, start, stop))
                continue
            ranges.add(start, stop)
            numbers |= new
            _same(ranges, numbers)
    _must_raise(ValueError, partial(RangeSet().add, 3, 3))
    assert RangeSet([(0, 2), (2, 4)]) == RangeSet([(0, 4)]) != RangeSet([(0, 5)])
    assert RangeSet([(0, 2)]) != {0, 1}
    _ground_of_blocks(draw)
    _doors_of_ranges()


def _same(ranges: RangeSet, numbers: set[int]) -> None:
    held = list(ranges)
    assert {number for start, stop in held for number in range(start, stop)} == numbers
    assert all(stop < start for (_, stop), (start, _) in pairwise(held)), "touching or unsorted"
    assert len(ranges) == len(numbers)
    for stop in range(20):
        missing = [number for first, last in ranges.gaps(stop) for number in range(first, last)]
        assert missing == [number for number in range(stop) if number not in numbers]
        assert all(first < last for first, last in ranges.gaps(stop))


def _ground_of_blocks(draw: random.Random) -> None:
    blocks, places = BlockSet(), set[tuple[int, int, int]]()
    for _ in range(60):
        first = draw.randrange(12)
        block = Block(draw.randrange(2), draw.randrange(3), first, first + draw.randrange(1, 4))
        new = positions(block)
        covers = {0: Cover.DISJOINT, len(new): Cover.CONTAINED}
        assert blocks.cover(block) is covers.get(len(new & places), Cover.PARTIAL)
        missing = [place for part in blocks.missing(block) for place in sorted(positions(part))]
        assert missing == sorted(new - places)
        if not new & places:
            blocks.add(block)
            places |= new
    entries = blocks.entries()
    assert list(entries) == sorted(entries)
    assert {place for entry in entries for place in positions(Block(*entry))} == places
    assert blocks.num_minibatches == len(places)
    assert blocks == BlockSet(entries) != BlockSet()
    for first in range(12):
        part = BlockSet.union([Block(0, 1, first, first + 2)])
        common = {place for block in blocks.common(part).blocks() for place in positions(block)}
        assert common == places & {(0, 1, first), (0, 1, first + 1)}
    assert BlockSet(((0, 0, 0, 2),)).common(BlockSet(((0, 0, 2, 4),))) == BlockSet(), "they touch"
    assert BlockSet() != ()


def _doors_of_ranges() -> None:
    for start, stop in ((-1, 2), (2, 2), (3, 2)):
        _must_raise(ValueError, partial(Range, start, stop))
    assert Range(0, 4).size == 4
    for wrong in ((-1, 0, 0, 1), (0, -1, 0, 1), (0, 0, -1, 1), (0, 0, 2, 2), (0, 0, 3, 2)):
        _must_raise(ValueError, partial(Block, *wrong))
    assert Block(0, 0, 2, 5).num_minibatches == 3
    assert str(Block(0, 1, 2, 3)) == "epoch 1, position 2"
    assert str(Block(0, 1, 2, 5)) == "epoch 1, positions 2 to 4"


def door() -> None:
    """What no sound worker sends is refused by the shard, which stays as it was."""
    worker = Worker(replica=0, partition=1, incarnation=0)
    shard = ShardMachine(shard=0, incarnation=0, books=(SliceBook.new(0, 1), SliceBook.new(1, 0)))
    shard.handle(Attach(worker=worker))
    facts: dict[str, Any] = {
        "request": 1,
        "block": Block(0, 0, 0, 2),
        "attempt": 1,
        "minibatches": 2,
        "examples": 2,
        "based_on": (0,),
        "absent": (),
        "not_finite": "",
        "into": None,
    }
    changes = (
        {"into": 2},
        {"based_on": ()},
        {"based_on": (0, 0)},
        {"based_on": (1,)},
        {"based_on": (-1,)},
        {"minibatches": 1},
        {"buffer": 2},
        {"buffer": -1},
        {"scale": 1.5},
        {"scale": -0.5},
    )
    for change in changes:
        message = Push(**(facts | change))
        _must_raise(RemoteProtocolError, partial(shard.handle, FromWorker(sender=worker, message=message)))
    for into in (2, None):
        fetch = Fetch(request=1, into=into)  # type: ignore[arg-type]
        _must_raise(RemoteProtocolError, partial(shard.handle, FromWorker(sender=worker, message=fetch)))
    for request, scale in ((2, 1.0), (3, 0.0)):
        sound = Push(**(facts | {"request": request, "scale": scale, "not_finite": "weight"}))
        assert shard.handle(FromWorker(sender=worker, message=sound))
    other = Worker(replica=0, partition=0, incarnation=0)
    shard.handle(Attach(worker=other))
    for sender, number in ((worker, 0), (other, 1)):
        effects = shard.handle(FromWorker(sender=sender, message=Fetch(request=4, into=0)))
        written = [effect.slices for effect in effects if isinstance(effect, WriteOut)]
        assert written == [(number,)], "each partition has slices of its own"


def defaults() -> None:
    """What a loop and a coordinator are if they are told no more, and the memory that a loop needs."""
    patience = Patience(
        start_s=60.0, leave_s=5.0, first_s=60.0, least_s=5.0, factor=10.0, hold_s=2.0, recover_s=5.0
    )
    assert Patience() == patience
    assert Inheritance(epoch=1).refused_in_a_row == 0
    loop = DownpourLoop(n_fetch=1, n_push=1, has_local_steps=False)
    assert (loop.ahead, loop.overlaps, loop.fetches_at_start, loop.num_gradients) == (1, False, False, 1)
    assert replace(loop, overlaps=True).num_gradients == 2
    assert Computed(loss=0.0, examples=1).scale == 1.0


def _must_raise(kind: type[Exception], act: Callable[[], object]) -> None:
    try:
        act()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} was raised")
