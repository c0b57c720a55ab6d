"""The protocol of one parameter shard, without any I/O.

A shard owns slices and is the only writer of each. For a push it decides, by the set of positions that a
slice has, whether the block is new, a repeat, or refused; the server around it runs the update rule and
reports back. Source of the design: Dean et al., NIPS 2012, section 4.1; exactly-once by blocks is ours.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any, ClassVar

from squall.blocks import Block, BlockSet
from squall.errors import RemoteProtocolError
from squall.machines import Machine, key_of
from squall.shard.books import SliceBook
from squall.shard.events import (
    EVERY_PARTITION,
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
    ShardEffect,
    Store,
    Tell,
    Worker,
    WriteOut,
)
from squall.slices import Cover
from squall.wire.messages import (
    Books,
    Diverged,
    Fetch,
    Fetched,
    Held,
    Hold,
    Inquire,
    Outcome,
    Push,
    Pushed,
    Refuse,
    Refused,
    Release,
    Released,
    Returned,
    SliceState,
)


@dataclass(slots=True)
class _Line:
    """The conversation with one worker.

    Attributes:
        last: number of its newest request; 0 before the first.
        reply: what was answered to it; None while the answer is being made.
    """

    worker: Worker
    last: int = 0
    reply: Fetched | Pushed | None = None


class Phase(Enum):
    SERVING = "serving"
    APPLYING = "applying"
    """An update is running: requests wait their turn, in the order of arrival."""
    DIVERGED = "diverged"
    """An update left the slice non-finite: nothing is applied any more; pushes are refused."""
    CLOSED = "closed"


class ShardMachine(Machine):
    """Decides for one shard: one event in, effects out.

    Args:
        shard: this shard's number.
        incarnation: how often it has been started, from 0.
        books: one for each slice, as new or as a checkpoint had them. The machine takes ownership.
    """

    TABLE: ClassVar[Mapping[tuple[Enum, type], str]] = {
        (Phase.SERVING, Attach): "_attach",
        (Phase.SERVING, Detach): "_detach",
        (Phase.SERVING, Fetch): "_request",
        (Phase.SERVING, Push): "_request",
        (Phase.SERVING, Refuse): "_refuse",
        (Phase.SERVING, Hold): "_hold_back",
        (Phase.SERVING, Release): "_release",
        (Phase.SERVING, Inquire): "_inquired",
        (Phase.SERVING, ComeBack): "_come_back",
        (Phase.SERVING, Save): "_save",
        (Phase.SERVING, Close): "_close",
        (Phase.APPLYING, Attach): "_attach",
        (Phase.APPLYING, Detach): "_detach",
        (Phase.APPLYING, Fetch): "_wait",
        (Phase.APPLYING, Push): "_wait",
        (Phase.APPLYING, Refuse): "_wait",
        (Phase.APPLYING, Hold): "_hold_back",
        (Phase.APPLYING, Release): "_wait",
        (Phase.APPLYING, Inquire): "_wait",
        (Phase.APPLYING, Save): "_wait",
        (Phase.APPLYING, Close): "_wait",
        (Phase.APPLYING, Applied): "_applied",
        (Phase.APPLYING, NotFinite): "_not_finite",
        (Phase.DIVERGED, Attach): "_attach",
        (Phase.DIVERGED, Detach): "_detach",
        (Phase.DIVERGED, Fetch): "_request",
        (Phase.DIVERGED, Push): "_request",
        (Phase.DIVERGED, Refuse): "_refuse",
        (Phase.DIVERGED, Hold): "_ignore",
        (Phase.DIVERGED, Release): "_release",
        (Phase.DIVERGED, Inquire): "_inquired",
        (Phase.DIVERGED, Close): "_close",
        (Phase.CLOSED, Detach): "_detach",
        (Phase.CLOSED, Fetch): "_ignore",
        (Phase.CLOSED, Push): "_ignore",
        (Phase.CLOSED, Refuse): "_ignore",
        (Phase.CLOSED, Hold): "_ignore",
        (Phase.CLOSED, Release): "_ignore",
        (Phase.CLOSED, Inquire): "_ignore",
    }

    def __init__(self, *, shard: int, incarnation: int, books: tuple[SliceBook, ...]) -> None:
        super().__init__(Phase.SERVING)
        self.shard = shard
        self.incarnation = incarnation
        self.books = {book.slice: book for book in books}
        self._began_at = {book.slice: book.version for book in books}
        self.num_dropped = 0  # messages of a past life or a past request
        self._lines: dict[tuple[int, int], _Line] = {}
        self._pending: Apply | None = None
        self._waiting: deque[Any] = deque()
        self._hold: int | None = None  # number of the hold that is on
        self._admitted = BlockSet()  # blocks that are taken all the same
        self._held_back: list[FromWorker] = []  # pushes that wait for its end
        self._released = 0  # number of the newest hold that is over
        self._epoch = 0  # of the newest coordinator that was heard
        self._diverged: Diverged | None = None

    def check_invariants(self) -> None:
        assert (self.phase is Phase.APPLYING) == (self._pending is not None)
        assert self.phase is Phase.APPLYING or not self._waiting
        assert self._hold is not None or not self._held_back or self.phase is Phase.CLOSED
        assert self._hold is None or self._hold > self._released
        for book in self.books.values():
            applied = book.settled.num_minibatches - book.refused.num_minibatches
            assert applied == book.minibatches, "every applied minibatch is counted once"
            assert book.version <= book.minibatches, "an update stands for at least one minibatch"

    # Who talks to us ----------------------------------------------------------------------------------

    def _attach(self, event: Attach) -> tuple[ShardEffect, ...]:
        line = self._lines.get(event.worker.place)
        if line is None or line.worker.incarnation < event.worker.incarnation:
            self._lines[event.worker.place] = _Line(event.worker)
        return ()

    def _detach(self, event: Detach) -> tuple[ShardEffect, ...]:
        line = self._lines.get(event.worker.place)
        if line is not None and line.worker == event.worker:
            del self._lines[event.worker.place]
            # It sends them again if it comes back; what they speak of is not there any more.
            self._held_back = [held for held in self._held_back if held.sender != event.worker]
        return ()

    def _ignore(self, event: Any) -> tuple[ShardEffect, ...]:
        self.num_dropped += 1
        return ()

    # Requests of workers ------------------------------------------------------------------------------

    def _request(self, event: FromWorker) -> tuple[ShardEffect, ...]:
        line = self._lines.get(event.sender.place)
        if line is None or line.worker != event.sender or event.message.request < line.last:
            return self._ignore(event)  # its sender is dead or has long had the answer
        if event.message.request == line.last:
            if line.reply is None:
                return self._ignore(event)  # the answer is on its way
            # Sent again from memory: the buffers may be in use by now and are not written a second time.
            return (Answer(to=line.worker, message=line.reply),)
        self._check(event)
        if isinstance(event.message, Push) and self._must_wait(event.sender, event.message.block):
            if event not in self._held_back:  # else it is sent again
                self._held_back.append(event)
            return ()
        line.last, line.reply = event.message.request, None
        if isinstance(event.message, Fetch):
            return self._fetch(line, event.message)
        return self._push(line, event.message)

    def _check(self, event: FromWorker) -> None:
        """Refuse at the door what no sound worker sends."""
        message = event.message
        if message.into not in ((0, 1) if isinstance(message, Fetch) else (0, 1, None)):
            raise self._wrong(event, f"expected a parameter buffer 0 or 1, but got {message.into}")
        if isinstance(message, Fetch):
            return
        books = self._books_of(event.sender)
        if len(message.based_on) != len(books):
            raise self._wrong(event, f"expected {len(books)} versions, but got {len(message.based_on)}")
        for book, based_on in zip(books, message.based_on, strict=True):
            if based_on < 0 or (message.incarnation >= self.incarnation and based_on > book.version):
                raise self._wrong(event, f"slice {book.slice} is at version {book.version}, not {based_on}")
        if message.buffer not in (0, 1) or not 0.0 <= message.scale <= 1.0:
            raise self._wrong(
                event, f"expected buffer 0 or 1 and a scale up to 1, got {message.buffer}, {message.scale}"
            )
        if message.minibatches != message.block.num_minibatches:
            raise self._wrong(
                event, f"expected {message.block.num_minibatches} minibatches, got {message.minibatches}"
            )

    def _wrong(self, event: FromWorker, what: str) -> RemoteProtocolError:
        sender = event.sender
        kind = type(event.message).__name__
        return RemoteProtocolError(
            reason=f"shard {self.shard} refused a {kind} of replica {sender.replica}.{sender.partition}: {what}"
        )

    def _fetch(self, line: _Line, fetch: Fetch) -> tuple[ShardEffect, ...]:
        books = self._books_of(line.worker)
        line.reply = Fetched(request=fetch.request, incarnation=self.incarnation, states=self._states(books))
        return (
            WriteOut(to=line.worker, slices=tuple(book.slice for book in books), into=fetch.into),
            Answer(to=line.worker, message=line.reply),
        )

    def _push(self, line: _Line, push: Push) -> tuple[ShardEffect, ...]:
        new = tuple(
            book.slice for book in self._books_of(line.worker) if self._judge(book, push) is Outcome.APPLIED
        )
        if new:
            self._pending = Apply(sender=line.worker, push=push, slices=new)
            self.phase = Phase.APPLYING
            return (self._pending,)
        return self._settle(line.worker, push, applied=())

    def _judge(self, book: SliceBook, push: Push) -> Outcome:
        match book.settled.cover(push.block):
            case Cover.CONTAINED:
                is_refused = book.refused.cover(push.block) is not Cover.DISJOINT
                return Outcome.REFUSED if is_refused else Outcome.REPEATED
            case Cover.PARTIAL:
                return Outcome.REFUSED
            case Cover.DISJOINT if push.not_finite:
                return Outcome.NOT_FINITE
            case Cover.DISJOINT:
                return Outcome.REFUSED if self.phase is Phase.DIVERGED else Outcome.APPLIED

    def _settle(self, sender: Worker, push: Push, applied: tuple[int, ...]) -> tuple[ShardEffect, ...]:
        """Record what became of a push on each slice, and answer it."""
        effects: list[ShardEffect] = []
        outcomes: list[Outcome] = []
        books = self._books_of(sender)
        for book, told in zip(books, push.based_on, strict=True):
            based_on = self._based_on(book, told, push)
            staleness = book.version - based_on
            if book.slice in applied:
                outcome = Outcome.APPLIED
                book.take(push.block, push.minibatches)
            else:
                outcome = self._judge(book, push)
            outcomes.append(outcome)
            effects.append(
                Record(
                    sender=sender,
                    slice=book.slice,
                    block=push.block,
                    attempt=push.attempt,
                    minibatches=push.minibatches,
                    examples=push.examples,
                    based_on=based_on,
                    version=book.version,
                    staleness=staleness,
                    outcome=outcome,
                )
            )
        unwritten = tuple(book.slice for book in books if book.slice not in applied)
        if push.into is not None and unwritten:
            effects.append(WriteOut(to=sender, slices=unwritten, into=push.into))
        line = self._lines.get(sender.place)
        if line is not None and line.worker == sender:
            line.reply = Pushed(
                request=push.request,
                incarnation=self.incarnation,
                outcomes=tuple(outcomes),
                states=self._states(books),
            )
            effects.append(Answer(to=sender, message=line.reply))
        return tuple(effects)

    def _based_on(self, book: SliceBook, told: int, push: Push) -> int:
        """The version that a push was based on; of an earlier start of this shard, what is left of it counts."""
        return told if push.incarnation >= self.incarnation else min(told, self._began_at[book.slice])

    def _states(self, books: Iterable[SliceBook]) -> tuple[SliceState, ...]:
        return tuple(book.state(self.incarnation) for book in books)

    def _books_of(self, worker: Worker) -> list[SliceBook]:
        own = worker.partition
        return [book for book in self.books.values() if own in (book.partition, EVERY_PARTITION)]

    # The update that runs -----------------------------------------------------------------------------

    def _wait(self, event: Any) -> tuple[ShardEffect, ...]:
        self._waiting.append(event)
        return ()

    def _applied(self, event: Applied) -> tuple[ShardEffect, ...]:
        assert self._pending is not None
        done, self._pending = self._pending, None
        self.phase = Phase.SERVING
        settled = self._settle(done.sender, done.push, applied=done.slices) + self._go_on()
        return settled + self._tell_held()

    def _not_finite(self, event: NotFinite) -> tuple[ShardEffect, ...]:
        assert self._pending is not None
        done, self._pending = self._pending, None
        self.phase = Phase.DIVERGED
        self._diverged = Diverged(block=done.push.block, tensor=event.tensor)
        return (
            Tell(message=self._diverged),
            *self._settle(done.sender, done.push, applied=()),
            *self._end_hold(),
        )

    def _go_on(self) -> tuple[ShardEffect, ...]:
        """Take up the requests that waited, until the next update runs."""
        effects: list[ShardEffect] = []
        while self._waiting and self.phase is not Phase.APPLYING:
            event = self._waiting.popleft()
            name = self.TABLE.get((self.phase, key_of(event)), "_ignore")
            effects.extend(getattr(self, name)(event))
        return tuple(effects)

    def _come_back(self, event: ComeBack) -> tuple[ShardEffect, ...]:
        """Say what has survived, before anything else."""
        sets = [book.settled for book in self.books.values()]
        everywhere = reduce(BlockSet.common, sets).blocks() if sets else None
        return (Tell(message=Returned(incarnation=self.incarnation, everywhere=everywhere)),)

    def _inquired(self, event: FromCoordinator) -> tuple[ShardEffect, ...]:
        """Tell a coordinator that follows one that was lost what is here; the holds of that one are over."""
        inquiry = event.message
        assert isinstance(inquiry, Inquire)
        if inquiry.epoch < self._epoch:
            return self._ignore(event)
        is_known, self._epoch = inquiry.epoch == self._epoch, inquiry.epoch
        sets = [book.settled for book in self.books.values()]
        books = Books(
            epoch=self._epoch,
            incarnation=self.incarnation,
            anywhere=_union(sets),
            everywhere=reduce(BlockSet.common, sets).blocks() if sets else None,
            refused=_union(book.refused for book in self.books.values()),
        )
        told = (
            (Tell(message=books),)
            if self._diverged is None
            else (Tell(message=books), Tell(message=self._diverged))
        )
        if is_known:
            return told
        self._released = 0
        return (*told, *self._end_hold())

    # The coordinator and the launcher -----------------------------------------------------------------

    def _refuse(self, event: FromCoordinator) -> tuple[ShardEffect, ...]:
        effects: list[ShardEffect] = []
        outcomes: list[Outcome] = []
        assert isinstance(event.message, Refuse)
        block = event.message.block
        for book in self.books.values():
            # The whole of it, unless the slice has some of it already.
            effects.extend(_row_of_refusal(book, part) for part in book.refuse(block))
            is_applied = book.refused.cover(block) is Cover.DISJOINT
            outcomes.append(Outcome.REPEATED if is_applied else Outcome.REFUSED)
        told = Refused(request=event.message.request, block=block, outcomes=tuple(outcomes))
        return (*effects, Tell(message=told))

    def _hold_back(self, event: FromCoordinator) -> tuple[ShardEffect, ...]:
        """Begin a hold, or hear what else to admit; an update that runs is finished first."""
        hold = event.message
        assert isinstance(hold, Hold)
        if hold.request <= self._released:
            return self._ignore(event)  # a late copy: that hold is over
        self._hold = hold.request
        self._admitted = BlockSet.union((*self._admitted.blocks(), *hold.admitted))
        return self._take_up_again() + self._tell_held()

    def _must_wait(self, sender: Worker, block: Block) -> bool:
        """Whether a hold keeps this block out: some slice has yet to take it, and it is not admitted."""
        if self._hold is None or self._admitted.cover(block) is Cover.CONTAINED:
            return False
        return any(book.settled.cover(block) is not Cover.CONTAINED for book in self._books_of(sender))

    def _tell_held(self) -> tuple[ShardEffect, ...]:
        """While nothing is under way, what the slices hold is what they will hold until more is admitted."""
        if self._hold is None or self.phase is not Phase.SERVING:
            return ()
        sets = [book.settled for book in self.books.values()] or [self._admitted]
        everywhere = reduce(BlockSet.common, sets)
        held = Held(request=self._hold, anywhere=_union(sets), everywhere=everywhere.blocks())
        return (Tell(message=held),)

    def _release(self, event: FromCoordinator) -> tuple[ShardEffect, ...]:
        release = event.message
        assert isinstance(release, Release)
        told = Tell(message=Released(request=release.request))
        if release.request <= self._released:
            return (told,)  # asked again: the first answer was lost
        self._released = release.request
        is_cut = bool(release.name) and self._hold == release.request  # else it has diverged meanwhile
        stored = self._save(Save(name=release.name)) if is_cut else ()
        return (*stored, told, *self._end_hold())

    def _end_hold(self) -> tuple[ShardEffect, ...]:
        self._hold, self._admitted = None, BlockSet()
        return self._take_up_again()

    def _take_up_again(self) -> tuple[ShardEffect, ...]:
        """Look once more at the pushes that were held back, in their order."""
        self._waiting.extendleft(reversed(self._held_back))
        self._held_back.clear()
        return self._go_on()

    def _save(self, event: Save) -> tuple[ShardEffect, ...]:
        return (Store(name=event.name, books=tuple(book.copy() for book in self.books.values())),)

    def _close(self, event: Close) -> tuple[ShardEffect, ...]:
        self.phase = Phase.CLOSED
        return ()


def _union(sets: Iterable[BlockSet]) -> tuple[Block, ...]:
    return BlockSet.union(block for held in sets for block in held.blocks()).blocks()


def _row_of_refusal(book: SliceBook, block: Block) -> Record:
    return Record(
        sender=None,
        slice=book.slice,
        block=block,
        attempt=0,
        minibatches=block.num_minibatches,
        examples=0,
        based_on=book.version,
        version=book.version,
        staleness=0,
        outcome=Outcome.REFUSED,
    )
