"""What a replica must do, said a second time and in another way: as a plain list of steps.

`ReplicaRules` predicts every effect of a `ReplicaSession` that runs `downpour`; it shares nothing with them
but the messages. When a fetch is due it says with a formula instead of a running remainder.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from squall.blocks import Block, Outcome
from squall.replica.downpour import Compute, Computed, DownpourLoop
from squall.replica.session import (
    FromCoordinator,
    FromShard,
    Quit,
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
    SliceState,
)


@dataclass
class _Work:
    """The block in hand."""

    lease: Lease
    based_on: dict[int, int]
    done: int = 0
    losses: list[float] = field(default_factory=list)
    examples: int = 0
    last: Computed | None = None
    pushed: Finished | None = None

    @property
    def block(self) -> Block:
        return self.lease.block


class ReplicaRules:
    """Follows one life of one replica event by event."""

    def __init__(self, loop: DownpourLoop, slices: dict[int, tuple[int, ...]]) -> None:
        self.loop = loop
        self.slices = slices
        self.buffer = 1
        self.number = 0
        self.num_dropped = 0
        self.open: dict[int, Fetch | Push] = {}
        self.fetches = False
        self.heard: dict[int, SliceState] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.states: dict[int, SliceState] = {}
        self.since_fetch = 0  # minibatches
        self.counted = 0  # minibatches, or blocks, since fetches were last counted from anew
        self.asks: dict[int, Ask] = {}
        self.answers: dict[int, Lease | Leave] = {}
        self.tickets: deque[int] = deque()
        self.awaited: int | None = None
        self.work: _Work | None = None
        self.recalled: str | None = None
        self.has_begun = self.has_joined = self.has_left = self.is_computing = False

    def see(self, machine: ReplicaSession, event: Any, effects: tuple[Any, ...]) -> None:
        expected = self._expect(event)
        assert list(effects) == expected, f"replica, {event}: {effects} instead of {expected}"
        assert machine.num_dropped == self.num_dropped
        assert machine.buffer == self.buffer

    # Events ---------------------------------------------------------------------------------------------

    def _expect(self, event: Any) -> list[Any]:
        if self.has_left:
            return self._drop()
        match event:
            case Started():
                self.has_begun = True
                return self._exchange(None, fetch=True)
            case Tick():
                again: list[Any] = [ToShard(shard=shard, message=open) for shard, open in self.open.items()]
                return again + [ToCoordinator(message=ask) for ask in self.asks.values()]
            case Computed():
                return self._computed(event)
            case FromShard():
                return self._heard(event)
            case FromCoordinator(message=Recall(why=why)):
                if self.is_computing or self.open:
                    self.recalled = why
                    return []
                return self._quit(why)
            case FromCoordinator(message=Lease() | Leave() as answer):
                if self.asks.pop(answer.request, None) is None:
                    return self._drop()
                self.answers[answer.request] = answer
                return self._take_up() if answer.request == self.awaited else []
        raise AssertionError(f"nobody sends {event}")

    def _drop(self) -> list[Any]:
        self.num_dropped += 1
        return []

    def _heard(self, event: FromShard) -> list[Any]:
        request = self.open.get(event.shard)
        if request is None or event.message.request != request.request:
            return self._drop()
        del self.open[event.shard]
        self.heard |= {state.slice: state for state in event.message.states}
        if isinstance(event.message, Pushed):
            self.outcomes |= dict(zip(self.slices[event.shard], event.message.outcomes, strict=True))
        return [] if self.open else self._exchanged()

    # Steps ----------------------------------------------------------------------------------------------

    def _exchange(self, push: _Work | None, *, fetch: bool) -> list[Any]:
        if self.recalled is not None:
            return self._quit(self.recalled)
        self.fetches, self.heard, self.outcomes = fetch, {}, {}
        if not self.slices:
            return self._exchanged()
        self.number += 1
        for shard in self.slices:
            self.open[shard] = self._request(shard, push, fetch)
        return [ToShard(shard=shard, message=message) for shard, message in self.open.items()]

    def _request(self, shard: int, push: _Work | None, fetch: bool) -> Fetch | Push:
        into = (0 if self.buffer else 1) if fetch else None
        if push is None:
            assert into is not None
            return Fetch(request=self.number, into=into)
        assert push.last is not None
        return Push(
            request=self.number,
            block=push.block,
            attempt=push.lease.attempt,
            minibatches=push.block.stop - push.block.first,
            examples=push.examples,
            based_on=tuple(push.based_on[number] for number in self.slices[shard]),
            absent=push.last.absent,
            not_finite=push.last.not_finite,
            into=into,
        )

    def _exchanged(self) -> list[Any]:
        effects: list[Any] = []
        if self.fetches:
            self.states, self.since_fetch = self.heard, 0
            if self.slices:
                self.buffer = 0 if self.buffer else 1
                effects.append(Swap(buffer=self.buffer))
        if not self.has_joined:
            self.has_joined = True
            return effects + self._ask([None] * (1 + self.loop.ahead))
        assert self.work is not None
        if self.work.done == len(range(self.work.block.first, self.work.block.stop)):
            return effects + self._ask([self._report(self.work)])
        if not self.work.done and not self.work.based_on:
            self.work.based_on = {number: state.version for number, state in self.states.items()}
        return effects + self._compute()

    def _report(self, work: _Work) -> Finished:
        assert work.last is not None
        applied = [number for number, outcome in self.outcomes.items() if outcome is Outcome.APPLIED]
        behind = [self.heard[number].version - 1 - work.based_on[number] for number in applied]
        verdict = Outcome.APPLIED
        for worse in (Outcome.NOT_FINITE, Outcome.REFUSED):
            if worse in self.outcomes.values():
                verdict = worse
        return Finished(
            block=work.block,
            attempt=work.lease.attempt,
            outcome=verdict,
            not_finite=work.last.not_finite,
            loss_sum=sum(work.losses),
            examples=work.examples,
            staleness=sum(behind) / len(behind) if behind else 0.0,
        )

    def _ask(self, reports: list[Finished | None]) -> list[Any]:
        self.work = None
        effects = []
        for report in reports:
            self.number += 1
            ask = self.asks[self.number] = Ask(request=self.number, finished=report)
            self.tickets.append(self.number)
            effects.append(ToCoordinator(message=ask))
        if self.recalled is not None:
            return effects + self._quit(self.recalled)
        self.awaited = self.tickets.popleft()
        return effects + (self._take_up() if self.awaited in self.answers else [])

    def _take_up(self) -> list[Any]:
        assert self.awaited is not None
        answer = self.answers.pop(self.awaited)
        self.awaited = None
        if isinstance(answer, Leave):
            return self._quit("the work is done")
        if answer.refresh:
            self.counted = 0
            self.work = _Work(answer, {})
            return self._exchange(None, fetch=True)
        self.work = _Work(answer, {number: state.version for number, state in self.states.items()})
        return self._compute()

    @property
    def _is_within(self) -> bool:
        return self.loop.n_fetch < self.loop.n_push

    def _is_fetch_due(self) -> bool:
        """Whether a fetch falls right after what has been counted last."""
        if self._is_within:
            return self.counted > 0 and self.counted % self.loop.n_fetch == 0
        now, before = (
            blocks * self.loop.n_push // self.loop.n_fetch for blocks in (self.counted, self.counted - 1)
        )
        return now > before

    def _compute(self) -> list[Any]:
        """The next minibatch of the block in hand."""
        if self.recalled is not None:
            return self._quit(self.recalled)
        assert self.work is not None
        work, block = self.work, self.work.block
        if self._is_within and self._is_fetch_due() and self.since_fetch > 0:
            return self._exchange(None, fetch=True)
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
                local_step=self.loop.has_local_steps and not fetch_follows,
                minibatches=max((s.minibatches for s in self.states.values()), default=0) + self.since_fetch,
            )
        ]

    def _computed(self, computed: Computed) -> list[Any]:
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
        is_due = self._is_fetch_due()
        if computed.not_finite and not is_due:
            self.counted = 0
        return self._exchange(work, fetch=is_due or bool(computed.not_finite))

    def _quit(self, why: str) -> list[Any]:
        self.has_left = True
        self.open.clear()
        return [ToCoordinator(message=Goodbye()), Quit(why=why)]
