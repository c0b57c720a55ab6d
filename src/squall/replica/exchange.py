"""What a worker shares with one shard: one interface, of which shared memory and TCP are implementations.

Either way the worker has, per slice, gradient vectors that it writes and two parameter buffers that the shard's values
come into. It writes a gradient, sends a `Push` that names the buffers, and may touch neither until the reply has come.
"""

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from squall.errors import ConfigError, LostError, RemoteProtocolError, SquallError
from squall.model.exchange import ExchangePlan, ExchangeViews
from squall.model.layout import Layout
from squall.wire.bulk import Incoming, Outgoing, bytes_of
from squall.wire.connection import CODEC, Connection
from squall.wire.joining import Alive, JoinBulk, JoinCoordinator, JoinShard
from squall.wire.memory import SharedArena
from squall.wire.messages import Fetch, Fetched, Push, Pushed
from squall.wire.stream import StreamChannel
from squall.wire.tcp import START_S, WAITS_TOLD_AFTER_S, Caller, call_coordinator, wake_every
from squall.wire.waiting import wait

Request: TypeAlias = Fetch | Push
Reply: TypeAlias = Fetched | Pushed

LOST_AFTER_S = 60.0
PAIRING_ATTEMPTS = 3
MOST_REPEATS = 8  # of one request, each over a new link
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.25
CLOSE_S = 1.0
SILENT_AFTER_S = 30.0
SILENT_TIMES = 20.0


class Exchange(Protocol):
    """A worker's end. One thread, one request at a time.

    Attributes:
        name: the shard, as traffic and errors call it.
        views: the gradient vectors and parameter buffers, by slice.
    """

    @property
    def name(self) -> str: ...

    @property
    def views(self) -> ExchangeViews: ...

    def send(self, request: Request) -> None:
        """Send a request; returns before it is answered, and over TCP before the gradient has left."""
        ...

    def replies(self) -> list[Reply]:
        """What has come since, without waiting: a fetch's values are in their buffer by then.

        Raises:
            LostError: the shard is gone.
        """
        ...

    def fileno(self) -> int:
        """Readable when `replies` has something to say."""
        ...

    def close(self) -> None: ...


class SharedExchange:
    """An `Exchange` by memory that both processes map.

    Args:
        connection: to the shard.
        arena: the shared memory, of `plan.num_bytes`.
        may_come_back: a shard that is gone may be started anew; then `come_back` is called, and what is not
            answered has to be sent again. Else it is lost.

    Attributes:
        is_gone: the shard is, and has not come back.
    """

    def __init__(
        self, connection: Connection, arena: SharedArena, plan: ExchangePlan, *, may_come_back: bool = False
    ) -> None:
        self._connection = connection
        self._may_come_back = may_come_back
        self.is_gone = False
        self.name = connection.name
        self.views = plan.views(arena)

    @classmethod
    def from_fds(
        cls,
        name: str,
        fds: Sequence[int],
        plan: ExchangePlan,
        *,
        writable: bool = True,
        may_come_back: bool = False,
    ) -> "SharedExchange":
        """Take over the ends that the launcher has made: a connection and memory."""
        arena = SharedArena.attach(fds[1], plan.num_bytes, writable=writable)
        return cls(Connection.from_fd(fds[0], name), arena, plan, may_come_back=may_come_back)

    def send(self, request: Request) -> None:
        try:
            self._connection.send(request)
        except ConnectionError:
            if not self._may_come_back:
                raise  # else `replies` finds out

    def come_back(self, fd: int) -> None:
        """The shard has been started anew, and this is the connection to it."""
        self._connection.close()
        self._connection = Connection.from_fd(fd, self.name)
        self.is_gone = False

    def replies(self) -> list[Reply]:
        if self.is_gone:
            return []
        found = [_reply(self.name, message) for message, _ in self._connection.arrived()]
        if not found and self._connection.is_ended:
            self.is_gone = True
            if self._may_come_back:
                return []
            raise LostError(reason=f"lost its connection to {self.name}")
        return found

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


