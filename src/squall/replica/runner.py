"""The process of one worker: sockets and a model around a `ReplicaSession`."""

import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from squall.errors import LostError
from squall.model.buffers import BufferSpace
from squall.replica.allocator import keep_memory
from squall.replica.compute import ReplicaCompute, Task
from squall.replica.crew import Lead, follow, num_fds
from squall.replica.data_worker import Duty, Packing
from squall.replica.downpour import Compute, DownpourLoop, downpour
from squall.replica.exchange import Exchange, SharedExchange, connect_coordinator, connect_shards
from squall.replica.loading import Loader, LoadsAhead, LoadsHere
from squall.replica.patience import Absences, Silences
from squall.replica.session import (
    FromCoordinator,
    FromShard,
    Phase,
    Quit,
    Reconnected,
    Redirected,
    ReplicaSession,
    SessionEffect,
    SessionEvent,
    ShardSlices,
    Started,
    Swap,
    ToCoordinator,
    ToShard,
)
from squall.wire.connection import Connection
from squall.wire.control import CoordinatorBack, Ready, ShardBack, Unheard
from squall.wire.memory import SharedArena
from squall.wire.messages import Ask, Goodbye, Lease, Recall, Resume

HELD_BACK_S = 0.01
"""Half of what a replica likes to have leased: it has work until the answer comes."""

TOLD_MS = 1000
"""How often a replica that waits looks for how long it has."""


def serve(
    settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int], *, packing: Packing
) -> None:
    """Train as one worker until the coordinator says to leave.

    Args:
        settings: "name"; "threads"; "shards", the shards with slices of this worker's partition; "replica";
            "incarnation"; "num_replicas"; "shards_come_back" and "tcp", if it is to connect that way (see
            `squall.replica.exchange.connect_shards`).
        load: "task", "loop", and the model's "buffers".
        launcher: the connection to it.
        fds: of a lead of several workers, what `squall.replica.crew` wants for the others; the memory for the model's
            buffers, and that of every replica; then, unless "tcp" is there, the connection
            to the coordinator, and for each of "shards" its connection and the memory shared with it.
        packing: how minibatches come from data workers.
    """
    if settings.get("partition"):
        follow(settings, load, launcher, fds)
        return
    # Before torch is told of threads: what is forked after it has used some may hang.
    loader = _loader(settings["name"], load["task"], packing, [launcher.fileno(), *fds])
    torch.set_num_threads(settings["threads"])
    try:
        ReplicaRunner(settings, load, launcher, fds, loader).run()
    finally:
        loader.close()


def _loader(name: str, task: Task, packing: Packing, fds: list[int]) -> Loader:
    if not task.workers.num:
        return LoadsHere(task.minibatches, task.seed)
    duty = Duty(
        role=name, minibatches=task.minibatches, seed=task.seed, workers=task.workers, packing=packing
    )
    return LoadsAhead(duty, inherited=fds)


