"""Downpour SGD as a replica runs it: one generator that reads like the paper and does no I/O.

It yields what it wants done and is sent the result: ``computed = yield Compute(...)``. `ReplicaSession`
turns the wishes into messages; a runner, or virtual time, carries them out.

Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Algorithm 1.1 (DownpourSGDClient).
What differs: work comes as leased blocks; a push carries its block and asks for the fetch in the same
message; and by default a replica waits for the answer, so that it reads its own writes.
"""

import contextlib
import math
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from squall.blocks import Block
from squall.nouns import Noun
from squall.wire.messages import Finished, Lease, Leave, Outcome, SliceState

AHEAD_S = 0.02
"""Work that a replica likes to have leased: long against a message, short against what a run waits for at its end."""
MOST_AHEAD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DownpourLoop:
    """What the loop of one replica needs to know.

    Attributes:
        n_fetch: fetch every so many minibatches.
        n_push: the usual length of a block [minibatches].
        has_local_steps: move the replica's own parameters between fetches.
        ahead: leases asked for before the last is finished, so that no replica waits for one. Where blocks are short
            it holds more, `AHEAD_S` of work, so that the coordinator need not be woken for each.
        overlaps: push and fetch behind the next block's computing, as the paper's three threads do.
        fetches_at_start: fetch when a block is begun instead of after the last, so that its gradient is as fresh as
            can be: what a bound on staleness counts from.
    """

    n_fetch: int
    n_push: int
    has_local_steps: bool
    ahead: int = 1
    overlaps: bool = False
    fetches_at_start: bool = False

    @property
    def num_gradients(self) -> int:
        """How many gradient buffers a replica needs."""
        return 2 if self.overlaps else 1


# Wishes, and what they are answered with ----------------------------------------------------------------


class Compute(Noun, frozen=True, kw_only=True):
    """Compute the gradient of one minibatch and add it to the block's; answered with `Computed`.

    Attributes:
        is_first, is_last: whether it begins the block's sum, and whether it ends it.
        buffer: the gradient buffer that the block's sum goes into.
        local_step: after it, move the replica's own parameters along this minibatch's gradient.
        minibatches: what a schedule counts at this minibatch [minibatches].
    """

    epoch: int
    position: int
    is_first: bool
    is_last: bool
    buffer: int = 0
    local_step: bool
    minibatches: int


class Computed(Noun, frozen=True, kw_only=True):
    """The result of one minibatch.

    Attributes:
        loss: its mean loss.
        examples: how many examples it had.
        not_finite: first tensor of the block's gradient that is not finite, if any; said with the last.
        absent: tensors that had no gradient in the whole block; said with the last.
        scale: what the block's gradient is still to be multiplied by; said with the last.
        seconds: what computing it has taken; 0 where nobody measures.
    """

    loss: float
    examples: int
    not_finite: str = ""
    absent: tuple[int, ...] = ()
    scale: float = 1.0
    seconds: float = 0.0


class Gradient(Noun, frozen=True, kw_only=True):
    """What a push says of the block's gradient.

    Attributes:
        based_on, incarnations: by slice, the version that it was computed from, and of which start of its shard.
    """

    block: Block
    attempt: int
    examples: int
    not_finite: str
    absent: tuple[int, ...]
    buffer: int
    scale: float
    based_on: Mapping[int, int]
    incarnations: Mapping[int, int] = {}


class Exchange(Noun, frozen=True, kw_only=True):
    """Push a gradient (if there is one) and fetch (if asked) with all shards; answered with `Exchanged`."""

    gradient: Gradient | None
    fetch: bool


class Begin(Noun, frozen=True, kw_only=True):
    """Begin an exchange and go on; answered with 0 at once. One at a time."""

    exchange: Exchange


class Collect(Noun, frozen=True, kw_only=True):
    """Wait for the exchange that was begun; answered with `Exchanged`."""


class Exchanged(Noun, frozen=True, kw_only=True):
    """What the shards answered: per slice, its state after the exchange and what became of the push.

    Attributes:
        lives: (shard, its incarnation) of each that answered.
    """

    states: Mapping[int, SliceState]
    outcomes: Mapping[int, Outcome]
    lives: tuple[tuple[int, int], ...] = ()


