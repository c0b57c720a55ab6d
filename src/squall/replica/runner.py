"""The process of one worker: sockets and a model around a `ReplicaSession`."""

import select
import signal
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from squall.errors import LostError
from squall.model.buffers import BufferSpace
from squall.model.exchange import ExchangePlan
from squall.replica.compute import ReplicaCompute, Task
from squall.replica.data_worker import Duty, Packing
from squall.replica.downpour import Compute, DownpourLoop, downpour
from squall.replica.loading import Loader, LoadsAhead, LoadsHere
from squall.replica.session import (
    FromCoordinator,
    FromShard,
    Quit,
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
from squall.wire.control import Ready
from squall.wire.memory import SharedArena
from squall.wire.messages import Lease, Recall


def serve(
    settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int], *, packing: Packing
) -> None:
    """Train as one worker until the coordinator says to leave.

    Args:
        settings: "name"; "threads"; "shards", the shards with slices of this worker's partition; "num_replicas".
        load: "task", "loop", and the model's "buffers".
        launcher: the connection to it.
        fds: the connection to the coordinator, the memory for the model's buffers, that of every replica, then for
            each of "shards" its connection and the memory shared with it.
        packing: how minibatches come from data workers.
    """
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
        self._launcher = launcher
        self._coordinator = Connection.from_fd(fds[0], "coordinator")
        self._buffer_space: BufferSpace = load["buffers"]
        self._buffer_memory = self._buffer_space.memory(
            SharedArena.attach(fds[1], self._buffer_space.arena_bytes, writable=True)
        )
        stop = 2 + settings["num_replicas"]
        self._left_by_all = [  # until it has joined
            self._buffer_space.memory(SharedArena.attach(fd, self._buffer_space.arena_bytes, writable=False))
            for fd in fds[2:stop]
        ]
        self._model = task.model
        self._shards: dict[int, Connection] = {}
        loop: DownpourLoop = load["loop"]
        gradients: list[dict[int, Tensor]] = [{} for _ in range(loop.num_gradients)]
        buffers: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        for index, shard in enumerate(settings["shards"]):
            connection_fd, arena_fd = fds[stop + 2 * index : stop + 2 * index + 2]
            self._shards[shard] = Connection.from_fd(connection_fd, f"shard{shard}")
            plan = ExchangePlan(layout.slices_of(shard), num_gradients=loop.num_gradients)
            arena = SharedArena.attach(arena_fd, plan.num_bytes, writable=True)
            views = plan.views(arena)
            for mine, theirs in zip(gradients, views.gradients, strict=True):
                mine.update(theirs)
            for mine, theirs in zip(buffers, views.buffers, strict=True):
                mine.update(theirs)
        numbers = range(len(layout.slices))
        self._compute = ReplicaCompute(
            name=self.name,
            task=task,
            gradients=[[gradient[number] for number in numbers] for gradient in gradients],
            buffers=[[buffer[number] for number in numbers] for buffer in buffers],
            loader=loader,
        )
        self._session = ReplicaSession(
            loop=downpour(looking_ahead(load["loop"], task.workers.num)),
            shards=[
                ShardSlices(shard=shard, slices=tuple(spec.slice for spec in layout.slices_of(shard)))
                for shard in self._shards
            ],
        )
        self._events: deque[SessionEvent] = deque()
        self._by_fd = {connection.fileno(): shard for shard, connection in self._shards.items()}
        self._poll = select.poll()
        for fd in (*self._by_fd, self._coordinator.fileno()):
            self._poll.register(fd, select.POLLIN)
        self._is_done = False

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_notice)
        self._launcher.send(Ready())
        self._events.append(Started())
        while not self._is_done:
            if not self._events:
                self._receive()
            while self._events:
                for effect in self._session.handle(self._events.popleft()):
                    self._carry_out(effect)

    def _on_notice(self, number: int, frame: object) -> None:
        """This machine is wanted back: leave in order."""
        self._events.append(FromCoordinator(message=Recall(why="asked to leave by SIGTERM")))

    def _receive(self) -> None:
        """Wait until a peer says something."""
        for fd, _ in self._poll.poll():
            shard = self._by_fd.get(fd)
            connection = self._coordinator if shard is None else self._shards[shard]
            received = connection.receive()
            if received is None:
                raise LostError(reason=f"{self.name} lost its connection to {connection.name}")
            if shard is None:
                self._hear(received[0])
            else:
                self._events.append(FromShard(shard=shard, message=received[0]))

    def _carry_out(self, effect: SessionEffect) -> None:
        match effect:
            case Compute():
                self._hear_coordinator()
                self._events.append(self._compute.compute(effect))
                if effect.is_last:
                    place = effect.epoch, effect.position
                    self._buffer_space.write(self._model, self._buffer_memory, after=place)
            case ToShard(shard=shard, message=message):
                self._shards[shard].send(message)
            case Swap(buffer=buffer):
                self._compute.swap(buffer)
                self._join()
            case ToCoordinator(message=message):
                self._coordinator.send(message)
            case Quit():
                self._is_done = True

    def _join(self) -> None:
        """With the first fetch, take the buffers that others have left, if they have begun before."""
        memories, self._left_by_all = self._left_by_all, []
        self._buffer_space.join(self._model, memories, self._buffer_memory)

    def _hear_coordinator(self) -> None:
        """Take what has come meanwhile, so that a recall is heard between two minibatches."""
        while (received := self._coordinator.try_receive()) is not None:
            self._hear(received[0])

    def _hear(self, message: Any) -> None:
        """A message of the coordinator: for the session, and a lease for whoever loads ahead, too."""
        if isinstance(message, Lease):
            self._loader.expect(message.block)
        self._events.append(FromCoordinator(message=message))
