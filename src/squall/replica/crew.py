"""The workers of one cut replica as processes: the lead, which has the replica's session, and those that it directs.

Each runs its share of a minibatch when what it needs has come (`PartCompute`); only the plan's cut edges talk. Tensors lie in
memory that two workers share, and a small message says that they are there. Whoever loses a colleague ends at once, so
that a replica lives and dies as a whole, and its block goes to another.
"""

import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from squall.errors import LostError, RemoteProtocolError
from squall.model.buffers import BufferSpace
from squall.model.exchange import ExchangeViews
from squall.partition.engine import Message
from squall.partition.slots import Key, Place, Slots
from squall.replica.allocator import keep_memory
from squall.replica.compute import Task
from squall.replica.downpour import Compute, Computed
from squall.replica.exchange import Exchange, Reply, Request, SharedExchange, connect_shards
from squall.replica.part import PartCompute, PartGradient, PartResult, computed_of, factor_of
from squall.wire.connection import Connection
from squall.wire.control import Counted, LinkCount, Ready, ShardBack
from squall.wire.crew import (
    Dismiss,
    Join,
    Line,
    Moved,
    Relay,
    Relayed,
    Settle,
    Settled,
    Step,
    Stepped,
    SwapTo,
)
from squall.wire.memory import SharedArena

COUNTED_EVERY_S = 0.5


def num_fds(settings: Mapping[str, Any]) -> int:
    """How many descriptors a worker of a cut replica has for its colleagues: memory for buffers, and two each."""
    return 1 + 2 * len(settings["colleagues"]) if "colleagues" in settings else 0


