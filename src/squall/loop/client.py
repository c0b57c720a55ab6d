"""One user's own loop as a replica: it computes when the user does, and pushes and fetches in between.

What to do when is `squall.replica.downpour.downpour`, the generator that every replica runs. A run's replica is handed
blocks by the coordinator; here each new one begins where the last ended, and its name is (session, sequence): the
session as the block's epoch, the minibatches of the session so far as its positions.
"""

import inspect
import os
import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from squall.blocks import Block, Outcome
from squall.errors import DivergedError, LostError, SquallError
from squall.loop.line import TOLD_S, DoorLine, refuse_other_model
from squall.model.device import CPU
from squall.model.install import Bound
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace
from squall.replica.accrual import BlockGradient, LocalSteps
from squall.replica.downpour import (
    Answer,
    Await,
    Compute,
    Computed,
    DownpourLoop,
    Exchange,
    Exchanged,
    Gradient,
    NextBlock,
    Wish,
    downpour,
    report,
)
from squall.replica.exchange import Reply, TcpExchange
from squall.replica.session import request_of
from squall.rules.rule import Rule
from squall.wire.joining import Farewell
from squall.wire.messages import Finished, Lease, Pushed, SliceState
from squall.wire.waiting import wait

MOST_REFUSED = 3
"""So many gradients in a row that are not finite end the training."""


