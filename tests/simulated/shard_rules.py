"""What a shard must do, said a second time and in another way: with plain sets of positions.

`ShardRules` predicts every effect of a `ShardMachine`; it shares nothing with it but the messages.
"""

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
    Detach,
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
from squall.wire.messages import Diverged, Fetch, Fetched, Push, Pushed, Refuse, Refused, SliceState


def positions(block: Block) -> set[tuple[int, int, int]]:
    return {(block.stage, block.epoch, position) for position in range(block.first, block.stop)}


@dataclass
class _Slice:
    number: int
    version: int = 0
    applied: set[tuple[int, int, int]] = field(default_factory=set)
    refused: set[tuple[int, int, int]] = field(default_factory=set)

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
        return SliceState(slice=self.number, version=self.version, minibatches=len(self.applied))


@dataclass
class _Talk:
    worker: Worker
    newest: int = 0
    reply: Fetched | Pushed | None = None


class ShardRules:
    """Follows one shard event by event."""

    def __init__(self, shard: int, incarnation: int, slices: tuple[int, ...]) -> None:
        self.shard = shard
        self.incarnation = incarnation
        self.slices = [_Slice(number) for number in slices]
        self.talks: dict[int, _Talk] = {}
        self.running: Apply | None = None
        self.queue: list[Any] = []
        self.is_diverged = self.is_closed = False
        self.num_dropped = 0

    def see(self, machine: ShardMachine, event: Any, effects: tuple[Any, ...]) -> None:
        expected = self._expect(event)
        assert [_plain(effect) for effect in effects] == [_plain(effect) for effect in expected], (
            f"shard {self.shard}, {event}: {effects} instead of {expected}"
        )
        assert machine.num_dropped == self.num_dropped
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
        if self.running is not None and not isinstance(event, Attach | Detach | Applied | NotFinite):
            self.queue.append(event)
            return []
        effects = self._take(event)
        while self.queue and self.running is None:
            effects += self._take(self.queue.pop(0))
        return effects

    def _take(self, event: Any) -> list[Any]:
        match event:
            case Attach(worker=worker):
                talk = self.talks.get(worker.replica)
                if talk is None or worker.incarnation > talk.worker.incarnation:
                    self.talks[worker.replica] = _Talk(worker)
            case Detach(worker=worker):
                if worker.replica in self.talks and self.talks[worker.replica].worker == worker:
                    del self.talks[worker.replica]
            case Applied():
                return self._after_update([])
            case NotFinite(tensor=tensor):
                assert self.running is not None
                self.is_diverged = True
                told = Diverged(block=self.running.push.block, tensor=tensor)
                return self._after_update([Tell(message=told)])
            case Close():
                self.is_closed = True
            case _ if self.is_closed:
                self.num_dropped += 1
            case Save() if self.is_diverged:
                self.num_dropped += 1
            case Save(name=name):
                return [Store(name=name, books=tuple(self._book(known) for known in self.slices))]
            case FromWorker(sender=sender, message=message):
                return self._request(sender, message)
            case _:
                return self._refuse(event.message)
        return []

    def _request(self, sender: Worker, message: Fetch | Push) -> list[Any]:
        talk = self.talks.get(sender.replica)
        if talk is None or talk.worker != sender or message.request < talk.newest:
            self.num_dropped += 1
            return []
        if message.request == talk.newest:
            assert talk.reply is not None, "no request is taken up while an update runs"
            return [Answer(to=sender, message=talk.reply)]
        talk.newest, talk.reply = message.request, None
        if isinstance(message, Push):
            new = [known.number for known in self.slices if self._verdict(known, message) is Outcome.APPLIED]
            if new:
                self.running = Apply(sender=sender, push=message, slices=tuple(new))
                return [self.running]
            return self._settled(sender, message, ())
        talk.reply = Fetched(
            request=message.request, incarnation=self.incarnation, states=tuple(s.state for s in self.slices)
        )
        numbers = tuple(known.number for known in self.slices)
        return [WriteOut(to=sender, slices=numbers, into=message.into), Answer(to=sender, message=talk.reply)]

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
        for known, based_on in zip(self.slices, push.based_on, strict=True):
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
        rest = tuple(known.number for known in self.slices if known.number not in applied)
        written = [WriteOut(to=sender, slices=rest, into=push.into)] if rest and push.into is not None else []
        talk = self.talks.get(sender.replica)
        if talk is None or talk.worker != sender:
            return rows + written
        talk.reply = Pushed(
            request=push.request,
            incarnation=self.incarnation,
            outcomes=tuple(outcomes),
            states=tuple(known.state for known in self.slices),
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
            for part in _runs(missing):
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
        book = SliceBook.new(known.number, 0)
        book.version, book.minibatches = known.version, len(known.applied)
        for stage, epoch, position in sorted(known.applied | known.refused):
            book.settled.add(Block(stage, epoch, position, position + 1))
        for stage, epoch, position in sorted(known.refused):
            book.refused.add(Block(stage, epoch, position, position + 1))
        return book


def _runs(places: list[tuple[int, int, int]]) -> list[Block]:
    """Positions of one epoch, in order, as blocks without holes."""
    runs: list[Block] = []
    for stage, epoch, position in places:
        if runs and runs[-1].stop == position:
            runs[-1] = Block(stage, epoch, runs[-1].first, position + 1)
        else:
            runs.append(Block(stage, epoch, position, position + 1))
    return runs


def _plain(effect: Any) -> Any:
    """An effect in a form that compares by content."""
    if not isinstance(effect, Store):
        return effect
    books = [
        (book.slice, book.partition, book.state, book.settled.entries(), book.refused.entries())
        for book in effect.books
    ]
    return effect.name, books
