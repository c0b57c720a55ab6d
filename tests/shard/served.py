"""A real shard in a thread of this process, and workers that connect with it by one transport or the other."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from squall.blocks import Block
from squall.model.exchange import ExchangePlan
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace
from squall.observe.ledger import read_ledger
from squall.replica.exchange import (
    Exchange,
    Reply,
    SharedExchange,
    TcpExchange,
    introduction,
    wait_for_reply,
)
from squall.rules.apply import SliceState
from squall.rules.sgd import Sgd
from squall.shard.machine import SliceBook
from squall.shard.server import ShardServer
from squall.shard.tcp_lines import TcpLines
from squall.wire.channel import Channel
from squall.wire.connection import Connection
from squall.wire.control import AttachWorker, Counted, Finish
from squall.wire.hello import new_token
from squall.wire.joining import JoinCoordinator
from squall.wire.listener import Door, Listener
from squall.wire.memory import SharedArena
from squall.wire.messages import Fetch, Push
from squall.wire.tcp import Caller
from tests.relay import Relay

Transport = Literal["shared", "tcp"]


def layout_of(*sizes: int) -> Layout:
    """One shard, with a slice of float32 and, of the last size, one of float64."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes[:-1]]
    parameters.append(nn.Parameter(torch.zeros(sizes[-1], dtype=torch.float64)))
    return Layout.balanced(ParameterSpace.of(nn.ParameterList(parameters)), num_shards=1)


class Served:
    """A shard that starts at zeros and subtracts what is pushed.

    Attributes:
        lines: the shard's own, to be looked at.
        counted: what it told last of its traffic.
    """

    def __init__(
        self, transport: Transport, layout: Layout, folder: Path, durability: str | None = None
    ) -> None:
        self.transport, self.layout, self.folder = transport, layout, folder
        self.token = new_token()
        self.counted: Counted | None = None
        here, there = Channel.pair()
        self._launcher = Connection(here, "shard0")
        self._kept: list[Any] = []
        self.server: ShardServer | None = None
        settings: dict[str, Any] = {
            "shard": 0,
            "incarnation": 0,
            "began": 0.0,
            "directory": str(folder),
            "record": False,
            "durability": durability,
        }
        door = None
        if transport == "tcp":
            listener, hall = Listener.open("127.0.0.1:0"), Listener.open("127.0.0.1:0")
            self.address = listener.address
            door = Door(hall, self.token, (JoinCoordinator,))
            fds = [one.detach() for one in listener.sockets]
            addresses = {"coordinator": hall.address}
            settings["tcp"] = {"token": self.token, "address": self.address, "addresses": addresses}
        else:
            near, far = Channel.pair()
            self._kept.append(near)
            fds = [far.fileno()]
            far._socket.detach()
        (folder / "ledger").mkdir()
        self._thread = threading.Thread(
            target=self._run, args=(settings, Connection(there, "launcher"), fds), daemon=True
        )
        self._thread.start()
        if door is not None:
            while not (guests := door.step()):
                self._thread.join(0.001)
            self._kept.append(guests[0].welcome())
            door.close()
        self._launcher.receive()  # it is ready

    def _run(self, settings: dict[str, Any], launcher: Connection, fds: list[int]) -> None:
        rule = Sgd(learning_rate=1.0)
        specs = self.layout.slices
        states = [
            SliceState.create(spec, torch.zeros(spec.size, dtype=getattr(torch, spec.dtype)), rule)
            for spec in specs
        ]
        books = tuple(SliceBook.new(spec.slice, spec.partition) for spec in specs)
        load = {"layout": self.layout, "rule": rule, "states": states, "books": books}
        with torch.no_grad():
            self.server = ShardServer(settings, load, launcher, fds)
            self.server.run()
        self.server._lines.close()
        self.server._coordinator.close()
        self.server._epoll.close()
        launcher.close()

    @property
    def lines(self) -> TcpLines:
        assert self.server is not None
        assert isinstance(self.server._lines, TcpLines)
        return self.server._lines

    def worker(
        self,
        replica: int = 0,
        *,
        num_gradients: int = 1,
        incarnation: int = 0,
        address: str | None = None,
        layout: Layout | None = None,
        lost_after_s: float = 0.2,
    ) -> "Client":
        plan = ExchangePlan(self.layout.slices, num_gradients)
        name = f"replica{replica}.0"
        if self.transport == "tcp":
            me = introduction(name, layout or self.layout, 0, replica=replica, incarnation=incarnation)
            caller = Caller(
                me=name, peer="shard0", address=address or self.address, token=self.token, patience_s=10.0
            )
            return Client(TcpExchange("shard0", caller, me, plan, lost_after_s=lost_after_s))
        arena = SharedArena.create(plan.num_bytes)
        near, far = Channel.pair()
        told = AttachWorker(
            replica=replica, partition=0, incarnation=incarnation, name=name, num_gradients=num_gradients
        )
        self._launcher.send(told, [far.fileno(), arena.fd])
        far.close()
        return Client(SharedExchange(Connection(near, "shard0"), arena, plan))

    def relayed(self, **settings: Any) -> Relay:
        return Relay(self.address, **settings)

    def outcomes(self) -> list[str]:
        """Of the first slice's ledger, once the shard has ended."""
        rows = read_ledger(self.folder / "ledger")
        return [str(row["outcome"]) for row in rows if row["slice"] == 0]

    def close(self) -> None:
        """End the shard; its last count of traffic is kept."""
        if not self._thread.is_alive():
            return
        self._launcher.send(Finish())
        while (received := self._launcher.receive()) is not None:
            if isinstance(received[0], Counted):
                self.counted = received[0]
        self._thread.join()
        self._launcher.close()
        for one in self._kept:
            one.close()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Client:
    """A worker's end, one call a request."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._requests = 0
        self._version = 0

    def fill(self, value: float, gradient: int = 0) -> None:
        for vector in self.exchange.views.gradients[gradient].values():
            vector.fill_(value)

    def values(self, buffer: int = 0) -> list[Tensor]:
        return list(self.exchange.views.buffers[buffer].values())

    def begin_push(self, position: int, *, into: int | None = 0, **changes: Any) -> None:
        self._requests += 1
        settings: dict[str, Any] = {
            "request": self._requests,
            "block": Block(stage=0, epoch=0, first=position, stop=position + 1),
            "attempt": 1,
            "minibatches": 1,
            "examples": 1,
            "based_on": (0,) * len(self.exchange.views.buffers[0]),
            "absent": (),
            "not_finite": "",
            "into": into,
        }
        self.exchange.send(Push(**settings | changes))

    def push(self, position: int, *, into: int | None = 0, **changes: Any) -> Reply:
        self.begin_push(position, into=into, **changes)
        return self.reply()

    def begin_fetch(self, into: int = 0) -> None:
        self._requests += 1
        self.exchange.send(Fetch(request=self._requests, into=into))

    def fetch(self, into: int = 0) -> Reply:
        self.begin_fetch(into)
        return self.reply()

    def reply(self) -> Reply:
        return wait_for_reply(self.exchange)

    def close(self) -> None:
        self.exchange.close()


def equal(vectors: Sequence[Tensor], value: float) -> bool:
    """Whether every element is this value."""
    return all(bool((vector == value).all()) for vector in vectors)
