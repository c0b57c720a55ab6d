"""One replica's side of the protocol, without any I/O: turns the wishes of its loop into messages.

A replica of several workers has one session, its lead's: the others send and receive what it says.

Every request is kept until its answer has come, and sent again at each `Tick` that finds it still open. The
answer to a request that is not open is late and is dropped.
"""

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, TypeAlias

from squall.blocks import Block
from squall.machines import Machine
from squall.nouns import Noun
from squall.replica.downpour import (
    Await,
    Begin,
    Collect,
    Compute,
    Computed,
    Exchange,
    Exchanged,
    Look,
    Loop,
    NextBlock,
    Recalled,
)
from squall.wire.messages import (
    Ask,
    Fetch,
    Fetched,
    Finished,
    Goodbye,
    Lease,
    Leave,
    Outcome,
    Push,
    Pushed,
    Recall,
    Resume,
    SliceState,
)

REMEMBERED_REPORTS = 64
"""Reports that a coordinator which is lost may not have passed on."""


class ShardSlices(Noun, frozen=True, kw_only=True):
    """A shard that one worker of this replica talks to, and the slices of its partition that the shard holds, in order."""

    shard: int
    slices: tuple[int, ...]
    partition: int = 0


# Events -------------------------------------------------------------------------------------------------


class Started(Noun, frozen=True, kw_only=True):
    """All connections are open: begin."""


class FromShard(Noun, frozen=True, kw_only=True):
    """A shard's reply arrived, at the worker of this partition."""

    shard: int
    message: Fetched | Pushed
    partition: int = 0


class FromCoordinator(Noun, frozen=True, kw_only=True):
    """A message of the coordinator arrived."""

    message: Lease | Leave | Recall


class Reconnected(Noun, frozen=True, kw_only=True):
    """A shard that was killed has been started anew: what it has not answered this partition's worker is sent again."""

    shard: int
    partition: int = 0


class Redirected(Noun, frozen=True, kw_only=True):
    """The coordinator was lost, and another is there: it is told what this one holds, and asked again."""


class Tick(Noun, frozen=True, kw_only=True):
    """Time has passed: send again what has not been answered since the last tick."""


SessionEvent: TypeAlias = Started | FromShard | FromCoordinator | Computed | Reconnected | Redirected | Tick


# Effects (and `Compute`, which is the loop's) -----------------------------------------------------------


class ToShard(Noun, frozen=True, kw_only=True):
    """Have the worker of this partition send a request to a shard."""

    shard: int
    message: Fetch | Push
    partition: int = 0


class ToCoordinator(Noun, frozen=True, kw_only=True):
    """Send a message to the coordinator."""

    message: Ask | Goodbye | Resume


class Swap(Noun, frozen=True, kw_only=True):
    """Let the model's parameters lie in this one of the two parameter buffers from now on."""

    buffer: int


class Quit(Noun, frozen=True, kw_only=True):
    """Nothing is left to do: close the connections and end."""

    why: str


SessionEffect: TypeAlias = Compute | ToShard | ToCoordinator | Swap | Quit


class Phase(Enum):
    READY = "ready"
    COMPUTING = "computing"
    EXCHANGING = "exchanging"
    """The loop waits for shards that have not answered yet."""
    AWAITING = "awaiting"
    """Nothing to compute: the coordinator has not answered yet."""
    LEFT = "left"


