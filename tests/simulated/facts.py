"""What must hold at the end of every schedule, read from what was applied, told and written in the ledger.

These facts know nothing of how the deciders reach them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from squall.blocks import Block, Outcome
from squall.coordinator.events import Closed, Cut, Diverging, Ended, Found, Report
from squall.faults import Kill
from squall.observe.events import Redone, Refused
from squall.shard.books import SliceBook
from squall.shard.events import Record
from squall.shard.machine import Phase
from squall.wire.messages import Lease
from tests.simulated.coordinator_rules import Waiting
from tests.simulated.schedules import Result, expected_blocks
from tests.simulated.shard_rules import positions


def faults_of(result: Result) -> list[str]:
    """Everything that is wrong with a finished schedule; empty if nothing is."""
    return [
        *_wrong_end(result),
        *_wrong_blocks(result),
        *_wrong_rows(result),
        *_wrong_news(result),
        *_wrong_attempts(result),
        *_wrong_start(result),
        *_wrong_cuts(result),
    ]


def has_followers(result: Result) -> bool:
    """Whether a coordinator of this schedule follows one that was killed."""
    return result.judge.num_followers > 0


def is_done(result: Result) -> bool:
    return result.why in ("steps", "epochs")


def _wrong_end(result: Result) -> Iterator[str]:
    schedule = result.schedule
    can_lose_all = Kill in schedule.has or bool(schedule.outside)
    is_allowed = {
        "no replica is left": can_lose_all,
        "diverged": bool(schedule.sick or schedule.ruined or len(schedule.poisoned) > 2),
        "stopped": schedule.stop_at is not None or bool(schedule.outside),
    }
    is_short = "came back without" in result.why and schedule.keeps_every > 1
    if not is_done(result) and not is_short and not is_allowed.get(result.why, False):
        yield f"ended because of {result.why!r}"
    if sum(isinstance(effect, Ended) for effect in result.told) != 1:
        yield "the end was not told once"
    if any(isinstance(effect, Diverging) for effect in result.told) != (result.why == "diverged"):
        yield "diverging was told without being the end, or was the end without being told"


def _wrong_blocks(result: Result) -> Iterator[str]:
    """Each block is on every slice once, or is listed as refused and is nowhere or listed as a mix."""
    schedule = result.schedule
    blocks = expected_blocks(schedule)
    known = set(blocks)
    refused = dict(result.world.directs.refused)
    may_refuse = schedule.poisoned or schedule.sick or schedule.ruined or schedule.ahead_of_books
    if refused and not may_refuse:
        yield f"refused {refused} though every gradient was finite"
    counts = {n: Counter(result.arithmetic.applied.get(n, [])) for held in schedule.slices for n in held}
    for number, count in counts.items():
        for block, times in count.items():
            if block not in known:
                yield f"slice {number} applied {block}, which is not in the plan"
            if times > 1:
                yield f"slice {number} applied {block} {times} times"
            if block in refused and "some slices had applied it" not in refused[block]:
                yield f"slice {number} applied {block}, which is listed as refused without a word of it"
        if is_done(result):
            had = {block for block in known if positions(block) <= _had(result, number)}
            if had & set(count):
                yield f"slice {number} applied again {had & set(count)}"
            for block in known - set(count) - set(refused) - had:
                yield f"slice {number} has not applied {block}"
    if is_done(result):
        yield from _unsettled(result, blocks)


def _had(result: Result, number: int) -> set[tuple[int, int, int]]:
    """What a slice had before the schedule began."""
    schedule = result.schedule
    more = [tuple(place) for of, *place in schedule.ahead_of_books if of == number]
    return {place for entry in (*schedule.settled, *more) for place in positions(Block(*entry))}


def _unsettled(result: Result, blocks: Sequence[Block]) -> Iterator[str]:
    for machine in result.world.shards:
        for book in machine.books.values():
            settled = {place for entry in book.settled.entries() for place in positions(Block(*entry))}
            for block in blocks:
                if not positions(block) <= settled:
                    yield f"slice {book.slice} has not settled {block}"


def _wrong_rows(result: Result) -> Iterator[str]:
    """The ledger agrees with what was applied, and its versions count the updates of each slice."""
    schedule = result.schedule
    for number, blocks in result.arithmetic.applied.items():
        before = len(_had(result, number))
        rows = [row for _, _, row in result.arithmetic.rows if row.slice == number]
        applied = [row for row in rows if row.outcome is Outcome.APPLIED]
        is_running = any(number in m.books and m.phase is Phase.APPLYING for m in result.world.shards)
        if [row.block for row in applied] not in ((blocks, blocks[:-1]) if is_running else (blocks,)):
            yield f"the ledger of slice {number} lists other blocks than were applied"
        if [row.version - before for row in applied] != list(range(1, len(applied) + 1)):
            yield f"the versions of slice {number} do not count its updates"
        if any(row.staleness != row.version - 1 - row.based_on or row.staleness < 0 for row in applied):
            yield f"a staleness of slice {number} is not version before less based_on"
        if any(row.minibatches != row.block.num_minibatches for row in rows):
            yield f"a row of slice {number} counts other minibatches than its block has"
        bound = schedule.max_staleness
        if bound is not None and any(row.staleness > bound for row in applied):
            yield f"a push to slice {number} is staler than {bound}"
        if schedule.n_fetch in (1, schedule.n_push) and not schedule.overlaps:
            yield from _reads_not_own_writes(number, applied)


def _reads_not_own_writes(number: int, applied: Sequence[Record]) -> Iterator[str]:
    produced: dict[object, int] = {}
    for row in applied:
        if row.based_on < produced.get(row.sender, 0):
            yield f"slice {number}: {row} is based on less than its sender's previous push"
        produced[row.sender] = row.version


def _wrong_news(result: Result) -> Iterator[str]:
    """Each block is told as done or as refused, once, and never as both."""
    closed = Counter(effect.report.block for effect in result.told if isinstance(effect, Closed))
    events = [effect.event for effect in result.told if isinstance(effect, Report)]
    refused = Counter(event.block for event in events if isinstance(event, Refused))
    found = Counter(b for effect in result.told if isinstance(effect, Found) for b in effect.blocks)
    if found and not has_followers(result):
        yield f"{set(found)} are told as found, though no coordinator was lost"
    closed += found
    for block, times in (closed + refused).items():
        if times != 1:
            yield f"{block} was told as done or refused {times} times"
    if is_done(result) and set(closed) | set(refused) != set(expected_blocks(result.schedule)):
        yield "some blocks were told neither as done nor as refused"
    for effect in result.told:
        if isinstance(effect, Closed) and effect.report.outcome is not Outcome.APPLIED:
            yield f"{effect} is told as done"


def _wrong_attempts(result: Result) -> Iterator[str]:
    """Attempts of a block count its leases, and each but the first is told as redone.

    A coordinator that follows one that was lost may not know of a lease; then it counts too few.
    """
    leases: dict[Block, list[int]] = {}
    for _, sent in result.judge.leases:
        assert isinstance(sent.message, Lease)
        leases.setdefault(sent.message.block, []).append(sent.message.attempt)
    events = [effect.event for effect in result.told if isinstance(effect, Report)]
    redone: dict[Block, list[int]] = {}
    for event in events:
        if isinstance(event, Redone):
            redone.setdefault(event.block, []).append(event.attempt)
    for block, attempts in leases.items():
        if has_followers(result):
            if redone.get(block, []) != [attempt for attempt in attempts if attempt > 1]:
                yield f"{block} was leased as {attempts}, but told as redone {redone.get(block)}"
            continue
        if attempts != list(range(1, len(attempts) + 1)):
            yield f"the attempts at {block} are {attempts}"
        if redone.get(block, []) != attempts[1:]:
            yield f"{block} was leased as {attempts}, but told as redone {redone.get(block)}"
    for _, _, row in result.arithmetic.rows:
        if row.sender is not None and row.attempt not in leases.get(row.block, []):
            yield f"{row} was pushed without a lease"


def _wrong_start(result: Result) -> Iterator[str]:
    """No lease before all have asked or the time-out; one replica alone during a warm start."""
    schedule, judge = result.schedule, result.judge
    waiting = schedule.waiting or Waiting()
    if judge.leases and Kill not in schedule.has and not schedule.outside:
        first = judge.leases[0][0]
        has_all = len(judge.asked) == schedule.num_replicas and max(judge.asked.values()) <= first
        if not has_all and first < waiting.start_s:
            yield f"a lease was granted at {first} s, before all replicas had asked"
    if not schedule.has:
        blocks = expected_blocks(schedule)[: schedule.warm_start]
        senders = {
            row.sender.replica
            for _, _, row in result.arithmetic.rows
            if row.block in blocks and row.outcome is Outcome.APPLIED
        }
        if len(senders) > 1:
            yield f"{senders} shared the warm start"


def _wrong_cuts(result: Result) -> Iterator[str]:
    """What is stored under one name is one cut, and was announced; whoever was held goes on."""
    announced = {effect.name: effect for effect in result.told if isinstance(effect, Cut)}
    stored: dict[str, list[SliceBook]] = {}
    for _, store in result.arithmetic.stored:
        if store.name.isdigit() and result.schedule.checkpoints:
            stored.setdefault(store.name, []).extend(store.books)
    for name, books in stored.items():
        if name not in announced:
            yield f"checkpoint {name} was stored without being announced"
            continue
        expected = {place for block in announced[name].settled for place in positions(block)}
        for book in books:
            settled = {place for entry in book.settled.entries() for place in positions(Block(*entry))}
            if settled != expected:
                yield f"checkpoint {name} has other positions on slice {book.slice}: {settled ^ expected}"
        numbers = [book.slice for book in books]
        if len(set(numbers)) != len(numbers):
            yield f"checkpoint {name} was stored twice"
