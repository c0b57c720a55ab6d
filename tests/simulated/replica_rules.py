"""What a replica must do, said a second time and in another way: as a plain list of steps.

`ReplicaRules` predicts every effect of a `ReplicaSession` that runs `downpour`; it shares nothing with them
but the messages. When a fetch is due it says with a formula instead of a running remainder.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from squall.blocks import Block, Outcome
from squall.replica.downpour import Compute, Computed, DownpourLoop
from squall.replica.session import (
    FromCoordinator,
    FromShard,
    Quit,
    Reconnected,
    Redirected,
    ReplicaSession,
    Started,
    Swap,
    Tick,
    ToCoordinator,
    ToShard,
)
from squall.wire.messages import (
    Ask,
    Fetch,
    Finished,
    Goodbye,
    Lease,
    Leave,
    Push,
    Pushed,
    Recall,
    Resume,
    SliceState,
)


@dataclass
class _Work:
    """A block in hand, or pushed."""

    lease: Lease
    based_on: dict[int, SliceState]
    buffer: int
    done: int = 0
    losses: list[float] = field(default_factory=list)
    examples: int = 0
    last: Computed | None = None

    @property
    def block(self) -> Block:
        return self.lease.block


@dataclass
class _Flight:
    """An exchange that has been begun and not been taken up."""

    work: _Work | None
    fetches: bool
    open: dict[tuple[int, int], Fetch | Push] = field(default_factory=dict)  # by partition and shard
    states: dict[int, SliceState] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)


Effects: TypeAlias = list[Any]
Step: TypeAlias = Callable[[], Effects]


class ReplicaRules:
    """Follows one life of one replica event by event."""

    def __init__(self, loop: DownpourLoop, slices: Mapping[tuple[int, int], tuple[int, ...]]) -> None:
        self.loop = loop
        self.slices = slices
        self.buffer = 1
        self.gradient = 0
        self.number = 0
        self.num_dropped = 0
        self.flight: _Flight | None = None
        self.landing: Step | None = None  # what waits for the flight
        self.states: dict[int, SliceState] = {}
        self.since_fetch = 0  # minibatches
        self.counted = 0  # minibatches, or blocks, since fetches were last counted from anew
        self.fetched_at = 0  # of those, at the last fetch
        self.asks: dict[int, Ask] = {}
        self.answers: dict[int, Lease | Leave] = {}
        self.leased: dict[Block, int] = {}
        self.answered: list[Finished] = []
        self.tickets: deque[int] = deque()
        self.awaited: int | None = None
        self.work: _Work | None = None
        self.recalled: str | None = None
        self.has_begun = self.has_left = self.is_computing = False

    def see(self, machine: ReplicaSession, event: Any, effects: tuple[Any, ...]) -> None:
        expected = self._expect(event)
        assert list(effects) == expected, f"replica, {event}: {effects} instead of {expected}"
        assert machine.num_dropped == self.num_dropped
        assert machine.buffer == self.buffer

    # Events ---------------------------------------------------------------------------------------------

    def _expect(self, event: Any) -> Effects:
        if self.has_left:
            return self._drop()
        match event:
            case Started():
                self.has_begun = True
                return self._fetch(self._join)
            case Tick():
                open_now = self.flight.open if self.flight is not None else {}
                again: Effects = [
                    ToShard(shard=shard, message=message, partition=partition)
                    for (partition, shard), message in open_now.items()
                ]
                return again + [ToCoordinator(message=ask) for ask in self.asks.values()]
            case Reconnected(shard=shard, partition=partition):
                message = self.flight.open.get((partition, shard)) if self.flight is not None else None
                return [ToShard(shard=shard, message=message, partition=partition)] if message else []
            case Redirected():
                resume = Resume(leases=tuple(self.leased.items()), done=tuple(self.answered[-64:]))
                return [
                    ToCoordinator(message=resume),
                    *(ToCoordinator(message=ask) for ask in self.asks.values()),
                ]
            case Computed():
                return self._computed(event)
            case FromShard():
                return self._heard(event)
            case FromCoordinator(message=Recall(why=why)):
                return self._recall(why)
            case FromCoordinator(message=Lease() | Leave() as answer):
                ask = self.asks.pop(answer.request, None)
                if ask is None:
                    return self._drop()
                if ask.finished is not None:
                    self.answered.append(ask.finished)
                if isinstance(answer, Lease):
                    self.leased[answer.block] = answer.attempt
                self.answers[answer.request] = answer
                return self._take_up() if answer.request == self.awaited else []
        raise AssertionError(f"nobody sends {event}")

    def _drop(self) -> Effects:
        self.num_dropped += 1
        return []

    def _recall(self, why: str) -> Effects:
        self.recalled = why
        if self.is_computing or self.landing is not None:
            return []  # it is taken up with the next step
        self.awaited = None
        return self._stop() if self.has_begun else self._quit(why)

    def _heard(self, event: FromShard) -> Effects:
        flight = self.flight
        request = None if flight is None else flight.open.get((event.partition, event.shard))
        if flight is None or request is None or event.message.request != request.request:
            return self._drop()
        line = event.partition, event.shard
        del flight.open[line]
        earlier = flight.lives.get(event.shard)
        if earlier is None or event.message.incarnation < earlier:
            flight.lives[event.shard] = event.message.incarnation
        flight.states |= {state.slice: state for state in event.message.states}
        if isinstance(event.message, Pushed):
            flight.outcomes |= dict(zip(self.slices[line], event.message.outcomes, strict=True))
        if flight.open or self.landing is None:
            return []
        then, self.landing = self.landing, None
        return self._land(then)

    # Exchanges ------------------------------------------------------------------------------------------

    def _launch(self, work: _Work | None, *, fetches: bool) -> Effects:
        self.flight = flight = _Flight(work, fetches)
        if self.slices:
            self.number += 1
        for line in self.slices:
            flight.open[line] = self._request(line, work, fetches)
        return [
            ToShard(shard=shard, message=message, partition=partition)
            for (partition, shard), message in flight.open.items()
        ]

    def _request(self, line: tuple[int, int], work: _Work | None, fetches: bool) -> Fetch | Push:
        into = (0 if self.buffer else 1) if fetches else None
        if work is None:
            assert into is not None
            return Fetch(request=self.number, into=into)
        assert work.last is not None
        return Push(
            request=self.number,
            block=work.block,
            attempt=work.lease.attempt,
            minibatches=work.block.stop - work.block.first,
            examples=work.examples,
            based_on=tuple(work.based_on[number].version for number in self.slices[line]),
            incarnation=work.based_on[self.slices[line][0]].incarnation,
            absent=work.last.absent,
            not_finite=work.last.not_finite,
            buffer=work.buffer,
            scale=work.last.scale,
            into=into,
        )

    def _land(self, then: Step) -> Effects:
        """Wait for what has been begun, take it up, and go on."""
        if self.flight is None:
            return then()
        if self.flight.open:
            self.landing = then
            return []
        flight, self.flight = self.flight, None
        effects: Effects = []
        if flight.fetches:
            self.states, self.since_fetch = flight.states, 0
            if self.slices:
                self.buffer = 0 if self.buffer else 1
                effects.append(Swap(buffer=self.buffer))
        if flight.work is not None:
            effects += self._ask(self._report(flight.work, flight))
        return effects + then()

    def _fetch(self, then: Step) -> Effects:
        if self.recalled is not None:
            return self._stop()
        return self._launch(None, fetches=True) + self._land(then)

    def _report(self, work: _Work, flight: _Flight) -> Finished:
        assert work.last is not None
        applied = [number for number, outcome in flight.outcomes.items() if outcome is Outcome.APPLIED]
        behind = [
            max(flight.states[number].version - 1 - work.based_on[number].version, 0) for number in applied
        ]
        verdict = Outcome.APPLIED
        for worse in (Outcome.NOT_FINITE, Outcome.REFUSED):
            if worse in flight.outcomes.values():
                verdict = worse
        return Finished(
            block=work.block,
            attempt=work.lease.attempt,
            outcome=verdict,
            not_finite=work.last.not_finite,
            loss_sum=sum(work.losses),
            examples=work.examples,
            staleness=sum(behind) / len(behind) if behind else 0.0,
            lives=tuple(flight.lives.items()),
        )

    # Leases ---------------------------------------------------------------------------------------------

    def _join(self) -> Effects:
        effects: Effects = []
        for _ in range(1 + self.loop.ahead):
            effects += self._ask(None)
        return effects + self._next()

    def _ask(self, report: Finished | None) -> Effects:
        self.number += 1
        if report is not None:
            self.leased.pop(report.block, None)
        ask = self.asks[self.number] = Ask(request=self.number, finished=report)
        self.tickets.append(self.number)
        return [ToCoordinator(message=ask)]

    def _next(self) -> Effects:
        """The next lease; whatever is under way is taken up first if there is nothing else to do."""
        if not self.tickets:
            return self._land(self._next)
        ticket = self.tickets.popleft()
        if ticket in self.answers:
            return self._await(ticket)
        return self._land(lambda: self._await(ticket))

    def _await(self, ticket: int) -> Effects:
        if self.recalled is not None:
            return self._stop()
        self.awaited = ticket
        return self._take_up() if ticket in self.answers else []

    def _take_up(self) -> Effects:
        assert self.awaited is not None
        answer = self.answers.pop(self.awaited)
        self.awaited = None
        if isinstance(answer, Leave):
            return self._land(lambda: self._quit(self.recalled or "the work is done"))
        if not answer.refresh and not self.loop.fetches_at_start:
            return self._begin(answer)
        self.counted = self.fetched_at = 0
        return self._land(lambda: self._fetch(lambda: self._begin(answer)))

    def _begin(self, lease: Lease) -> Effects:
        self.work = _Work(lease, dict(self.states), self.gradient)
        return self._compute()

    # Minibatches ----------------------------------------------------------------------------------------

    @property
    def _is_within(self) -> bool:
        return self.loop.n_fetch < self.loop.n_push

    def _is_fetch_due(self) -> bool:
        """Whether a fetch falls right after what has been counted last."""
        if self.counted == self.fetched_at:
            return False
        if self._is_within:
            return self.counted % self.loop.n_fetch == 0
        so_far, before = (
            blocks * self.loop.n_push // self.loop.n_fetch for blocks in (self.counted, self.counted - 1)
        )
        return so_far > before

    def _compute(self) -> Effects:
        """The next minibatch of the block in hand."""
        assert self.work is not None
        work, block = self.work, self.work.block
        if self._is_within and self._is_fetch_due():
            self.fetched_at = self.counted
            return self._land(lambda: self._fetch(self._compute))
        if self.recalled is not None:
            return self._stop()
        position = block.first + work.done
        is_last = position == block.stop - 1
        if self._is_within or is_last:
            self.counted += 1
        fetch_follows = (self._is_within or is_last) and self._is_fetch_due()
        self.is_computing = True
        return [
            Compute(
                epoch=block.epoch,
                position=position,
                is_first=work.done == 0,
                is_last=is_last,
                buffer=work.buffer,
                local_step=self.loop.has_local_steps and not fetch_follows,
                minibatches=max((s.minibatches for s in self.states.values()), default=0) + self.since_fetch,
            )
        ]

    def _computed(self, computed: Computed) -> Effects:
        assert self.work is not None
        work = self.work
        self.is_computing = False
        self.since_fetch += 1
        work.done += 1
        work.losses.append(computed.loss)
        work.examples += computed.examples
        work.last = computed
        if work.done < work.block.stop - work.block.first:
            return self._compute()
        return self._land(self._push) if self.loop.overlaps else self._push()

    def _push(self) -> Effects:
        if self.recalled is not None:
            return self._stop()
        work, is_due = self.work, self._is_fetch_due()
        assert work is not None
        assert work.last is not None
        fetches = (is_due or bool(work.last.not_finite)) and not self.loop.fetches_at_start
        if fetches and is_due:
            self.fetched_at = self.counted
        elif fetches:
            self.counted = self.fetched_at = 0
        effects = self._launch(work, fetches=fetches)
        if not self.loop.overlaps:
            return effects + self._land(self._next)
        self.gradient = 0 if self.gradient else 1
        return effects + self._next()

    # The end --------------------------------------------------------------------------------------------

    def _stop(self) -> Effects:
        """Recalled: take up and report what is under way, and begin nothing."""
        why = self.recalled
        assert why is not None
        return self._land(lambda: self._quit(why))

    def _quit(self, why: str) -> Effects:
        self.has_left = True
        return [ToCoordinator(message=Goodbye()), Quit(why=why)]