class ReplicaSession(Machine):
    """Decides for one replica, whose lead it is: one event in, effects out.

    Args:
        loop: the strategy's generator, not started.
        shards: for each of its workers, the shards that hold slices of the worker's partition.
    """

    TABLE: ClassVar[Mapping[tuple[Enum, type], str]] = {
        (Phase.READY, Started): "_start",
        (Phase.READY, Recall): "_recall_idle",
        (Phase.READY, Reconnected): "_reconnected",
        (Phase.READY, Redirected): "_redirected",
        (Phase.READY, Tick): "_tick",
        (Phase.COMPUTING, Computed): "_computed",
        (Phase.COMPUTING, Fetched): "_exchanged",
        (Phase.COMPUTING, Pushed): "_exchanged",
        (Phase.COMPUTING, Lease): "_answered",
        (Phase.COMPUTING, Leave): "_answered",
        (Phase.COMPUTING, Recall): "_recall",
        (Phase.COMPUTING, Reconnected): "_reconnected",
        (Phase.COMPUTING, Redirected): "_redirected",
        (Phase.COMPUTING, Tick): "_tick",
        (Phase.EXCHANGING, Fetched): "_exchanged",
        (Phase.EXCHANGING, Pushed): "_exchanged",
        (Phase.EXCHANGING, Lease): "_answered",
        (Phase.EXCHANGING, Leave): "_answered",
        (Phase.EXCHANGING, Recall): "_recall",
        (Phase.EXCHANGING, Reconnected): "_reconnected",
        (Phase.EXCHANGING, Redirected): "_redirected",
        (Phase.EXCHANGING, Tick): "_tick",
        (Phase.AWAITING, Fetched): "_exchanged",
        (Phase.AWAITING, Pushed): "_exchanged",
        (Phase.AWAITING, Lease): "_answered",
        (Phase.AWAITING, Leave): "_answered",
        (Phase.AWAITING, Recall): "_recall_idle",
        (Phase.AWAITING, Reconnected): "_reconnected",
        (Phase.AWAITING, Redirected): "_redirected",
        (Phase.AWAITING, Tick): "_tick",
        (Phase.LEFT, Started): "_late",
        (Phase.LEFT, Fetched): "_late",
        (Phase.LEFT, Pushed): "_late",
        (Phase.LEFT, Lease): "_late",
        (Phase.LEFT, Leave): "_late",
        (Phase.LEFT, Recall): "_late",
        (Phase.LEFT, Reconnected): "_late",
        (Phase.LEFT, Redirected): "_late",
        (Phase.LEFT, Tick): "_late",
    }

    def __init__(self, *, loop: Loop, shards: Sequence[ShardSlices]) -> None:
        super().__init__(Phase.READY)
        self.buffer = 1  # the parameter buffer in use; the first fetch goes into the other
        self.num_dropped = 0
        self._loop = loop
        self._shards = {(shard.partition, shard.shard): shard.slices for shard in shards}
        self._requests = 0
        self._open_exchange: dict[tuple[int, int], Fetch | Push] = {}  # by partition and shard
        self._exchange_fetches = False
        self._is_begun = False  # an exchange that the loop has not collected yet
        self._states: dict[int, SliceState] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._lives: dict[int, int] = {}  # by shard: the earliest incarnation that answered
        self._open_asks: dict[int, Ask] = {}  # by number
        self._answers: dict[int, Lease | Leave] = {}  # that the loop has not taken yet
        self._held: dict[Block, int] = {}  # leased and not reported, with the attempt
        self._reported: deque[Finished] = deque(maxlen=REMEMBERED_REPORTS)  # and answered
        self._awaited: int | None = None
        self._recalled: str | None = None

    def check_invariants(self) -> None:
        assert self.phase is not Phase.EXCHANGING or self._open_exchange, "it waits for an answer"
        assert not self._open_exchange or self._is_begun
        assert (self.phase is Phase.AWAITING) == (self._awaited is not None)
        assert not set(self._open_asks) & set(self._answers)
        has_ended = inspect.getgeneratorstate(self._loop) == inspect.GEN_CLOSED
        assert (self.phase is Phase.LEFT) == has_ended, "the loop ends with its session"

    @property
    def awaits(self) -> dict[int, int]:
        """Shards without whose answers the loop does not go on, with the number of the request."""
        if self.phase is not Phase.EXCHANGING:
            return {}
        return {shard: message.request for (_, shard), message in self._open_exchange.items()}

    # The loop's wishes ----------------------------------------------------------------------------------

    def _start(self, event: Started) -> tuple[SessionEffect, ...]:
        return self._run(lambda: next(self._loop))

    def _run(self, advance: Callable[[], Any]) -> tuple[SessionEffect, ...]:
        """Advance the loop until it wishes for something that must be waited for."""
        effects: list[SessionEffect] = []
        while True:
            try:
                wish = advance()
            except StopIteration:
                return (*effects, *self._quit(self._recalled or "the work is done"))
            if self._recalled is not None and isinstance(wish, Compute | Exchange | Begin | Await):
                advance = self._recall_loop
                continue
            match wish:
                case NextBlock(finished=finished):
                    ask = Ask(request=self._number(), finished=finished)
                    self._open_asks[ask.request] = ask
                    if finished is not None:
                        self._held.pop(finished.block, None)
                    effects.append(ToCoordinator(message=ask))
                    answer: Any = ask.request
                case Await(ticket=ticket) if ticket in self._answers:
                    answer = self._answers.pop(ticket)
                case Await(ticket=ticket):
                    self.phase, self._awaited = Phase.AWAITING, ticket
                    return tuple(effects)
                case Compute():
                    self.phase = Phase.COMPUTING
                    return (*effects, wish)
                case Look(ticket=ticket):
                    answer = int(ticket in self._answers)
                case Begin(exchange=exchange):
                    effects.extend(self._begin(exchange))
                    answer = 0
                case Exchange() | Collect():
                    if isinstance(wish, Exchange):
                        effects.extend(self._begin(wish))
                    if self._open_exchange:
                        self.phase = Phase.EXCHANGING
                        return tuple(effects)
                    done, swaps = self._collected()
                    effects.extend(swaps)
                    answer = done
            advance = _sender(self._loop, answer)

    def _number(self) -> int:
        self._requests += 1
        return self._requests

    def _quit(self, why: str) -> tuple[SessionEffect, ...]:
        self.phase, self._awaited = Phase.LEFT, None
        return (ToCoordinator(message=Goodbye()), Quit(why=why))

    # Exchanges with the shards --------------------------------------------------------------------------

    def _begin(self, wish: Exchange) -> tuple[SessionEffect, ...]:
        assert not self._is_begun, "one exchange at a time"
        self._is_begun = True
        self._exchange_fetches = wish.fetch and bool(self._shards)
        self._states, self._outcomes, self._lives = {}, {}, {}
        if not self._shards:
            return ()
        request = self._number()
        into = 1 - self.buffer if wish.fetch else None
        for line, slices in self._shards.items():
            self._open_exchange[line] = request_of(wish, request, slices, into)
        return self._requests_open()

    def _exchanged(self, event: FromShard) -> tuple[SessionEffect, ...]:
        line = event.partition, event.shard
        open_request = self._open_exchange.get(line)
        if open_request is None or open_request.request != event.message.request:
            return self._late(event)
        del self._open_exchange[line]
        reply = event.message
        # What one of its workers was told by an earlier start may be gone when a later one answers another of them.
        self._lives[event.shard] = min(self._lives.get(event.shard, reply.incarnation), reply.incarnation)
        self._states.update((state.slice, state) for state in reply.states)
        if isinstance(reply, Pushed):
            slices = self._shards[line]
            self._outcomes.update(zip(slices, reply.outcomes, strict=True))
        if self._open_exchange or self.phase is not Phase.EXCHANGING:
            return ()
        done, swaps = self._collected()
        return swaps + self._run(_sender(self._loop, done))

    def _collected(self) -> tuple[Exchanged, tuple[SessionEffect, ...]]:
        """What all shards answered; the fetched parameters are taken up now, between two minibatches."""
        self._is_begun = False
        lives = tuple(self._lives.items())
        done = Exchanged(states=self._states, outcomes=self._outcomes, lives=lives)
        if not self._exchange_fetches:
            return done, ()
        self.buffer = 1 - self.buffer
        return done, (Swap(buffer=self.buffer),)

    def _computed(self, event: Computed) -> tuple[SessionEffect, ...]:
        return self._run(_sender(self._loop, event))

    # The coordinator ------------------------------------------------------------------------------------

    def _answered(self, event: FromCoordinator) -> tuple[SessionEffect, ...]:
        message = event.message
        assert isinstance(message, Lease | Leave)
        if (ask := self._open_asks.pop(message.request, None)) is None:
            return self._late(event)
        if ask.finished is not None:
            self._reported.append(ask.finished)
        if isinstance(message, Lease):
            self._held[message.block] = message.attempt
        if message.request != self._awaited:
            self._answers[message.request] = message
            return ()
        self._awaited = None
        return self._run(_sender(self._loop, message))

    def _recall(self, event: FromCoordinator) -> tuple[SessionEffect, ...]:
        """Leave as soon as what is pushed has been acknowledged."""
        assert isinstance(event.message, Recall)
        self._recalled = event.message.why
        return ()

    def _recall_idle(self, event: FromCoordinator) -> tuple[SessionEffect, ...]:
        assert isinstance(event.message, Recall)
        self._recalled = event.message.why
        if self.phase is Phase.READY:
            self._loop.close()
            return self._quit(self._recalled)
        return self._run(self._recall_loop)

    def _recall_loop(self) -> Any:
        """Let the loop collect and report what it has begun; nothing else."""
        return self._loop.throw(Recalled())

    def _reconnected(self, event: Reconnected) -> tuple[SessionEffect, ...]:
        """Whether it had been applied, the shard knows by the block."""
        line = event.partition, event.shard
        return tuple(
            request for request in self._requests_open() if (request.partition, request.shard) == line
        )

    def _redirected(self, event: Redirected) -> tuple[SessionEffect, ...]:
        resume = Resume(leases=tuple(self._held.items()), done=tuple(self._reported))
        asks = (ToCoordinator(message=ask) for ask in self._open_asks.values())
        return (ToCoordinator(message=resume), *asks)

    def _tick(self, event: Tick) -> tuple[SessionEffect, ...]:
        asks = (ToCoordinator(message=ask) for ask in self._open_asks.values())
        return (*self._requests_open(), *asks)

    def _requests_open(self) -> tuple[ToShard, ...]:
        """What no shard has answered yet."""
        return tuple(
            ToShard(shard=shard, message=message, partition=partition)
            for (partition, shard), message in self._open_exchange.items()
        )

    def _late(self, event: Any) -> tuple[SessionEffect, ...]:
        self.num_dropped += 1
        return ()


def _sender(loop: Loop, answer: Any) -> Callable[[], Any]:
    return lambda: loop.send(answer)


def request_of(wish: Exchange, request: int, slices: tuple[int, ...], into: int | None) -> Fetch | Push:
    """What one shard is sent for an exchange.

    Args:
        slices: that it holds, in order.
        into: the parameter buffer to fetch into; None: no fetch.
    """
    gradient = wish.gradient
    if gradient is None:
        assert into is not None
        return Fetch(request=request, into=into)
    return Push(
        request=request,
        block=gradient.block,
        attempt=gradient.attempt,
        minibatches=gradient.block.num_minibatches,
        examples=gradient.examples,
        based_on=tuple(gradient.based_on[number] for number in slices),
        absent=gradient.absent,
        not_finite=gradient.not_finite,
        buffer=gradient.buffer,
        scale=gradient.scale,
        into=into,
        incarnation=max((gradient.incarnations.get(number, 0) for number in slices), default=0),
    )