class LoopClient:
    """Pushes what a model's parameters have as `.grad`, and fetches into the model.

    Args:
        model: overwritten with the servers' parameters.
        line: to the door of the servers.
        n_fetch, n_push: as of `squall.Downpour`.
        local: rule of the model's own steps between fetches; None: none are taken.
        patience_s: how long to wait for servers that do not answer [seconds].

    Attributes:
        refused: gradients that were not finite and changed nothing.
        staleness: of the last push that was applied, mean over slices [updates].
    """

    def __init__(
        self,
        model: nn.Module,
        line: DoorLine,
        *,
        n_fetch: int,
        n_push: int,
        local: Rule | None,
        patience_s: float,
    ) -> None:
        self._line, self._patience_s = line, patience_s
        self._plan = DownpourLoop(n_fetch=n_fetch, n_push=n_push, has_local_steps=local is not None, ahead=0)
        self._space = ParameterSpace.of(model)
        refuse_other_model(self._space, line.layout.space)
        self.parameters = self._space.parameters_of(model)
        self._local = None if local is None else LocalSteps(local, self._space, self.parameters)
        self.refused = 0
        self.staleness = 0.0
        self._refused_in_a_row = 0
        self._error: SquallError | None = None
        self._incarnation = -1
        self._requests = 0
        self._asked: Exchange | None = None  # and not collected yet
        self._unsent: set[int] = set()  # shards that are still to be asked
        self._replies: dict[int, Reply] = {}
        # Of the block that is being computed: its name if it is not cut short, what it is based on, its minibatches.
        self._block: Block
        self._based_on: Mapping[int, int] = {}
        self._computed = 0
        self._wish: Compute | None = None  # what the loop waits for
        self._exchanges: dict[int, TcpExchange] = {}
        # Threads of exchanges would keep these open for ever, if the user only forgets this object.
        weakref.finalize(self, _let_go, os.getpid(), self._exchanges, line).atexit = False
        try:
            self._connect()
            self._begin_session()
            self._restart()
        except BaseException:
            self._disconnect()
            raise

    @property
    def version(self) -> int:
        """Of the parameters that were fetched last: updates that every slice of them had [updates]."""
        return min((state.version for state in self._states.values()), default=0)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self._space.tensors)

    # What the user does ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Take the gradients of one minibatch; push and fetch if that is due.

        Raises:
            LostError: the servers are gone.
            DivergedError: parameters, or three pushes in a row, were not finite.
        """
        wish = self._next_compute()
        if wish.is_first:
            self._gradient.begin()
        self._add(ends=wish.is_last)
        if wish.local_step and self._local is not None:
            self._local.step(wish.minibatches)
        self._computed += 1
        computed = Computed(loss=0.0, examples=0)
        if wish.is_last:
            absent, not_finite = self._gradient.end()
            computed = Computed(loss=0.0, examples=0, absent=absent, not_finite=not_finite)
        self._go_on(computed)

    def flush(self) -> None:
        """Push what is accumulated, if something is, and fetch."""
        self._next_compute()
        if self._computed:
            self._finish_block()

    def fetch(self) -> None:
        """Fetch; what is accumulated is pushed before, for local steps would be lost."""
        self._next_compute()
        if self._computed:
            self._finish_block()
        else:
            self._restart()

    def close(self, *, flush: bool) -> None:
        """Leave. Twice does nothing."""
        try:
            if flush and self._error is None:
                self._next_compute()
                if self._computed:
                    self._push_part()
        finally:
            self._error = self._error or LostError(reason="this optimizer was closed")
            self._disconnect()
            self._line.close()

    def _finish_block(self) -> None:
        try:
            self._push_part()
        except SquallError as error:
            self._error = error
            raise
        self._restart()

    def _push_part(self) -> None:
        """Push a block that ends here, earlier than was planned; the loop begins anew after it."""
        block = Block(0, self._block.epoch, self._block.first, self._block.first + self._computed)
        absent, not_finite = self._gradient.end()
        gradient = Gradient(
            block=block,
            attempt=1,
            examples=0,
            not_finite=not_finite,
            absent=absent,
            buffer=0,
            scale=1.0,
            based_on=self._based_on,
        )
        self._next, self._computed = block.stop, 0
        self._loop = downpour(self._plan)
        self._wish = None
        exchanged = self._exchange(Exchange(gradient=gradient, fetch=False))
        if exchanged is not None:
            self._report(report(gradient, exchanged, loss_sum=0.0))

    @torch.no_grad()
    def _add(self, *, ends: bool) -> None:
        gradients = {index: own.grad for index, own in enumerate(self.parameters) if own.grad is not None}
        self._gradient.use(0, ends=ends)
        for index in self._gradient.large & gradients.keys():
            self._gradient.add(index, gradients.pop(index).to(CPU))
        self._gradient.add_all({index: own.to(CPU) for index, own in gradients.items()})

    # The loop of a replica ------------------------------------------------------------------------------

    def _restart(self) -> None:
        """Begin the loop anew, which fetches first."""
        self._loop = downpour(self._plan)
        self._wish = None
        self._go_on(None)

    def _next_compute(self) -> Compute:
        """What the loop waits for; if an interrupt came in between, that is finished first."""
        if self._error is not None:
            raise self._error
        if self._wish is None:
            done = self._collect() if self._asked is not None else None
            is_new = inspect.getgeneratorstate(self._loop) == inspect.GEN_CREATED
            if done is None or is_new:
                self._restart()
            else:
                self._go_on(done)
        assert self._wish is not None
        return self._wish

    def _go_on(self, answer: Answer | None) -> None:
        """Run the loop until it wants a minibatch computed."""
        self._wish = None
        try:
            wish = next(self._loop) if answer is None else self._loop.send(answer)
            while not isinstance(wish, Compute):
                if (done := self._answer(wish)) is None:
                    self._restart()  # other servers: what was under way means nothing to them
                    return
                wish = self._loop.send(done)
            self._wish = wish
        except SquallError as error:
            self._error = error
            raise

    def _answer(self, wish: Wish) -> Answer | None:
        match wish:
            case Exchange():
                return self._exchange(wish)
            case NextBlock(finished=finished):
                if finished is not None:
                    self._report(finished)
                return 0
            case Await():
                self._block = Block(0, self._line.served.session, self._next, self._next + self._plan.n_push)
                self._next = self._block.stop
                self._computed = 0
                self._based_on = {number: state.version for number, state in self._states.items()}
                return Lease(request=0, block=self._block, attempt=1, refresh=False)
        raise AssertionError(f"a loop without overlap wished for {wish!r}")

    def _report(self, finished: Finished) -> None:
        """Count what became of a block.

        Raises:
            DivergedError: it is not worth going on.
        """
        if finished.not_finite:
            self.refused += 1
            self._refused_in_a_row += 1
            if self._refused_in_a_row == MOST_REFUSED:
                step = _step(finished.block)
                raise DivergedError(tensor=finished.not_finite, step=step, what="the gradient")
            return
        self._refused_in_a_row = 0
        self.staleness = finished.staleness
        if finished.outcome is Outcome.REFUSED:
            raise self._why_refused(finished.block)

    def _why_refused(self, block: Block) -> SquallError:
        farewell = self._line.farewell(TOLD_S)
        if farewell is None or farewell.tensor < 0:
            return LostError(reason=f"the servers at {self._line.address} refused {_step(block)}")
        return self._parted(farewell)

    def _parted(self, farewell: Farewell) -> SquallError:
        if farewell.tensor < 0:
            return LostError(
                reason=f"the servers at {self._line.address} take no more pushes: {farewell.why}"
            )
        name = self._space.tensors[farewell.tensor].name
        return DivergedError(tensor=name, step=farewell.block, what="the update")

    # The shards -----------------------------------------------------------------------------------------

    def _begin_session(self) -> None:
        self._next = 0  # the first position of the next block
        self._states: Mapping[int, SliceState] = {}

    def _connect(self) -> None:
        """Make new connections, and take the model's values from what they fetch."""
        self._incarnation += 1
        self._exchanges |= self._line.connect(
            incarnation=self._incarnation, num_gradients=1, lost_after_s=self._patience_s
        )
        layout = self._line.layout
        views = [exchange.views for exchange in self._exchanges.values()]
        self._gradients = in_order(layout, (view.gradients[0] for view in views))
        self._buffers = [in_order(layout, (view.buffers[number] for view in views)) for number in (0, 1)]
        self._gradient = BlockGradient(layout, [self._gradients], is_one_minibatch=self._plan.n_push == 1)
        self._buffer = 1  # the first fetch goes into the other
        self._bound: Bound | None = None  # to the memory that the parameters had in these places
        self._places: list[tuple[object, ...]] = []

    def _disconnect(self) -> None:
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()

    def _exchange(self, wish: Exchange) -> Exchanged | None:
        """Push or fetch with all shards; None if these are other servers than before."""
        self._ask(wish)
        return self._collect()

    def _ask(self, wish: Exchange) -> None:
        self._requests += 1
        self._asked, self._unsent, self._replies = wish, set(self._exchanges), {}

    def _send(self) -> None:
        assert self._asked is not None
        into = 1 - self._buffer if self._asked.fetch else None
        for shard in sorted(self._unsent):
            slices = tuple(spec.slice for spec in self._line.layout.slices_of(shard))
            self._exchanges[shard].send(request_of(self._asked, self._requests, slices, into))
            self._unsent.remove(shard)

    def _collect(self) -> Exchanged | None:
        """Send what was asked and wait for it; come back to the servers if they were away.

        It may be interrupted anywhere, and called again.
        """
        assert self._asked is not None
        while len(self._replies) < len(self._exchanges):
            self._send()
            try:
                wait(self._exchanges.values(), None)
                for shard, exchange in self._exchanges.items():
                    for reply in exchange.replies():
                        self._replies[shard] = reply
            except LostError as error:
                if not self._come_back(error):
                    self._asked = None
                    return None
                self._ask(self._asked)
        asked, self._asked = self._asked, None
        return self._taken(asked)

    def _taken(self, asked: Exchange) -> Exchanged:
        states: dict[int, SliceState] = {}
        outcomes: dict[int, Outcome] = {}
        for shard, reply in self._replies.items():
            states.update((state.slice, state) for state in reply.states)
            if isinstance(reply, Pushed):
                slices = (spec.slice for spec in self._line.layout.slices_of(shard))
                outcomes.update(zip(slices, reply.outcomes, strict=True))
        if asked.fetch:
            self._buffer = 1 - self._buffer
            self._states = states
            self._install()
        return Exchanged(states=states, outcomes=outcomes)

    def _install(self) -> None:
        """Overwrite the model's parameters with what has been fetched, in the memory that they have."""
        places = [_place(parameter) for parameter in self.parameters]
        if self._bound is None or places != self._places:  # `.data` was set, as by `model.to`
            self._bound = Bound(self.parameters, self._line.layout, self._buffers, copied=True)
            self._places = places
        self._bound.swap_to(self._buffer)
        if self._local is not None:
            self._local.fetched()

    def _come_back(self, error: LostError) -> bool:
        """Wait for servers that were lost; return whether they are those that we knew.

        Raises:
            LostError, DivergedError: they have ended for good, or stay away.
            ConfigError: others are there that do not know us.
        """
        if (farewell := self._line.farewell()) is not None:
            raise self._parted(farewell) from error
        if self._line.why_over() is None:
            raise error
        print(f"lost the servers at {self._line.address}; waiting for them: {error}", flush=True)
        gradients, rule = self._gradients, self._line.served.rule
        self._disconnect()
        is_same = self._line.call_again()
        refuse_other_model(self._space, self._line.layout.space)
        if self._line.served.rule != rule:
            raise LostError(reason=f"the servers at {self._line.address} came back with another rule")
        self._connect()
        if is_same:
            for new, old in zip(self._gradients, gradients, strict=True):
                new.copy_(old)
        else:
            self._begin_session()
            print(f"other servers answer at {self._line.address}: going on with their parameters", flush=True)
        return is_same


def in_order(layout: Layout, parts: Iterable[Mapping[int, Tensor]]) -> list[Tensor]:
    """The vectors of all slices, one after another, out of each shard's."""
    vectors = {number: vector for part in parts for number, vector in part.items()}
    return [vectors[spec.slice] for spec in layout.slices]


def _place(parameter: nn.Parameter) -> tuple[object, ...]:
    return parameter.data_ptr(), parameter.device, parameter.stride()


def _let_go(pid: int, exchanges: dict[int, TcpExchange], line: DoorLine) -> None:
    """End what a client held; not in a fork of its process, which has a copy of everything."""
    if os.getpid() == pid:
        for exchange in exchanges.values():
            exchange.close()
        line.close()


def _step(block: Block) -> str:
    return f"push {block.first} of session {block.epoch}"
