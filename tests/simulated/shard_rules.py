"""What a shard must do, said a second time and in another way: with plain sets of positions.

`ShardRules` predicts every effect of a `ShardMachine`; it shares nothing with it but the messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from squall.blocks import Block, Outcome
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
from squall.shard.machine import ShardMachine
from squall.wire.messages import (
    Books,
    Diverged,
    Fetch,
    Fetched,
    Held,
    Hold,
    Inquire,
    Push,
    Pushed,
    Refuse,
    Refused,
    Release,
    Released,
    Returned,
    SliceState,
)


def positions(block: Block) -> set[tuple[int, int, int]]:
    return {(block.stage, block.epoch, position) for position in range(block.first, block.stop)}


@dataclass
class _Slice:
    number: int
    partition: int = 0
    version: int = 0
    applied: set[tuple[int, int, int]] = field(default_factory=set)
    refused: set[tuple[int, int, int]] = field(default_factory=set)
    incarnation: int = 0
    began_at: int = 0
    """Its version when its shard was started."""

    def based_on(self, told: int, push: Push) -> int:
        return min(told, self.began_at) if push.incarnation < self.incarnation else told

    def verdict(self, push: Push, is_diverged: bool) -> Outcome:
        block = positions(push.block)
        if block <= self.applied | self.refused:
            return Outcome.REFUSED if block & self.refused else Outcome.REPEATED
        if block & (self.applied | self.refused):
            return Outcome.REFUSED
        if push.not_finite:
            return Outcome.NOT_FINITE
        return Outcome.REFUSED if is_diverged else Outcome.APPLIED

    @property
    def state(self) -> SliceState:
        return SliceState(
            slice=self.number,
            version=self.version,
            minibatches=len(self.applied),
            incarnation=self.incarnation,
        )


@dataclass
class _Talk:
    worker: Worker
    newest: int = 0
    reply: Fetched | Pushed | None = None


class ShardRules:
    """Follows one shard event by event."""

    def __init__(self, shard: int, incarnation: int, books: Sequence[SliceBook]) -> None:
        self.shard = shard
        self.incarnation = incarnation
        self.slices = [_slice(book, incarnation) for book in books]
        self.talks: dict[tuple[int, int], _Talk] = {}  # by replica and partition
        self.running: Apply | None = None
        self.queue: list[Any] = []
        self.is_diverged = self.is_closed = False
        self.num_dropped = 0
        self.hold = 0  # number of the one that is on
        self.over = 0  # number of the last one that is over
        self.let_in: set[tuple[int, int, int]] = set()
        self.epoch = 0
        self.ruin: Diverged | None = None
        self.outside: list[FromWorker] = []  # pushes before the door

    def see(self, machine: ShardMachine, event: Any, effects: tuple[Any, ...]) -> None:
        expected = self._expect(event)
        assert [_plain(effect) for effect in effects] == [_plain(effect) for effect in expected], (
            f"shard {self.shard}, {event}: {effects} instead of {expected}"
        )
        assert machine.num_dropped == self.num_dropped
        if not self.is_closed:
            assert [*machine._held_back] == self.outside
        if any(isinstance(effect, Store) for effect in effects):
            self._check_copies(machine, effects)

    def end(self, machine: ShardMachine) -> None:
        """Compare the books at the end, position by position."""
        for known, book in zip(self.slices, machine.books.values(), strict=True):
            assert (book.version, book.minibatches) == (known.version, len(known.applied))
            settled = {place for entry in book.settled.entries() for place in positions(Block(*entry))}
            refused = {place for entry in book.refused.entries() for place in positions(Block(*entry))}
            assert (settled, refused) == (known.applied | known.refused, known.refused)

    def _check_copies(self, machine: ShardMachine, effects: tuple[Any, ...]) -> None:
        for store in (effect for effect in effects if isinstance(effect, Store)):
            for book in store.books:
                mine = machine.books[book.slice]
                assert book is not mine
                assert book.settled is not mine.settled
                assert book.refused is not mine.refused

    def _expect(self, event: Any) -> list[Any]:
        at_once = Attach | Detach | Applied | NotFinite
        is_hold = isinstance(getattr(event, "message", None), Hold)
        if self.running is not None and not is_hold and not isinstance(event, at_once):
            self.queue.append(event)
            return []
        held = self.hold and isinstance(event, Applied)
        effects = self._take(event)
        while self.queue and self.running is None:
            effects += self._take(self.queue.pop(0))
        is_asked = is_hold and event.message.request > self.over
        if (held or is_asked) and self.hold and self.running is None and not self.is_closed:
            effects.append(self._held())
        return effects

    def _held(self) -> Tell:
        sets = [known.applied | known.refused for known in self.slices] or [self.let_in]
        anywhere, everywhere = runs(sorted(set.union(*sets))), runs(sorted(set.intersection(*sets)))
        return Tell(message=Held(request=self.hold, anywhere=tuple(anywhere), everywhere=tuple(everywhere)))

    def _reopen(self) -> None:
        self.queue = [*self.outside, *self.queue]
        self.outside = []

    def _on_hold(self, told: Hold) -> list[Any]:
        if told.request <= self.over or self.is_diverged:
            self.num_dropped += 1
            return []
        self.hold = told.request
        self.let_in |= {place for block in told.admitted for place in positions(block)}
        self._reopen()
        return []

    def _on_release(self, told: Release) -> list[Any]:
        answer = Tell(message=Released(request=told.request))
        if told.request <= self.over:
            return [answer]
        store = [self._store(told.name)] if told.name and self.hold == told.request else []
        self.over, self.hold, self.let_in = told.request, 0, set()
        self._reopen()
        return [*store, answer]

    def _on_inquiry(self, told: Inquire) -> list[Any]:
        if told.epoch < self.epoch:
            self.num_dropped += 1
            return []
        sets = [known.applied | known.refused for known in self.slices]
        some = set[tuple[int, int, int]]().union(*sets)
        refused = set[tuple[int, int, int]]().union(*(known.refused for known in self.slices))
        books = Books(
            epoch=told.epoch,
            incarnation=self.incarnation,
            anywhere=tuple(runs(sorted(some))),
            everywhere=tuple(runs(sorted(set.intersection(*sets)))) if sets else None,
            refused=tuple(runs(sorted(refused))),
        )
        if told.epoch > self.epoch:
            self.epoch, self.over, self.hold, self.let_in = told.epoch, 0, 0, set()
            self._reopen()
        return [Tell(message=books), *([Tell(message=self.ruin)] if self.ruin is not None else [])]

    def _store(self, name: str) -> Store:
        return Store(name=name, books=tuple(self._book(known) for known in self.slices))

    def _take(self, event: Any) -> list[Any]:
        match event:
            case Attach(worker=worker):
                place = worker.replica, worker.partition
                talk = self.talks.get(place)
                if talk is None or worker.incarnation > talk.worker.incarnation:
                    self.talks[place] = _Talk(worker)
            case Detach(worker=worker):
                place = worker.replica, worker.partition
                if place in self.talks and self.talks[place].worker == worker:
                    del self.talks[place]
                    self.outside = [push for push in self.outside if push.sender != worker]
            case Applied():
                return self._after_update([])
            case NotFinite(tensor=tensor):
                assert self.running is not None
                self.is_diverged = True
                told = self.ruin = Diverged(block=self.running.push.block, tensor=tensor)
                effects = self._after_update([Tell(message=told)])
                self.hold, self.let_in = 0, set()
                self._reopen()
                return effects
            case Close():
                self.is_closed = True
            case ComeBack():
                sets = [known.applied | known.refused for known in self.slices]
                all_ = tuple(runs(sorted(set.intersection(*sets)))) if sets else None
                return [Tell(message=Returned(incarnation=self.incarnation, everywhere=all_))]
            case _ if self.is_closed:
                self.num_dropped += 1
            case Save() if self.is_diverged:
                self.num_dropped += 1
            case Save(name=name):
                return [self._store(name)]
            case FromCoordinator(message=Hold() as hold):
                return self._on_hold(hold)
            case FromCoordinator(message=Inquire() as inquiry):
                return self._on_inquiry(inquiry)
            case FromCoordinator(message=Release() as release):
                return self._on_release(release)
            case FromWorker(sender=sender, message=message):
                return self._request(sender, message)
            case _:
                return self._refuse(event.message)
        return []

    def _request(self, sender: Worker, message: Fetch | Push) -> list[Any]:
        talk = self.talks.get((sender.replica, sender.partition))
        if talk is None or talk.worker != sender or message.request < talk.newest:
            self.num_dropped += 1
            return []
        if message.request == talk.newest:
            assert talk.reply is not None, "no request is taken up while an update runs"
            return [Answer(to=sender, message=talk.reply)]
        if isinstance(message, Push) and self.hold:
            places = positions(message.block)
            is_new = any(not places <= known.applied | known.refused for known in self._of(sender))
            if is_new and not places <= self.let_in:
                event = FromWorker(sender=sender, message=message)
                self.outside += [] if event in self.outside else [event]
                return []
        talk.newest, talk.reply = message.request, None
        if isinstance(message, Push):
            mine = self._of(sender)
            new = [known.number for known in mine if self._verdict(known, message) is Outcome.APPLIED]
            if new:
                self.running = Apply(sender=sender, push=message, slices=tuple(new))
                return [self.running]
            return self._settled(sender, message, ())
        own = self._of(sender)
        talk.reply = Fetched(
            request=message.request, incarnation=self.incarnation, states=tuple(s.state for s in own)
        )
        numbers = tuple(known.number for known in own)
        return [WriteOut(to=sender, slices=numbers, into=message.into), Answer(to=sender, message=talk.reply)]

    def _of(self, sender: Worker) -> list[_Slice]:
        return [known for known in self.slices if known.partition == sender.partition]

    def _verdict(self, known: _Slice, push: Push) -> Outcome:
        return known.verdict(push, self.is_diverged)

    def _after_update(self, told: list[Any]) -> list[Any]:
        assert self.running is not None
        done, self.running = self.running, None
        applied = () if told else done.slices
        return told + self._settled(done.sender, done.push, applied)

    def _settled(self, sender: Worker, push: Push, applied: tuple[int, ...]) -> list[Any]:
        rows: list[Any] = []
        outcomes = []
        own = self._of(sender)
        for known, told in zip(own, push.based_on, strict=True):
            based_on = known.based_on(told, push)
            before = known.version
            outcome = self._verdict(known, push)
            if known.number in applied:
                outcome = Outcome.APPLIED
                known.version += 1
                known.applied |= positions(push.block)
            outcomes.append(outcome)
            rows.append(
                Record(
                    sender=sender,
                    slice=known.number,
                    block=push.block,
                    attempt=push.attempt,
                    minibatches=push.block.stop - push.block.first,
                    examples=push.examples,
                    based_on=based_on,
                    version=known.version,
                    staleness=before - based_on,
                    outcome=outcome,
                )
            )
        rest = tuple(known.number for known in own if known.number not in applied)
        written = [WriteOut(to=sender, slices=rest, into=push.into)] if rest and push.into is not None else []
        talk = self.talks.get((sender.replica, sender.partition))
        if talk is None or talk.worker != sender:
            return rows + written
        talk.reply = Pushed(
            request=push.request,
            incarnation=self.incarnation,
            outcomes=tuple(outcomes),
            states=tuple(known.state for known in own),
        )
        return [*rows, *written, Answer(to=sender, message=talk.reply)]

    def _refuse(self, message: Refuse) -> list[Any]:
        rows: list[Any] = []
        outcomes = []
        block = positions(message.block)
        for known in self.slices:
            has_all = block <= known.applied
            outcomes.append(Outcome.REPEATED if has_all else Outcome.REFUSED)
            missing = sorted(block - known.applied - known.refused)
            known.refused |= block - known.applied
            for part in runs(missing):
                rows.append(
                    Record(
                        sender=None,
                        slice=known.number,
                        block=part,
                        attempt=0,
                        minibatches=part.stop - part.first,
                        examples=0,
                        based_on=known.version,
                        version=known.version,
                        staleness=0,
                        outcome=Outcome.REFUSED,
                    )
                )
        told = Refused(request=message.request, block=message.block, outcomes=tuple(outcomes))
        return [*rows, Tell(message=told)]

    def _book(self, known: _Slice) -> SliceBook:
        book = SliceBook.new(known.number, known.partition)
        book.version, book.minibatches = known.version, len(known.applied)
        for stage, epoch, position in sorted(known.applied | known.refused):
            book.settled.add(Block(stage, epoch, position, position + 1))
        for stage, epoch, position in sorted(known.refused):
            book.refused.add(Block(stage, epoch, position, position + 1))
        return book


def _slice(book: SliceBook, incarnation: int) -> _Slice:
    settled = {place for entry in book.settled.entries() for place in positions(Block(*entry))}
    refused = {place for entry in book.refused.entries() for place in positions(Block(*entry))}
    applied = settled - refused
    return _Slice(
        book.slice, book.partition, book.version, applied, refused, incarnation, began_at=book.version
    )


def runs(places: list[tuple[int, int, int]]) -> list[Block]:
    """Positions, in order, as blocks without holes."""
    found: list[Block] = []
    for stage, epoch, position in places:
        if found and (found[-1].stage, found[-1].epoch, found[-1].stop) == (stage, epoch, position):
            found[-1] = Block(stage, epoch, found[-1].first, position + 1)
        else:
            found.append(Block(stage, epoch, position, position + 1))
    return found


def _plain(effect: Any) -> Any:
    """An effect in a form that compares by content."""
    if not isinstance(effect, Store):
        return effect
    books = [
        (book.slice, book.partition, book.state(0), book.settled.entries(), book.refused.entries())
        for book in effect.books
    ]
    return effect.name, books