def looking_ahead(loop: DownpourLoop, num_workers: int) -> DownpourLoop:
    """The loop with so many leases in hand that every data worker has a minibatch to load meanwhile.

    One more than the workers fill: a replica hears of a lease only when it has computed the next minibatch.

    >>> loop = DownpourLoop(n_fetch=5, n_push=5, has_local_steps=False)
    >>> looking_ahead(loop, 0).ahead, looking_ahead(loop, 2).ahead, looking_ahead(loop, 6).ahead
    (1, 2, 3)
    """
    return replace(loop, ahead=loop.ahead + -(-num_workers // loop.n_push))


class Outbox:
    """Messages for the coordinator that wait a moment for company, so that it is woken once for several blocks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: list[Ask | Goodbye | Resume] = []
        self._due = 0.0

    @property
    def due_ms(self) -> int | None:
        """How long to wait for others at most; None if nothing is to be sent [milliseconds]."""
        return int(HELD_BACK_S * 1000) if self._messages else None

    def redirect(self, connection: Connection) -> None:
        """Talk to another coordinator; what waits was for the one before."""
        self._connection = connection
        self._messages.clear()

    def put(self, message: Ask | Goodbye | Resume) -> None:
        """Have it sent soon. A `Resume` is the first word to another coordinator: what waits already is said again behind it."""
        if isinstance(message, Resume):
            self._messages.clear()
        self._messages.append(message)

    def send_if_due(self, now: float) -> None:
        if self._messages and now >= self._due:
            self.send()
            self._due = now + HELD_BACK_S

    def send(self) -> None:
        with contextlib.suppress(ConnectionError):  # its end is read in its turn
            self._connection.send_all(self._messages)
        self._messages.clear()


def _whole(name: str, task: Task, shards: Iterable[Exchange], loader: Loader) -> ReplicaCompute:
    """What a replica of one worker does, in the memory that it shares with its shards."""
    views = [exchange.views for exchange in shards]
    numbers = range(len(task.layout.slices))

    def in_order(by_shard: Sequence[Mapping[int, Tensor]]) -> list[Tensor]:
        merged = {number: vector for each in by_shard for number, vector in each.items()}
        return [merged[number] for number in numbers]

    num_gradients = len(views[0].gradients) if views else 1
    return ReplicaCompute(
        name=name,
        task=task,
        gradients=[in_order([each.gradients[at] for each in views]) for at in range(num_gradients)],
        buffers=[in_order([each.buffers[at] for each in views]) for at in range(2)],
        loader=loader,
    )


class ReplicaRunner:
    """Carries out what one `ReplicaSession` decides."""

    def __init__(
        self,
        settings: dict[str, Any],
        load: dict[str, Any],
        launcher: Connection,
        fds: list[int],
        loader: Loader,
    ) -> None:
        self.name: str = settings["name"]
        self._loader = loader
        task: Task = load["task"]
        layout = task.layout
        crew_fds, fds = fds[: num_fds(settings)], fds[num_fds(settings) :]
        self._launcher = launcher
        self._buffer_space: BufferSpace = load["buffers"]
        self._buffer_memory = self._buffer_space.memory(
            SharedArena.attach(fds[0], self._buffer_space.arena_bytes, writable=True)
        )
        stop = 1 + settings["num_replicas"]
        self._left_by_all = [  # until it has joined
            self._buffer_space.memory(SharedArena.attach(fd, self._buffer_space.arena_bytes, writable=False))
            for fd in fds[1:stop]
        ]
        self._settings = settings
        self._model = task.model
        loop: DownpourLoop = load["loop"]
        ends = iter(fds[stop:])
        self._coordinator, self._epoch = connect_coordinator(settings, next(ends, None))
        own = connect_shards(settings, layout, list(ends), num_gradients=loop.num_gradients)
        self._shards: dict[tuple[int, int], Exchange] = {(0, shard): own[shard] for shard in own}
        self._lead: Lead | None = None
        if task.cut is not None:
            self._lead = Lead(settings, crew_fds, task, self._buffer_space, launcher, own)
            self._shards |= self._lead.exchanges
        self._compute = self._lead or _whole(self.name, task, own.values(), loader)
        self._session = ReplicaSession(
            loop=downpour(looking_ahead(load["loop"], task.workers.num)),
            shards=[
                ShardSlices(
                    shard=shard,
                    partition=partition,
                    slices=tuple(spec.slice for spec in layout.slices_of(shard, partition)),
                )
                for partition, shard in self._shards
            ],
        )
        self._events: deque[SessionEvent] = deque()
        self._outbox = Outbox(self._coordinator)
        self._by_fd = {exchange.fileno(): shard for shard, exchange in own.items()}
        far = {} if self._lead is None else self._lead.exchanges
        self._colleagues = {exchange.fileno() for exchange in far.values()}
        self._poll = select.poll()
        self._absences, self._silences = Absences(self.name), Silences()
        for fd in (*self._by_fd, *self._colleagues, self._coordinator.fileno(), launcher.fileno()):
            self._poll.register(fd, select.POLLIN)
        # Between two minibatches: a look at nothing costs less than a read of nothing.
        self._calls = select.poll()
        for fd in (self._coordinator.fileno(), launcher.fileno()):
            self._calls.register(fd, select.POLLIN)
        # A poll goes on after a signal; what it wakes is this descriptor.
        self._woken, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waking)
        self._poll.register(self._woken, select.POLLIN)
        self._is_done = False

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_notice)
        keep_memory()
        self._launcher.send(Ready())
        self._events.append(Started())
        while not self._is_done:
            if not self._events:
                self._receive()
            self._outbox.send_if_due(time.monotonic())
            while self._events:
                for effect in self._session.handle(self._events.popleft()):
                    self._carry_out(effect)

    def _on_notice(self, number: int, frame: object) -> None:
        """This machine is wanted back: leave in order."""
        self._events.append(FromCoordinator(message=Recall(why="asked to leave by SIGTERM")))

    def _receive(self) -> None:
        """Wait until a peer says something, or what we have to say is due."""
        if self._session.phase is Phase.AWAITING:
            self._outbox.send()
        self._take_relayed()
        if self._events:
            return
        for fd, _ in self._poll.poll(self._tell_waits()):
            if fd == self._woken:
                os.read(fd, 64)
            elif (shard := self._by_fd.get(fd)) is not None:
                self._hear_shard(shard, fd)
            elif self._lead is not None and fd in self._colleagues:
                self._lead.hear(0)
            elif fd == self._launcher.fileno():
                self._hear_launcher()
            else:
                self._hear_coordinator()

    def _tell_waits(self) -> int | None:
        """Tell whom we have waited for too long; how long to wait now, at most [milliseconds]."""
        wait_ms, awaited = self._outbox.due_ms, self._session.awaits
        if not (awaited or self._absences or self._silences):
            return wait_ms
        now = time.monotonic()
        self._absences.tick(now)
        by_name = {f"shard{shard}": request for shard, request in awaited.items()}
        there = {name: request for name, request in by_name.items() if name not in self._absences}
        for told in self._silences.look(there, now):
            self._launcher.send(told)
        return min(wait_ms or TOLD_MS, TOLD_MS)

    def _take_relayed(self) -> None:
        """Take what colleagues have passed on of shards; whoever listened to them, and whatever else he waited for."""
        if self._lead is None:
            return
        for (partition, shard), exchange in self._lead.exchanges.items():
            for reply in exchange.replies():
                self._events.append(FromShard(shard=shard, message=reply, partition=partition))
        for partition, line in self._lead.lines():
            name = f"shard{line.shard}"
            if line.is_open:
                self._absences.back(name)
                self._events.append(Reconnected(shard=line.shard, partition=partition))
            else:
                self._absences.gone(name, time.monotonic())

    def _hear_shard(self, shard: int, fd: int) -> None:
        exchange = self._shards[0, shard]
        self._events.extend(FromShard(shard=shard, message=reply) for reply in exchange.replies())
        if isinstance(exchange, SharedExchange) and exchange.is_gone:
            self._poll.unregister(fd)
            del self._by_fd[fd]
            self._absences.gone(exchange.name, time.monotonic())

    def _hear_launcher(self) -> None:
        """A shard that was killed has come back, or another coordinator is there."""
        received = self._launcher.receive()
        if received is None:
            raise LostError(reason=f"{self.name} lost its launcher")
        match received:
            case ShardBack(shard=shard), fds:
                self._shard_back(shard, fds[0])
            case CoordinatorBack(epoch=epoch), fds:
                self._follow(epoch, next(iter(fds), None))
            case Unheard(), _:
                raise LostError(reason=f"{self.name} lost its connection to {self._coordinator.name}")

    def _shard_back(self, shard: int, fd: int) -> None:
        exchange = self._shards[0, shard]
        assert isinstance(exchange, SharedExchange)
        if self._by_fd.pop(exchange.fileno(), None) is not None:
            self._poll.unregister(exchange.fileno())
        exchange.come_back(fd)
        self._by_fd[exchange.fileno()] = shard
        self._poll.register(exchange.fileno(), select.POLLIN)
        self._absences.back(exchange.name)
        self._events.append(Reconnected(shard=shard))

    def _follow(self, epoch: int, fd: int | None) -> None:
        """Hear another coordinator from now on, and no more of the one before."""
        if epoch <= self._epoch:
            return  # over TCP we have reached it before we were told
        if not self._coordinator.is_ended:
            self._part_with_coordinator()
        self._coordinator.close()
        self._coordinator, self._epoch = connect_coordinator(self._settings | {"epoch": epoch}, fd)
        for poll in (self._poll, self._calls):
            poll.register(self._coordinator.fileno(), select.POLLIN)
        self._outbox.redirect(self._coordinator)
        self._absences.back(self._coordinator.name)
        self._events.append(Redirected())

    def _part_with_coordinator(self) -> None:
        for poll in (self._poll, self._calls):
            poll.unregister(self._coordinator.fileno())

    def _carry_out(self, effect: SessionEffect) -> None:
        match effect:
            case Compute():
                self._hear_calls()
                began = time.monotonic()
                computed = self._compute.compute(effect)
                seconds = time.monotonic() - began
                self._events.append(msgspec.structs.replace(computed, seconds=seconds))
                if effect.is_last:
                    place = effect.epoch, effect.position
                    buffers = self._model if self._lead is None else self._lead.left
                    self._buffer_space.write(buffers, self._buffer_memory, after=place)
                self._take_relayed()  # what came meanwhile
            case ToShard(shard=shard, message=message, partition=partition):
                self._shards[partition, shard].send(message)
            case Swap(buffer=buffer):
                self._compute.swap(buffer)
                self._join()
            case ToCoordinator(message=message):
                self._outbox.put(message)
            case Quit():
                self._outbox.send()
                if self._lead is not None:
                    self._lead.dismiss()
                self._is_done = True

    def _join(self) -> None:
        """With the first fetch, take the buffers that others have left, if they have begun before."""
        memories, self._left_by_all = self._left_by_all, []
        self._buffer_space.join(self._model, memories, self._buffer_memory)
        if memories and self._lead is not None:
            self._lead.join(dict(self._model.named_buffers()))

    def _hear_calls(self) -> None:
        """Take what has come meanwhile, so that a recall is heard between two minibatches."""
        while calls := self._calls.poll(0):
            for fd, _ in calls:
                if fd == self._launcher.fileno():
                    self._hear_launcher()
                elif fd == self._coordinator.fileno():
                    self._hear_coordinator()

    def _hear_coordinator(self) -> None:
        """Take what it says; once it is gone, wait for the launcher to tell of another."""
        if self._coordinator.is_ended:
            return
        for message, _ in self._coordinator.arrived():
            self._hear(message)
        if self._coordinator.is_ended:
            self._part_with_coordinator()
            self._absences.gone(self._coordinator.name, time.monotonic())

    def _hear(self, message: Any) -> None:
        """A message of the coordinator: for the session, and a lease for whoever loads ahead, too."""
        if isinstance(message, Lease):
            self._loader.expect(message.block)
        self._events.append(FromCoordinator(message=message))