class TcpExchange:
    """An `Exchange` over two TCP connections, by a thread that sends and receives straight from and into the views.

    A connection that breaks is made anew and the request repeated, a few times: the shard knows by the block whether it
    has had it. One that stays silent for 20 times the longest answer so far, and at least 30 s, counts as broken.

    Args:
        caller: reaches the shard.
        introduction: who we are.
        plan: of the memory that this end has for itself.
        lost_after_s: how long to try to connect again before the shard counts as lost [seconds].

    Raises:
        ConfigError: the shard refuses us for good.
        LostError: it does not answer.
    """

    def __init__(
        self,
        name: str,
        caller: Caller,
        introduction: JoinShard,
        plan: ExchangePlan,
        *,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self.name = name
        self._lost_after_s = lost_after_s
        self._caller = caller
        self._introduction = introduction
        self._specs = plan.specs
        self.views = plan.views(_OwnMemory(plan.num_bytes))
        self._link: _TcpLink | None = self._dial(None)
        self._slowest_s = 0.0
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._done: deque[Reply | SquallError] = deque()
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name=f"exchange-{name}", daemon=True)
        self._thread.start()

    def send(self, request: Request) -> None:
        self._requests.put(request)

    def replies(self) -> list[Reply]:
        with contextlib.suppress(BlockingIOError):
            self._near.recv(64)
        found: list[Reply] = []
        while self._done:
            done = self._done.popleft()
            if isinstance(done, SquallError):
                raise done
            found.append(done)
        return found

    def fileno(self) -> int:
        return self._near.fileno()

    def close(self) -> None:
        """End both connections and the thread. Twice does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._requests.put(None)
        if (link := self._link) is not None:
            link.shut()
        self._thread.join(CLOSE_S)  # unless it is trying to connect again, of which nobody will know
        self._near.close()
        self._far.close()

    # The thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._done.append(self._answered(request))
            except SquallError as error:
                self._done.append(error)
            except Exception as error:  # whoever waits for the reply must not wait for ever
                self._done.append(LostError(reason=f"{self.name}: {error!r}"))
            if self._is_closed:
                break
            self._far.send(b"!")
        if self._link is not None:
            self._link.close()

    def _answered(self, request: Request) -> Reply:
        """Have it answered, over a new link where one breaks."""
        repeats = 0
        while True:
            try:
                if self._link is None:
                    self._link = self._dial_again()
                asked = time.monotonic()
                reply = self._exchange(self._link, request)
                self._slowest_s = max(self._slowest_s, time.monotonic() - asked)
                return reply
            except (OSError, RemoteProtocolError) as error:
                if self._link is not None:
                    self._link.close()
                    self._link = None
                if self._is_closed or repeats == MOST_REPEATS:
                    raise LostError(reason=f"lost its connection to {self.name}: {error}") from error
                print(f"the connection to {self.name} broke, and is made anew: {error}", flush=True)
            time.sleep(min(FIRST_PAUSE_S * 2**repeats, LONGEST_PAUSE_S))
            repeats += 1

    def _dial_again(self) -> "_TcpLink":
        try:
            return self._dial(self._lost_after_s)
        except ConfigError as error:  # we were let in before: a later incarnation of us has come since
            raise LostError(reason=f"{self.name} does not know us any more: {error}") from error

    def _dial(self, patience_s: float | None) -> "_TcpLink":
        for attempt in itertools.count(1):
            control, welcome = self._caller.call(self._introduction, patience_s)
            try:
                bulk, _ = self._caller.call(JoinBulk(link=welcome.link), patience_s)
                break
            except SquallError as error:
                control.close()
                # The first connection broke meanwhile, and its number means nothing any more.
                if attempt == PAIRING_ATTEMPTS or not isinstance(error, ConfigError):
                    raise
        return _TcpLink(self.name, control, bulk)

    def _exchange(self, link: "_TcpLink", request: Request) -> Reply:
        link.expect_within(self._patience_s())
        link.send(request)
        if isinstance(request, Push) and not request.not_finite:
            link.send_tensors(request.request, self._vectors(self.views.gradients[request.buffer]))
        reply = _reply(self.name, link.receive())
        if reply.request != request.request:
            raise RemoteProtocolError(reason=f"expected an answer to {request.request}, got {reply.request}")
        if request.into is not None:
            link.receive_tensors(request.request, self._vectors(self.views.buffers[request.into]))
        return reply

    def _vectors(self, views: dict[int, Tensor]) -> list[memoryview]:
        return [bytes_of(views[spec.slice]) for spec in self._specs]

    def _patience_s(self) -> float:
        return max(SILENT_AFTER_S, SILENT_TIMES * self._slowest_s)


class _TcpLink:
    """Both connections to one shard, blocking; whoever stays silent too long counts as gone."""

    def __init__(self, name: str, control: StreamChannel, bulk: StreamChannel) -> None:
        self._name = name
        self._control = control
        self._bulk = bulk.detach()
        self._bulk.setblocking(True)
        wake_every(self._bulk, WAITS_TOLD_AFTER_S)
        self._patience_s = SILENT_AFTER_S
        self._heard = time.monotonic()
        self._early: Any = None  # an answer that came while something else was waited for

    def expect_within(self, patience_s: float) -> None:
        """A new request begins, which may take so long without a sign of life."""
        self._patience_s, self._heard, self._early = patience_s, time.monotonic(), None

    def send(self, message: Request) -> None:
        self._control.send(CODEC.encode(message))

    def receive(self) -> Any:
        """Wait for a message that is more than a sign of life."""
        while self._early is None:
            self._listen(WAITS_TOLD_AFTER_S)
        return self._early

    def send_tensors(self, request: int, views: Sequence[memoryview]) -> None:
        outgoing = Outgoing(request, views)
        while not outgoing.is_done:
            self._try(lambda: outgoing.send(self._bulk))

    def receive_tensors(self, request: int, views: Sequence[memoryview]) -> None:
        incoming = Incoming(request, views)
        while not incoming.is_done:
            self._try(lambda: incoming.receive(self._bulk, socket.MSG_WAITALL))

    def shut(self) -> None:
        """End both connections under whoever waits for them."""
        for end in (self._control.shut, lambda: self._bulk.shutdown(socket.SHUT_RDWR)):
            with contextlib.suppress(OSError):
                end()

    def close(self) -> None:
        self._control.close()
        self._bulk.close()

    def _try(self, move: Callable[[], int]) -> None:
        try:
            if not move():
                raise ConnectionError("it was closed by the other side")
            self._heard = time.monotonic()
        except BlockingIOError:
            self._listen(0.0)

    def _listen(self, timeout_s: float) -> None:
        """Take a message, if one comes."""
        received = self._control.receive_within(timeout_s)
        if received is not None:
            self._heard = time.monotonic()
            message = CODEC.decode(received[0])
            if not isinstance(message, Alive):
                self._early = message
            return
        if self._control.is_ended:
            raise ConnectionError("it was closed by the other side")
        silent_s = time.monotonic() - self._heard
        if silent_s > self._patience_s:
            raise ConnectionError(f"nothing came for {silent_s:.0f} s")
        if silent_s > WAITS_TOLD_AFTER_S:
            print(f"waits for {self._name} for {silent_s:.0f} s", flush=True)


class _OwnMemory:
    """Memory of this process alone, zeros at first."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8)

    def tensor(self, dtype: torch.dtype, offset: int, numel: int) -> Tensor:
        return self._bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Goes with the last tensor."""


def connect_shards(
    settings: Mapping[str, Any],
    layout: Layout,
    fds: Sequence[int],
    *,
    num_gradients: int,
    is_reader: bool = False,
) -> dict[int, Exchange]:
    """Connect a worker with every shard that holds something.

    Args:
        settings: "name"; "replica", its number; "incarnation", 0 if it is not there; "partition", its own, if the model is
            cut; "shards"; "shards_come_back", if those that are killed are started anew; "tcp": a mapping with "token" and
            "addresses" by role, or nothing for shared memory.
        fds: for shared memory, a connection and memory for each shard.
        num_gradients: sets of gradient vectors.
        is_reader: it never pushes.
    """
    told = settings.get("tcp")
    exchanges: dict[int, Exchange] = {}
    for index, shard in enumerate(settings["shards"]):
        plan = ExchangePlan(layout.slices_of(shard, settings.get("partition")), num_gradients)
        if told is None:
            ends = fds[2 * index : 2 * index + 2]
            exchanges[shard] = SharedExchange.from_fds(
                f"shard{shard}",
                ends,
                plan,
                writable=not is_reader,
                may_come_back=settings.get("shards_come_back", False),
            )
            continue
        me = introduction(
            settings["name"],
            layout,
            shard,
            replica=settings["replica"],
            incarnation=settings.get("incarnation", 0),
        )
        caller = Caller(
            me=me.name,
            peer=f"shard{shard}",
            address=told["addresses"][f"shard{shard}"],
            token=told["token"],
            patience_s=START_S,
        )
        exchanges[shard] = TcpExchange(f"shard{shard}", caller, me, plan)
    return exchanges


def connect_coordinator(settings: Mapping[str, Any], fd: int | None) -> tuple[Connection, int]:
    """Connect a replica with the coordinator; `settings` as of `connect_shards`, `fd` for a Unix socket.

    Returns:
        The connection, and the epoch of the coordinator: "epoch" of `settings`, 0 if it is not there, or a later one.
    """
    if (told := settings.get("tcp")) is None:
        assert fd is not None
        return Connection.from_fd(fd, "coordinator"), settings.get("epoch", 0)
    me = JoinCoordinator(
        role="replica",
        number=settings["replica"],
        incarnation=settings["incarnation"],
        epoch=settings.get("epoch", 0),
    )
    return call_coordinator(settings["name"], me, told)


def wait_for_reply(exchange: Exchange) -> Reply:
    """Wait until the request that was sent is answered.

    Raises:
        LostError: the shard is gone.
    """
    while not (replies := exchange.replies()):
        wait([exchange], None)
    return replies[0]


def introduction(
    name: str, layout: Layout, shard: int, *, replica: int, partition: int = 0, incarnation: int = 0
) -> JoinShard:
    """What a worker says of itself to a shard."""
    specs = layout.slices_of(shard)
    return JoinShard(
        name=name,
        replica=replica,
        partition=partition,
        incarnation=incarnation,
        schema=layout.space.schema_hash,
        num_slices=len(specs),
        num_bytes=sum(spec.num_bytes for spec in specs),
    )


def _reply(name: str, message: object) -> Reply:
    if not isinstance(message, Fetched | Pushed):
        raise RemoteProtocolError(reason=f"{name} sent a {type(message).__name__} to a worker")
    return message
