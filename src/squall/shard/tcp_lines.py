"""Workers that a shard reaches over TCP: two connections each, one for messages and one for tensors.

Walk of a push: its message comes on the first connection; when a staging set is free, its gradient is read from the
second, a piece at every event; when it is whole, and the slices may change, the machine gets the push. The answer goes
out on the first connection, the values on the second, straight from the live slices.

A gradient that has no staging set yet waits in the sender: its bytes are not read, and TCP holds the sender back. So a
shard has at most `MOST_STAGED` gradients and `MOST_COPIES` copies of its slices, whoever is slow. Who holds one of these
while others wait longer than `Patience` allows is dropped; it may connect again and repeat its request.
"""

import contextlib
import math
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

import msgspec
import torch
from torch import Tensor

from squall.errors import RemoteProtocolError
from squall.model.layout import Layout, SliceSpec
from squall.shard.events import Answer, Apply, Attach, Detach, FromWorker, Worker, WriteOut
from squall.shard.lines import LineEvent, request_of, tell_closing
from squall.shard.staging import Readers, VectorPool, Vectors
from squall.shard.tensors import ShardTensors, WorkerMemory
from squall.wire.bulk import Incoming, Outgoing, bytes_of
from squall.wire.connection import Connection
from squall.wire.joining import Alive, JoinBulk, JoinShard
from squall.wire.listener import HELLO_S, Door, Guest
from squall.wire.messages import Fetch, Push
from squall.wire.traffic import Counting, TrafficMeter

MOST_STAGED = 4
MOST_COPIES = 4
ALIVE_EVERY_S = 5.0

_HUNG_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


@dataclass
class Patience:
    """How long others wait for one who is slow: some times what half of the last transfers took, and a while at least.

    >>> patience = Patience()
    >>> for transfer_s in (1.0, 0.9, 60.0):
    ...     patience.learn(transfer_s)
    >>> patience.seconds
    8.0
    """

    floor_s: float = 2.0
    times: float = 8.0
    last_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    @property
    def seconds(self) -> float:
        return max(self.floor_s, self.times * median(self.last_s or (0.0,)))

    def learn(self, transfer_s: float) -> None:
        self.last_s.append(transfer_s)


class _Link:
    """Both connections of one worker, and what it is about.

    Attributes:
        number: names the link to its second connection.
        request: that has not been answered, or whose values are not all sent.
        staged: where its gradient is kept, from admission until the push is settled.
        since: the transfer that goes on, or the wait for one, began then.
    """

    def __init__(self, worker: Worker, control: Connection, number: int, now: float) -> None:
        self.worker, self.control, self.number = worker, control, number
        self.name = control.name
        self.bulk: socket.socket | None = None
        self.bulk_received = self.bulk_sent = 0
        self.request: Fetch | Push | None = None
        self.staged: Vectors | None = None
        self.incoming: Incoming | None = None
        self.outgoing: Outgoing | None = None
        self.since = now
        self.told_alive = now

    def counts(self) -> tuple[int, int, int, int]:
        received, messages_received, sent, messages_sent = self.control.counts()
        return received + self.bulk_received, messages_received, sent + self.bulk_sent, messages_sent

    def rate(self, now: float) -> float:
        """Bytes per second of the transfer that goes on."""
        going = self.incoming or self.outgoing
        return 0.0 if going is None else going.body.num_done / max(now - self.since, 1e-3)