class NextBlock(Noun, frozen=True, kw_only=True):
    """Report the last block and ask for another, without waiting; answered with a ticket."""

    finished: Finished | None


class Await(Noun, frozen=True, kw_only=True):
    """Wait for the answer to a `NextBlock`; answered with a `Lease` or `Leave`."""

    ticket: int


class Look(Noun, frozen=True, kw_only=True):
    """Ask whether the answer to a `NextBlock` is there; answered with 1 or 0."""

    ticket: int


class Recalled(Exception):  # noqa: N818  not an error
    """Thrown into the loop: begin nothing more; collect what was begun, report it, and end."""


Wish: TypeAlias = Compute | Exchange | Begin | Collect | NextBlock | Await | Look
Answer: TypeAlias = Computed | Exchanged | Lease | Leave | int
Loop: TypeAlias = Generator[Wish, Answer, None]


class _FetchClock:
    """Says when a fetch is due.

    With `n_fetch` >= `n_push` fetches ride on pushes, and a block that is cut short by the end of an epoch
    counts in full, so that a fetch never falls between two minibatches of one block, whose local steps it
    would overwrite. With a smaller `n_fetch` they fall where they fall, as in the paper.
    """

    def __init__(self, loop: DownpourLoop) -> None:
        self._loop = loop
        self._is_within_blocks = loop.n_fetch < loop.n_push
        self._since = 0

    def reset(self) -> None:
        self._since = 0

    def is_due_within_block(self) -> bool:
        return self._is_within_blocks and self._since >= self._loop.n_fetch

    def count_minibatch(self, *, ends_block: bool) -> bool:
        """Count one minibatch; True if a fetch follows it before anything else is computed."""
        if self._is_within_blocks:
            self._since += 1
            return self._since >= self._loop.n_fetch
        if ends_block:
            self._since += self._loop.n_push
        return ends_block and self._since >= self._loop.n_fetch

    def fetched(self) -> None:
        self._since = max(0, self._since - self._loop.n_fetch)


def downpour(loop: DownpourLoop) -> Loop:
    """Train with one replica until the coordinator says to leave."""
    replica = _Replica(loop)
    with contextlib.suppress(Recalled):
        yield from replica.train()
    yield from replica.finish()


@dataclass(slots=True)
class _Pushed:
    """A push that has been begun, and what is to be reported of it."""

    gradient: Gradient
    loss_sum: float
    fetches: bool