class Colleagues:
    """The other workers of a replica, and one's own share of the work.

    Args:
        settings: "name"; "partition"; "colleagues", the arena's bytes by partition (JSON has text as keys).
        fds: for each colleague, in order, a connection and the memory shared with it.
        launcher: told what was sent.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        fds: Sequence[int],
        part: PartCompute,
        task: Task,
        launcher: Connection,
    ) -> None:
        self._name, self._part, self._task, self._launcher = settings["name"], part, task, launcher
        self._replica = settings["replica"]
        self.connections: dict[int, Connection] = {}
        self._memory: dict[int, SharedArena] = {}
        for index, (peer, num_bytes) in enumerate(settings["colleagues"].items()):
            connection = Connection.from_fd(fds[2 * index], self._name_of(int(peer)))
            self.connections[int(peer)] = connection
            self._memory[int(peer)] = SharedArena.attach(fds[2 * index + 1], num_bytes, writable=True)
        self._by_fd = {connection.fileno(): peer for peer, connection in self.connections.items()}
        self._others: dict[int, Callable[[], None]] = {}
        self._poll = select.poll()
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        self._views: dict[tuple[int, int], dict[Key, tuple[Tensor, ...]]] = {}  # by examples and peer
        self._examples = 0  # of the minibatch under way; 0 between two
        self._early: deque[tuple[int, Moved]] = deque()  # of a minibatch that has not begun here
        self._heard: deque[tuple[int, Any]] = deque()
        self._sent = dict.fromkeys(self.connections, 0)
        self._counted_at = 0.0

    def _name_of(self, partition: int) -> str:
        return f"replica{self._replica}.{partition}"

    # A minibatch ----------------------------------------------------------------------------------------

    def compute(self, wish: Compute) -> PartResult:
        """This worker's share of a minibatch.

        Raises:
            LostError: a colleague is gone.
        """
        messages = self._part.begin(wish)
        self._examples = self._task.minibatches.size(wish.position)
        self._post(messages)
        while self._early:
            self._take(*self._early.popleft())
        while not self._part.is_finished:
            self.listen(0)
            sent = self._part.run_one(wish)
            if sent is not None:
                self._post(sent)
            elif not self._part.is_finished:
                self.listen(None)
        self._examples = 0
        return self._part.end(wish)

    def _post(self, messages: Sequence[Message]) -> None:
        """Leave tensors where their receiver finds them, and tell it."""
        for message in messages:
            key = Key(self._part.partition, message.value, message.micro, message.is_gradient)
            places = self._views_with(message.receiver)[key]
            for place, tensor in zip(places, message.tensors, strict=True):
                place.copy_(tensor)
            told = Moved(value=message.value, micro=message.micro, is_gradient=message.is_gradient)
            self._sent[message.receiver] += message.num_bytes
            self.send(message.receiver, told)

    def _take(self, sender: int, told: Moved) -> None:
        """Hand tensors on, which stay where they are."""
        key = Key(sender, told.value, told.micro, told.is_gradient)
        found = self._views_with(sender).get(key)
        if found is None:
            raise RemoteProtocolError(reason=f"{self._name_of(sender)} sent {told}, which is in no plan")
        self._part.receive(
            Message(
                sender=sender,
                receiver=self._part.partition,
                value=told.value,
                micro=told.micro,
                is_gradient=told.is_gradient,
                tensors=found,
            )
        )

    def _views_with(self, peer: int) -> Mapping[Key, tuple[Tensor, ...]]:
        views = self._views.get((self._examples, peer))
        if views is None:
            slots = self._part.slots(self._examples, peer)
            views = self._views[self._examples, peer] = _views(slots, self._memory[peer])
        return views

    # What is said ---------------------------------------------------------------------------------------

    def send(self, peer: int, message: Any) -> None:
        """Tell a colleague something.

        Raises:
            LostError: it is gone.
        """
        try:
            self.connections[peer].send(message)
        except ConnectionError as error:
            raise self._lost(peer) from error

    def attend(self, fd: int, hear: Callable[[], None]) -> None:
        """Listen to somebody else, too: `hear` is called when something has come."""
        self._others[fd] = hear
        self._poll.register(fd, select.POLLIN)

    def part_with(self, fd: int) -> None:
        """Listen no more to who was attended to; once more does nothing."""
        if self._others.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def listen(self, timeout_ms: int | None) -> None:
        """Take what has come: tensors go to the minibatch, all else waits to be `heard`."""
        for fd, _ in self._poll.poll(timeout_ms):
            if fd in self._others:
                self._others[fd]()
            if fd not in self._by_fd:
                continue  # perhaps of one who was parted with just now
            peer = self._by_fd[fd]
            connection = self.connections[peer]
            while arrived := connection.arrived():
                for message, _ in arrived:
                    self._sort(peer, message)
            if connection.is_ended:
                self._ended(peer)

    def _sort(self, peer: int, message: Any) -> None:
        if not isinstance(message, Moved):
            self._heard.append((peer, message))
        elif self._examples:
            self._take(peer, message)
        else:
            self._early.append((peer, message))

    def heard(self) -> tuple[int, Any] | None:
        """What a colleague has said, first come first served; None if nothing is left."""
        return self._heard.popleft() if self._heard else None

    def _ended(self, peer: int) -> None:
        """Without its lead a worker ends, and the lead without any of them; so the others need only wait for it."""
        is_dismissed = any(isinstance(said, Dismiss) for _, said in self._heard)
        if not is_dismissed and 0 in (peer, self._part.partition):
            raise self._lost(peer)
        self._poll.unregister(self.connections[peer].fileno())

    def _lost(self, peer: int) -> LostError:
        return LostError(
            reason=f"{self._name} lost {self._name_of(peer)}, without which its replica cannot go on"
        )

    def tell_count(self, *, is_last: bool = False) -> None:
        """Tell the launcher, now and then, what was sent to colleagues, who each tell the other direction."""
        now = time.monotonic()
        if not is_last and now - self._counted_at < COUNTED_EVERY_S:
            return
        self._counted_at = now
        links = []
        for peer, connection in self.connections.items():
            _, _, num_bytes, messages = connection.counts()
            link = LinkCount(
                sender=self._name,
                receiver=self._name_of(peer),
                num_bytes=num_bytes + self._sent[peer],
                messages=messages,
            )
            links.append(link)
        self._launcher.send(Counted(links=tuple(links)))


def _views(slots: Slots, memory: SharedArena) -> dict[Key, tuple[Tensor, ...]]:
    """A tensor of its own for each place: views of one would count each other's writes, and autograd object."""

    def tensor(place: Place) -> Tensor:
        numel = torch.Size(place.shape).numel()
        return memory.tensor(getattr(torch, place.dtype), place.start, numel).view(place.shape)

    return {key: tuple(map(tensor, places)) for key, places in slots.places.items()}


class _Far:
    """A colleague's line to a shard, as its lead sees it: an `Exchange` whose tensors are elsewhere."""

    views = ExchangeViews(gradients=(), buffers=({}, {}))

    def __init__(self, lead: "Lead", partition: int, shard: int) -> None:
        self.name = f"shard{shard}"
        self._lead, self._partition, self._shard = lead, partition, shard
        self.arrived: list[Reply] = []

    def send(self, request: Request) -> None:
        self._lead.tell(self._partition, Relay(shard=self._shard, request=request))

    def replies(self) -> list[Reply]:
        """What has been heard of it, by `Lead.hear`."""
        found, self.arrived = self.arrived, []
        return found

    def fileno(self) -> int:
        return self._lead.fileno_of(self._partition)

    def close(self) -> None:
        pass


