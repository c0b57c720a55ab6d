"""How a shard is connected with its workers: one interface, of which shared memory and TCP are implementations.

Whatever lies between them, the walk of a request is the same: `events` yields it when all of it is there, gradient
included; the server has the machine decide and carries out what it wants; `before_apply`, `write_out` and `answer`
are told as they come; when `answer` returns, the shard has no more to do for this request than to go on calling
`events`.
"""

import contextlib
import select
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeAlias

from squall.errors import RemoteProtocolError
from squall.model.exchange import ExchangePlan
from squall.model.layout import SliceSpec
from squall.shard.events import EVERY_PARTITION, Answer, Apply, Attach, Detach, FromWorker, Worker, WriteOut
from squall.shard.tensors import ShardTensors, WorkerMemory
from squall.wire.connection import Connection
from squall.wire.control import AttachWorker
from squall.wire.memory import SharedArena
from squall.wire.messages import Fetch, Push
from squall.wire.traffic import Counting, TrafficMeter

LineEvent: TypeAlias = Attach | Detach | FromWorker


class Lines(Protocol):
    """All workers of one shard. One thread; nothing here waits.

    Attributes:
        sends_live_values: the values that an answer speaks of leave with `answer`, not with `write_out`.
    """

    sends_live_values: bool

    def fileno(self) -> int:
        """Readable when `events` has something to do."""
        ...

    def events(self) -> Iterator[LineEvent]:
        """Who came, what they ask, who went. Each is to be handled before the next is taken."""
        ...

    def tick(self) -> Iterator[LineEvent]:
        """Time has passed; call it twice a second or so, and handle what it yields as of `events`."""
        ...

    def before_apply(self, effect: Apply) -> None:
        """The slices are about to change."""
        ...

    def write_out(self, effect: WriteOut) -> None:
        """The worker is to have these slices as they are now."""
        ...

    def answer(self, effect: Answer) -> None:
        """Send a reply; to a worker that has gone does nothing."""
        ...

    def drop(self, worker: Worker) -> Iterator[Detach]:
        """Part with a worker that broke the protocol."""
        ...

    def counted(self) -> Iterable[Counting]:
        """What has passed each line so far."""
        ...

    def close(self) -> None: ...


class SharedLines:
    """Workers of this machine, by shared memory: gradients are read, and values written, where the worker is.

    Args:
        specs: the shard's slices.
        tensors: told where each worker's memory is.
        traffic: told of tensors, which no connection sees, and of lines that end.
    """

    sends_live_values = False

    def __init__(self, specs: Iterable[SliceSpec], tensors: ShardTensors, traffic: TrafficMeter) -> None:
        self._specs = tuple(specs)
        self._bytes: Mapping[int, int] = {spec.slice: spec.num_bytes for spec in self._specs}
        self._tensors = tensors
        self._traffic = traffic
        self._workers: dict[int, tuple[Worker, Connection]] = {}  # by descriptor
        self._lines: dict[tuple[int, int], Connection] = {}  # by place
        self._epoll = select.epoll()

    def attach(self, told: AttachWorker, fds: tuple[int, ...]) -> Attach:
        """Take the ends of a worker's connection and memory that the launcher sends."""
        worker = Worker(replica=told.replica, partition=told.partition, incarnation=told.incarnation)
        own = told.partition
        specs = tuple(spec for spec in self._specs if own in (spec.partition, EVERY_PARTITION))
        plan = ExchangePlan(specs, told.num_gradients)
        views = plan.views(SharedArena.attach(fds[1], plan.num_bytes, writable=True))
        connection = Connection.from_fd(fds[0], told.name)
        self._tensors.attach(worker, WorkerMemory(gradients=views.gradients, buffers=views.buffers))
        self._workers[connection.fileno()] = (worker, connection)
        self._lines[worker.place] = connection
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        return Attach(worker=worker)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def events(self) -> Iterator[LineEvent]:
        for fd, _ in self._epoll.poll(0):
            if fd in self._workers:
                yield from self._read(fd)

    def tick(self) -> Iterator[LineEvent]:
        return iter(())

    def before_apply(self, effect: Apply) -> None:
        self._count(effect.sender, effect.slices, is_pushed=True, is_fetched=effect.push.into is not None)

    def write_out(self, effect: WriteOut) -> None:
        self._count(effect.to, effect.slices, is_pushed=False, is_fetched=True)
        self._tensors.write_out(effect)

    def answer(self, effect: Answer) -> None:
        if (line := self._lines.get(effect.to.place)) is not None:
            with contextlib.suppress(ConnectionError):  # its end is read, and told, in its turn
                line.send(effect.message)

    def drop(self, worker: Worker) -> Iterator[Detach]:
        for fd, (other, _) in list(self._workers.items()):
            if other == worker:
                yield from self._end(fd)

    def counted(self) -> Iterable[Counting]:
        return [connection for _, connection in self._workers.values()]

    def close(self) -> None:
        for _, connection in self._workers.values():
            connection.close()
        self._epoll.close()

    def _read(self, fd: int) -> Iterator[LineEvent]:
        worker, connection = self._workers[fd]
        try:
            received = connection.receive()
            if received is not None:
                yield request_of(worker, connection.name, received[0])
                return
        except RemoteProtocolError as error:
            tell_closing(connection.name, error)
        except ConnectionError:
            pass
        yield from self._end(fd)

    def _end(self, fd: int) -> Iterator[Detach]:
        worker, connection = self._workers.pop(fd)
        self._epoll.unregister(fd)
        yield Detach(worker=worker)
        self._traffic.ended(connection)
        if self._lines.get(worker.place) is connection:
            del self._lines[worker.place]
            self._tensors.detach(worker)
        connection.close()

    def _count(self, worker: Worker, slices: tuple[int, ...], *, is_pushed: bool, is_fetched: bool) -> None:
        if (line := self._lines.get(worker.place)) is not None:
            num_bytes = sum(self._bytes[number] for number in slices)
            self._traffic.count_tensors(
                line.name, received=num_bytes * is_pushed, sent=num_bytes * is_fetched
            )


def request_of(worker: Worker, name: str, message: object) -> FromWorker:
    """A worker's message as an event.

    Raises:
        RemoteProtocolError: it is nothing that a worker says to a shard.
    """
    if not isinstance(message, Fetch | Push):
        raise RemoteProtocolError(reason=f"{name} sent a {type(message).__name__} to a shard")
    return FromWorker(sender=worker, message=message)


def tell_closing(name: str, why: object) -> None:
    """Leave a line in the shard's log."""
    print(f"closing the connection of {name}: {why}", flush=True)