class _Replica:
    """The loop's state: what is fetched, what is under way, and which leases have been asked for."""

    def __init__(self, loop: DownpourLoop) -> None:
        self._loop = loop
        self._clock = _FetchClock(loop)
        self._states: Mapping[int, SliceState] = {}
        self._steps = 0  # minibatches since the fetch
        self._tickets: deque[int] = deque()
        self._under_way: _Pushed | None = None
        self._buffer = 0
        self._leases = 0  # in hand or asked for: whoever reports a block asks for another
        self._wanted = 1 + loop.ahead

    def train(self) -> Loop:
        yield from self._fetch()
        yield from self._ask_ahead()
        while isinstance(lease := (yield from self._next_lease()), Lease):
            if lease.refresh or self._loop.fetches_at_start:
                yield from self.finish()
                yield from self._fetch()
            pushed = yield from self._compute(lease)
            exchange = Exchange(gradient=pushed.gradient, fetch=pushed.fetches)
            if pushed.fetches:
                self._clock.fetched()  # counted when it is asked for: with overlap it comes later
            if self._loop.overlaps:
                yield from self.finish()
                yield Begin(exchange=exchange)
                self._under_way = pushed
                self._buffer = 1 - self._buffer
            else:
                exchanged = yield exchange
                assert isinstance(exchanged, Exchanged)
                yield from self._settle(pushed, exchanged)

    def finish(self) -> Loop:
        """Wait for the push that is under way, if there is one, and report it."""
        if self._under_way is not None:
            exchanged = yield Collect()
            assert isinstance(exchanged, Exchanged)
            pushed, self._under_way = self._under_way, None
            yield from self._settle(pushed, exchanged)

    def _settle(self, pushed: _Pushed, exchanged: Exchanged) -> Loop:
        """Take up what was fetched, and report the block."""
        if pushed.fetches:
            self._states, self._steps = exchanged.states, 0
        finished = report(pushed.gradient, exchanged, pushed.loss_sum)
        yield from self._ask(finished)
        yield from self._ask_ahead()

    def _next_lease(self) -> Generator[Wish, Answer, Answer]:
        if not self._tickets:
            yield from self.finish()  # which asks for another
        ticket = self._tickets.popleft()
        if self._under_way is not None and not (yield Look(ticket=ticket)):
            yield from self.finish()  # there may be no other work until this block is reported
        return (yield Await(ticket=ticket))

    def _compute(self, lease: Lease) -> Generator[Wish, Answer, _Pushed]:
        """Compute the block of a lease: Algorithm 1.1 between two pushes."""
        block = lease.block
        states = self._states
        loss_sum, examples, seconds = 0.0, 0, 0.0
        for position in range(block.first, block.stop):
            if self._clock.is_due_within_block():
                yield from self.finish()
                yield from self._fetch()
            is_last = position == block.stop - 1
            fetch_follows = self._clock.count_minibatch(ends_block=is_last)
            computed = yield Compute(
                epoch=block.epoch,
                position=position,
                is_first=position == block.first,
                is_last=is_last,
                buffer=self._buffer,
                local_step=self._loop.has_local_steps and not fetch_follows,
                minibatches=_minibatches(self._states) + self._steps,
            )
            assert isinstance(computed, Computed)
            self._steps += 1
            loss_sum += computed.loss
            examples += computed.examples
            seconds += computed.seconds
        assert isinstance(computed, Computed)
        if seconds and self._loop.ahead:
            self._wanted = max(1 + self._loop.ahead, min(MOST_AHEAD, math.ceil(AHEAD_S / seconds)))
        gradient = Gradient(
            block=block,
            attempt=lease.attempt,
            examples=examples,
            not_finite=computed.not_finite,
            absent=computed.absent,
            buffer=self._buffer,
            scale=computed.scale,
            based_on={number: state.version for number, state in states.items()},
            incarnations={number: state.incarnation for number, state in states.items()},
        )
        # After a gradient that was not finite, the replica's own local steps are not to be trusted either.
        fetches = (fetch_follows or bool(computed.not_finite)) and not self._loop.fetches_at_start
        return _Pushed(gradient, loss_sum, fetches)

    def _fetch(self) -> Loop:
        exchanged = yield Exchange(gradient=None, fetch=True)
        assert isinstance(exchanged, Exchanged)
        self._states, self._steps = exchanged.states, 0
        self._clock.reset()

    def _ask_ahead(self) -> Loop:
        while self._leases < self._wanted:
            self._leases += 1
            yield from self._ask(None)

    def _ask(self, finished: Finished | None) -> Loop:
        ticket = yield NextBlock(finished=finished)
        assert isinstance(ticket, int)
        self._tickets.append(ticket)


def _minibatches(states: Mapping[int, SliceState]) -> int:
    """What a schedule has counted at the fetched point; slices may differ, the furthest one speaks."""
    return max((state.minibatches for state in states.values()), default=0)


def report(gradient: Gradient, exchanged: Exchanged, loss_sum: float) -> Finished:
    """How a block ended, by what the shards answered to its push."""
    return Finished(
        block=gradient.block,
        attempt=gradient.attempt,
        outcome=_overall(exchanged.outcomes),
        not_finite=gradient.not_finite,
        loss_sum=loss_sum,
        examples=gradient.examples,
        staleness=_staleness(gradient, exchanged),
        lives=exchanged.lives,
    )


def _staleness(gradient: Gradient, exchanged: Exchanged) -> float:
    """Mean over the slices that applied the push: version before it, less what it was based on.

    A shard that was started anew since counts from what it came back with, which only its ledger knows; 0 at least.
    """
    applied = [number for number, outcome in exchanged.outcomes.items() if outcome is Outcome.APPLIED]
    total = sum(
        max(0, exchanged.states[number].version - 1 - gradient.based_on[number]) for number in applied
    )
    return total / len(applied) if applied else 0.0


def _overall(outcomes: Mapping[int, Outcome]) -> Outcome:
    """One word for all slices: the block is done only if every slice has it."""
    if Outcome.REFUSED in outcomes.values():
        return Outcome.REFUSED
    if Outcome.NOT_FINITE in outcomes.values():
        return Outcome.NOT_FINITE
    return Outcome.APPLIED