class Lead:
    """What a lead does with tensors: its own share, and that of its colleagues. Has the face of a `ReplicaCompute`.

    Args:
        settings, fds: as of `Colleagues`; before the colleagues' the memory for the model's buffers.
        own: the lead's own exchanges, by shard.
        space: of the model's buffers.

    Attributes:
        exchanges: the colleagues' lines to shards, by partition and shard.
        left: the model's buffers, as all workers together have left them.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        fds: Sequence[int],
        task: Task,
        space: BufferSpace,
        launcher: Connection,
        own: Mapping[int, Exchange],
    ) -> None:
        assert task.cut is not None
        self._task = task
        part, self.left = _part(settings, fds[0], task, space, own)
        self._part = part
        self._colleagues = Colleagues(settings, fds[1:], part, task, launcher)
        self._said: dict[int, Any] = {}
        self._lines: deque[tuple[int, Line]] = deque()
        self.exchanges = {
            (partition, shard): _Far(self, partition, shard)
            for partition in self._colleagues.connections
            for shard in task.layout.shards_of(partition)
        }

    def compute(self, wish: Compute) -> Computed:
        """Compute one minibatch, all workers together; raises as `PartCompute` does, and if a colleague is gone."""
        step = Step(
            epoch=wish.epoch,
            position=wish.position,
            is_first=wish.is_first,
            is_last=wish.is_last,
            buffer=wish.buffer,
            local_step=wish.local_step,
            minibatches=wish.minibatches,
        )
        self._tell_all(step)
        results = [self._colleagues.compute(wish)]
        stepped = self._wait_for_all(Stepped)
        results += [PartResult(loss=each.loss, norm=each.norm) for each in stepped]
        scale = factor_of(self._task, results)
        settled = [each.settled for each in stepped]
        if self._task.clip_norm is not None:
            self._tell_all(Settle(scale=scale))
        gradients = [self._part.settle(wish, scale)]
        if self._task.clip_norm is not None:
            settled = self._wait_for_all(Settled)
        gradients += [PartGradient(absent=each.absent, not_finite=each.not_finite) for each in settled]
        self._colleagues.tell_count()
        return computed_of(self._task, wish, results, gradients)

    def swap(self, buffer: int) -> None:
        """Take the parameters from this buffer from now on, everybody; between two minibatches only."""
        self._part.swap(buffer)
        self._tell_all(SwapTo(buffer=buffer))

    @torch.no_grad()
    def join(self, buffers: Mapping[str, Tensor]) -> None:
        """Have everybody begin with these buffers of the model."""
        for name, value in buffers.items():
            self.left[name].copy_(value)
        self._part.join()
        self._tell_all(Join())

    def dismiss(self) -> None:
        """The work is done: the others may end."""
        self._tell_all(Dismiss())
        self._colleagues.tell_count(is_last=True)

    def tell(self, partition: int, message: Any) -> None:
        self._colleagues.send(partition, message)

    def fileno_of(self, partition: int) -> int:
        return self._colleagues.connections[partition].fileno()

    def hear(self, timeout_ms: int | None) -> None:
        """Take what colleagues have said: of their lines to shards, all else for `compute`."""
        self._colleagues.listen(timeout_ms)
        while (heard := self._colleagues.heard()) is not None:
            partition, message = heard
            if isinstance(message, Relayed):
                self.exchanges[partition, message.shard].arrived.append(message.reply)
            elif isinstance(message, Line):
                self._lines.append((partition, message))
            else:
                self._said[partition] = message

    def lines(self) -> Iterator[tuple[int, Line]]:
        """What has become of colleagues' lines to shards, with whose they are, since it was last asked."""
        while self._lines:
            yield self._lines.popleft()

    def _tell_all(self, message: Any) -> None:
        for partition in self._colleagues.connections:
            self._colleagues.send(partition, message)

    def _wait_for_all(self, kind: type) -> list[Any]:
        self.hear(0)
        while len(self._said) < len(self._colleagues.connections):
            self.hear(None)
        said, self._said = [self._said[partition] for partition in sorted(self._said)], {}
        if not all(isinstance(each, kind) for each in said):
            raise RemoteProtocolError(reason=f"expected a {kind.__name__} of every worker, but got {said}")
        return said


