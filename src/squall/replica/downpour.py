"""Downpour SGD as a replica runs it: one generator that reads like the paper and does no I/O.

It yields what it wants done and is sent the result: ``computed = yield Compute(...)``. `ReplicaSession`
turns the wishes into messages; a runner, or virtual time, carries them out.

Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Algorithm 1.1 (DownpourSGDClient).
What differs: work comes as leased blocks; a push carries its block and asks for the fetch in the same
message; and by default a replica waits for the answer, so that it reads its own writes.
"""

from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from squall.blocks import Block
from squall.wire.messages import Finished, Lease, Leave, Outcome, SliceState


@dataclass(frozen=True, slots=True, kw_only=True)
class DownpourLoop:
    """What the loop of one replica needs to know.

    Attributes:
        n_fetch: fetch every so many minibatches.
        n_push: the usual length of a block [minibatches].
        has_local_steps: move the replica's own parameters between fetches.
        ahead: leases asked for before the last is finished, so that no replica waits for one.
    """

    n_fetch: int
    n_push: int
    has_local_steps: bool
    ahead: int = 1


# Wishes, and what they are answered with ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Compute the gradient of one minibatch and add it to the block's; answered with `Computed`.

    Attributes:
        is_first, is_last: whether it begins the block's sum, and whether it ends it.
        local_step: after it, move the replica's own parameters along this minibatch's gradient.
        minibatches: what a schedule counts at this minibatch [minibatches].
    """

    epoch: int
    position: int
    is_first: bool
    is_last: bool
    local_step: bool
    minibatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The result of one minibatch.

    Attributes:
        loss: its mean loss.
        examples: how many examples it had.
        not_finite: first tensor of the block's gradient that is not finite, if any; said with the last.
        absent: tensors that had no gradient in the whole block; said with the last.
    """

    loss: float
    examples: int
    not_finite: str = ""
    absent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What a push says of the block's gradient."""

    block: Block
    attempt: int
    examples: int
    not_finite: str
    absent: tuple[int, ...]
    based_on: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Push a gradient (if there is one) and fetch (if asked) with all shards; answered with `Exchanged`."""

    gradient: Gradient | None
    fetch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What the shards answered: per slice, its state after the exchange and what became of the push."""

    states: Mapping[int, SliceState]
    outcomes: Mapping[int, Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBlock:
    """Report the last block and ask for another, without waiting; answered with a ticket."""

    finished: Finished | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Wait for the answer to a `NextBlock`; answered with a `Lease` or `Leave`."""

    ticket: int


Wish: TypeAlias = Compute | Exchange | NextBlock | Await
Loop: TypeAlias = Generator[Wish, "Computed | Exchanged | Lease | Leave | int", None]


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
    clock = _FetchClock(loop)
    states = yield from _fetch()
    steps = 0  # minibatches since the fetch
    tickets: deque[int] = deque()
    for _ in range(1 + loop.ahead):
        tickets.append((yield from _ask(None)))

    while isinstance(lease := (yield Await(ticket=tickets.popleft())), Lease):
        if lease.refresh:
            states, steps = (yield from _fetch()), 0
            clock.reset()
        block = lease.block
        based_on = {number: state.version for number, state in states.items()}
        loss_sum, examples = 0.0, 0

        for position in range(block.first, block.stop):
            if clock.is_due_within_block():
                states, steps = (yield from _fetch()), 0
                clock.fetched()
            is_last = position == block.stop - 1
            fetch_follows = clock.count_minibatch(ends_block=is_last)
            computed = yield Compute(
                epoch=block.epoch,
                position=position,
                is_first=position == block.first,
                is_last=is_last,
                local_step=loop.has_local_steps and not fetch_follows,
                minibatches=_minibatches(states) + steps,
            )
            assert isinstance(computed, Computed)
            steps += 1
            loss_sum += computed.loss
            examples += computed.examples

        assert isinstance(computed, Computed)
        gradient = Gradient(
            block=block,
            attempt=lease.attempt,
            examples=examples,
            not_finite=computed.not_finite,
            absent=computed.absent,
            based_on=based_on,
        )
        # After a gradient that was not finite, the replica's own local steps are not to be trusted either.
        must_fetch = fetch_follows or bool(computed.not_finite)
        exchanged = yield Exchange(gradient=gradient, fetch=must_fetch)
        assert isinstance(exchanged, Exchanged)
        if must_fetch:
            states, steps = exchanged.states, 0
            clock.fetched()
        finished = Finished(
            block=block,
            attempt=lease.attempt,
            outcome=_overall(exchanged.outcomes),
            not_finite=computed.not_finite,
            loss_sum=loss_sum,
            examples=examples,
            staleness=_staleness(based_on, exchanged),
        )
        tickets.append((yield from _ask(finished)))


def _fetch() -> Generator[Wish, "Computed | Exchanged | Lease | Leave | int", Mapping[int, SliceState]]:
    exchanged = yield Exchange(gradient=None, fetch=True)
    assert isinstance(exchanged, Exchanged)
    return exchanged.states


def _ask(
    finished: Finished | None,
) -> Generator[Wish, "Computed | Exchanged | Lease | Leave | int", int]:
    ticket = yield NextBlock(finished=finished)
    assert isinstance(ticket, int)
    return ticket


def _minibatches(states: Mapping[int, SliceState]) -> int:
    """What a schedule has counted at the fetched point; slices may differ, the furthest one speaks."""
    return max((state.minibatches for state in states.values()), default=0)


def _staleness(based_on: Mapping[int, int], exchanged: Exchanged) -> float:
    """Mean over the slices that applied the push: version before it, less what it was based on."""
    applied = [number for number, outcome in exchanged.outcomes.items() if outcome is Outcome.APPLIED]
    total = sum(exchanged.states[number].version - 1 - based_on[number] for number in applied)
    return total / len(applied) if applied else 0.0


def _overall(outcomes: Mapping[int, Outcome]) -> Outcome:
    """One word for all slices: the block is done only if every slice has it."""
    if Outcome.REFUSED in outcomes.values():
        return Outcome.REFUSED
    if Outcome.NOT_FINITE in outcomes.values():
        return Outcome.NOT_FINITE
    return Outcome.APPLIED