class TcpLines:
    """An implementation of `squall.shard.lines.Lines`.

    Args:
        shard: its number.
        layout: what each worker must have, too.
        tensors: told where a push's gradient lies.
        door: of this shard.
        traffic: told of lines that end.
    """

    sends_live_values = True

    def __init__(
        self,
        *,
        shard: int,
        layout: Layout,
        tensors: ShardTensors,
        door: Door,
        traffic: TrafficMeter,
        most_staged: int = MOST_STAGED,
        most_copies: int = MOST_COPIES,
    ) -> None:
        self._specs: tuple[SliceSpec, ...] = layout.slices_of(shard)
        self._schema = layout.space.schema_hash
        self._tensors = tensors
        self._door = door
        self._traffic = traffic
        self._staging = VectorPool(self._specs, most_staged)
        live = {spec.slice: tensors.states[spec.slice].params for spec in self._specs}
        self._readers = Readers(self._specs, live, most_copies)
        self._patience = Patience()
        self._links: dict[tuple[int, int], _Link] = {}  # by place
        self._by_fd: dict[int, _Link] = {}
        self._newest: dict[tuple[int, int], int] = {}  # incarnation, by place
        self._waiting: deque[_Link] = deque()  # for a staging set
        self._whole: deque[_Link] = deque()  # gradients that are all here
        self._epoll = select.epoll()
        self._epoll.register(door.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def sets_made(self) -> tuple[int, int]:
        """Staging sets and copies that take memory."""
        return self._staging.num_made, self._readers.copies.num_made

    # What arrives ---------------------------------------------------------------------------------------

    def events(self) -> Iterator[LineEvent]:
        for fd, mask in self._epoll.poll(0):
            if fd == self._door.fileno():
                for guest in self._door.step():
                    yield from self._let_in(guest)
            elif (link := self._by_fd.get(fd)) is not None:
                yield from self._guarded(link, fd, mask)
        yield from self._go_on()

    def _guarded(self, link: _Link, fd: int, mask: int) -> Iterator[LineEvent]:
        """Whatever a peer does ends with its own connection."""
        try:
            if fd == link.control.fileno():
                yield from self._read(link)
            else:
                yield from self._move(link, mask)
            return
        except RemoteProtocolError as error:
            self._traffic.refused["protocol"] += 1
            tell_closing(link.name, error)
        except OSError:
            pass
        yield from self._end(link)

    def _let_in(self, guest: Guest) -> Iterator[LineEvent]:
        told = guest.introduction
        if isinstance(told, JoinBulk):
            yield from self._pair(guest, told.link)
        elif isinstance(told, JoinShard):
            yield from self._join(guest, told)

    def _join(self, guest: Guest, told: JoinShard) -> Iterator[LineEvent]:
        worker = Worker(replica=told.replica, partition=told.partition, incarnation=told.incarnation)
        if (why := self._why_not(told, worker)) is not None:
            guest.turn_away(why)
            return
        if (before := self._links.get(worker.place)) is not None:
            yield from self._end(before)  # the same worker has connected again
        number = secrets.randbits(63)
        control = Connection(guest.stream(self._epoll, number), told.name)
        link = _Link(worker, control, number, time.monotonic())
        self._links[worker.place] = link
        self._newest[worker.place] = worker.incarnation
        self._by_fd[control.fileno()] = link
        self._epoll.register(control.fileno(), select.EPOLLIN)

    def _why_not(self, told: JoinShard, worker: Worker) -> str | None:
        mine = (self._schema, len(self._specs), sum(spec.num_bytes for spec in self._specs))
        theirs = (told.schema, told.num_slices, told.num_bytes)
        if theirs != mine:
            return f"expected the model's (schema, slices, bytes) to be {mine}, but got {theirs}"
        if worker.incarnation < (newest := self._newest.get(worker.place, 0)):
            return f"expected incarnation {newest} of {told.name:.50} or later, but got {worker.incarnation}"
        return None

    def _pair(self, guest: Guest, number: int) -> Iterator[LineEvent]:
        link = next((link for link in self._links.values() if link.number == number), None)
        if link is None or link.bulk is not None:
            guest.turn_away("no link has this number and lacks a connection")
            return
        link.bulk = guest.welcome()
        link.bulk_received, link.bulk_sent = guest.bytes_received, guest.bytes_sent
        self._by_fd[link.bulk.fileno()] = link
        self._epoll.register(link.bulk.fileno(), _HUNG_UP)
        yield Attach(worker=link.worker)

    def _read(self, link: _Link) -> Iterator[LineEvent]:
        for message, _ in link.control.arrived():
            request = request_of(link.worker, link.name, message)
            if link.bulk is None or link.request is not None:
                raise RemoteProtocolError(reason=f"a {type(message).__name__} came before its turn")
            link.request = request.message
            if isinstance(request.message, Push) and not request.message.not_finite:
                link.since = time.monotonic()
                self._waiting.append(link)
            else:
                yield request
        if link.control.is_ended:
            yield from self._end(link)

    def _move(self, link: _Link, mask: int) -> Iterator[LineEvent]:
        """Receive or send some of a transfer."""
        if link.incoming is not None and mask & select.EPOLLIN:
            self._receive(link, link.incoming)
        elif link.outgoing is not None and mask & select.EPOLLOUT:
            self._send(link, link.outgoing)
        elif mask & _HUNG_UP:
            yield from self._end(link)

    def _receive(self, link: _Link, incoming: Incoming) -> None:
        assert link.bulk is not None
        with contextlib.suppress(BlockingIOError):
            count = incoming.receive(link.bulk)
            if not count:
                raise ConnectionError
            link.bulk_received += count
        if incoming.is_done:
            link.incoming = None
            self._watch(link)
            self._learn(link)
            self._whole.append(link)

    def _send(self, link: _Link, outgoing: Outgoing) -> None:
        assert link.bulk is not None
        with contextlib.suppress(BlockingIOError):
            link.bulk_sent += outgoing.send(link.bulk)
        if outgoing.is_done:
            self._readers.end(outgoing)
            link.outgoing = link.request = None
            self._learn(link)
        self._watch(link)

    # What may go on -------------------------------------------------------------------------------------

    def _go_on(self) -> Iterator[LineEvent]:
        while self._waiting and self._staging.has_room:
            self._stage(self._waiting.popleft())
        while self._whole and self._readers.may_change:
            yield from self._deliver(self._whole.popleft())
            while self._waiting and self._staging.has_room:
                self._stage(self._waiting.popleft())

    def _stage(self, link: _Link) -> None:
        """Admit a push: from now on its gradient is read."""
        assert link.request is not None
        link.staged = self._staging.take()
        views = [bytes_of(link.staged[spec.slice]) for spec in self._specs]
        link.incoming = Incoming(link.request.request, views)
        link.since = time.monotonic()
        self._watch(link)

    def _deliver(self, link: _Link) -> Iterator[LineEvent]:
        """Hand a push to the machine; its staging set is there until it is answered, which a hold may put off."""
        push, staged = link.request, link.staged
        assert isinstance(push, Push)
        assert staged is not None
        bad = self._first_not_finite(staged, push)
        if bad is not None:
            push = msgspec.structs.replace(push, not_finite=bad)
        self._tensors.attach(link.worker, WorkerMemory(gradients=(staged, staged), buffers=({}, {})))
        yield FromWorker(sender=link.worker, message=push)

    def _first_not_finite(self, staged: Vectors, push: Push) -> str | None:
        """The worker has looked already, but it is the shard's slice that would be lost."""
        absent = frozenset(push.absent)
        for spec in self._specs:
            if math.isfinite(staged[spec.slice].sum().item()):
                continue
            for segment in spec.segments:
                part: Tensor = staged[spec.slice][segment.start : segment.stop]
                if segment.tensor not in absent and not torch.isfinite(part).all():
                    return f"tensor {segment.tensor}, as it arrived"
        return None

    def before_apply(self, effect: Apply) -> None:
        self._readers.before_change()

    def write_out(self, effect: WriteOut) -> None:
        """Values follow every answer to a request that names a buffer."""

    def answer(self, effect: Answer) -> None:
        link = self._links.get(effect.to.place)
        if link is None or link.request is None or link.request.request != effect.message.request:
            return
        self._unstage(link)
        with contextlib.suppress(OSError):  # its end is read, and told, in its turn
            link.control.send(effect.message)
            if link.request.into is None:
                link.request = None
                return
            link.since = time.monotonic()
            link.outgoing = self._readers.begin(link.request.request)
            self._send(link, link.outgoing)

    # Who is slow, and who goes --------------------------------------------------------------------------

    def tick(self) -> Iterator[LineEvent]:
        self._door.tick()
        now = time.monotonic()
        for link in list(self._links.values()):
            if link.bulk is None and now - link.since > HELLO_S:
                tell_closing(link.name, "its second connection did not come")
                yield from self._end(link)
            elif link.request is not None and now - link.told_alive > ALIVE_EVERY_S:
                link.told_alive = now
                with contextlib.suppress(OSError):
                    link.control.send(Alive())
        yield from self._drop_slowest(now, self._waiting, [x for x in self._links.values() if x.incoming])
        yield from self._drop_slowest(now, self._whole, [x for x in self._links.values() if x.outgoing])
        yield from self._go_on()

    def _drop_slowest(self, now: float, waiting: deque[_Link], holding: list[_Link]) -> Iterator[LineEvent]:
        """Free what others have waited for too long."""
        if not waiting or not holding or now - waiting[0].since <= self._patience.seconds:
            return
        slowest = min(holding, key=lambda link: link.rate(now))
        waiting[0].since = now  # one at a time
        tell_closing(slowest.name, f"it moves {slowest.rate(now):.0f} bytes/s while {waiting[0].name} waits")
        yield from self._end(slowest)

    def _learn(self, link: _Link) -> None:
        now = time.monotonic()
        self._patience.learn(now - link.since)
        link.since = now

    def _watch(self, link: _Link) -> None:
        assert link.bulk is not None
        wanted = (select.EPOLLIN if link.incoming else 0) | (select.EPOLLOUT if link.outgoing else 0)
        self._epoll.modify(link.bulk.fileno(), wanted | _HUNG_UP)

    def drop(self, worker: Worker) -> Iterator[Detach]:
        link = self._links.get(worker.place)
        if link is not None and link.worker == worker:
            yield from self._end(link)

    def _end(self, link: _Link) -> Iterator[Detach]:
        """Part with a worker, and give back all that it held."""
        if self._links.get(link.worker.place) is not link:
            return
        del self._links[link.worker.place]
        for queue in (self._waiting, self._whole):
            if link in queue:
                queue.remove(link)
        link.incoming = None
        self._unstage(link)
        if link.outgoing is not None:
            self._readers.end(link.outgoing)
            link.outgoing = None
        self._traffic.ended(link)
        del self._by_fd[link.control.fileno()]
        self._epoll.unregister(link.control.fileno())
        link.control.close()
        if link.bulk is not None:
            del self._by_fd[link.bulk.fileno()]
            self._epoll.unregister(link.bulk.fileno())
            link.bulk.close()
            yield Detach(worker=link.worker)

    def _unstage(self, link: _Link) -> None:
        if link.staged is not None:
            self._tensors.detach(link.worker)
            self._staging.give(link.staged)
            link.staged = None

    def counted(self) -> Iterable[Counting]:
        return list(self._links.values())

    def close(self) -> None:
        for link in list(self._links.values()):
            for _ in self._end(link):
                pass
        self._door.close()
        self._epoll.close()