def follow(settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int]) -> None:
    """Do what the lead of a replica says, until it says that the work is done.

    Args:
        settings: as of `Colleagues`; "threads"; "shards", those with slices of this partition.
        load: "task", and the model's "buffers".
        fds: memory for the model's buffers; a connection and memory for each colleague; then for each of "shards" its
            connection and the memory shared with it.

    Raises:
        LostError: a colleague or a shard is gone.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the lead has had the notice, too, and leaves in order
    torch.set_num_threads(settings["threads"])
    _Follower(settings, load, launcher, fds).run()


class _Follower:
    def __init__(
        self, settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int]
    ) -> None:
        task: Task = load["task"]
        stop = num_fds(settings)
        self._name, self._launcher, self._task = settings["name"], launcher, task
        self._shards = connect_shards(
            settings, task.layout, fds[stop:], num_gradients=load["loop"].num_gradients
        )
        self._part, _ = _part(settings, fds[0], task, load["buffers"], self._shards)
        self._colleagues = Colleagues(settings, fds[1:stop], self._part, task, launcher)
        self._colleagues.attend(launcher.fileno(), self._hear_launcher)
        for shard in self._shards:
            self._attend(shard)
        self._is_dismissed = False
        self._unsettled: Compute | None = None

    def run(self) -> None:
        keep_memory()
        self._launcher.send(Ready())
        while not self._is_dismissed:
            self._colleagues.listen(None)
            while not self._is_dismissed and (heard := self._colleagues.heard()) is not None:
                self._obey(heard[1])
        self._colleagues.tell_count(is_last=True)

    def _attend(self, shard: int) -> None:
        self._colleagues.attend(self._shards[shard].fileno(), partial(self._pass_on, shard))

    def _pass_on(self, shard: int) -> None:
        exchange = self._shards[shard]
        for reply in exchange.replies():
            self._colleagues.send(0, Relayed(shard=shard, reply=reply))
        if isinstance(exchange, SharedExchange) and exchange.is_gone:
            self._colleagues.part_with(exchange.fileno())
            self._colleagues.send(0, Line(shard=shard, is_open=False))

    def _hear_launcher(self) -> None:
        """A shard that was killed has come back: the lead has what it had not answered sent again."""
        received = self._launcher.receive()
        if received is None:
            raise LostError(reason=f"{self._name} lost its launcher")
        match received:
            case ShardBack(shard=shard), fds:
                exchange = self._shards[shard]
                assert isinstance(exchange, SharedExchange)
                self._colleagues.part_with(exchange.fileno())
                exchange.come_back(fds[0])
                self._attend(shard)
                self._colleagues.send(0, Line(shard=shard, is_open=True))

    def _obey(self, message: Any) -> None:
        match message:
            case Step():
                self._step(message)
            case Settle(scale=scale):
                assert self._unsettled is not None
                self._colleagues.send(0, self._settled(self._unsettled, scale))
            case Relay(shard=shard, request=request):
                self._shards[shard].send(request)
            case SwapTo(buffer=buffer):
                self._part.swap(buffer)
            case Join():
                self._part.join()
            case Dismiss():
                self._is_dismissed = True
            case _:
                raise RemoteProtocolError(reason=f"a lead sent a {type(message).__name__}")

    def _step(self, step: Step) -> None:
        wish = Compute(
            epoch=step.epoch,
            position=step.position,
            is_first=step.is_first,
            is_last=step.is_last,
            buffer=step.buffer,
            local_step=step.local_step,
            minibatches=step.minibatches,
        )
        result = self._colleagues.compute(wish)
        self._unsettled = wish
        settled = None if self._task.clip_norm is not None else self._settled(wish, 1.0)
        self._colleagues.send(0, Stepped(loss=result.loss, norm=result.norm, settled=settled))
        self._colleagues.tell_count()

    def _settled(self, wish: Compute, scale: float) -> Settled:
        gradient = self._part.settle(wish, scale)
        self._unsettled = None
        return Settled(absent=gradient.absent, not_finite=gradient.not_finite)


def _part(
    settings: Mapping[str, Any], fd: int, task: Task, space: BufferSpace, shards: Mapping[int, Exchange]
) -> tuple[PartCompute, dict[str, Tensor]]:
    """A worker's own share of the work, and the model's buffers in memory that all workers of the replica share."""
    left = space.whole(space.memory(SharedArena.attach(fd, space.arena_bytes, writable=True)))
    views = [exchange.views for exchange in shards.values()]
    num_gradients = max((len(each.gradients) for each in views), default=1)
    part = PartCompute(
        name=settings["name"],
        task=task,
        partition=settings["partition"],
        gradients=[_merged([each.gradients[at] for each in views]) for at in range(num_gradients)],
        buffers=[_merged([each.buffers[at] for each in views]) for at in range(2)],
        left=left,
    )
    return part, left


def _merged(by_shard: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    return {number: vector for each in by_shard for number, vector in each.items()}
