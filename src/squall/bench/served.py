"""One shard in a process of its own, without a run around it, and what its speed is held against.

This looks inside Squall, as no other file of this room does: only so can an exchange be timed apart from computing.
All are made in a process with one thread, since they fork.
"""

import os
import socket
import time
from pathlib import Path

import torch
from torch import nn

from squall.blocks import Block
from squall.model.exchange import ExchangePlan
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace
from squall.replica.exchange import Exchange, SharedExchange, TcpExchange, introduction, wait_for_reply
from squall.rules.adagrad import Adagrad
from squall.rules.apply import SliceState
from squall.shard.books import SliceBook
from squall.shard.server import ShardServer
from squall.wire.channel import Channel
from squall.wire.connection import Connection
from squall.wire.control import AttachWorker, Finish, Ready
from squall.wire.hello import new_token
from squall.wire.joining import JoinCoordinator
from squall.wire.listener import Door, Listener
from squall.wire.memory import SharedArena
from squall.wire.messages import Fetch, Push
from squall.wire.tcp import BUFFER_BYTES, Caller

RULE = Adagrad(learning_rate=0.01)


class Flat(nn.Module):
    """One parameter of so many elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))


def layout_of(numel: int) -> Layout:
    """So many float32 on one shard."""
    return Layout.balanced(ParameterSpace.of(Flat(numel)), num_shards=1)


class ServedShard:
    """A shard with Adagrad, in a fork of this process, and a worker's end of the exchange with it, here.

    Args:
        transport: "shared" or "tcp".
        folder: an empty one, for its ledger.
    """

    def __init__(self, layout: Layout, transport: str, folder: Path) -> None:
        self._layout = layout
        self._token = new_token()
        here, there = Channel.pair()
        coordinator, its_coordinator = Channel.pair()
        doors = {name: Listener.open("127.0.0.1:0") for name in ("shard0", "coordinator")}
        self._address = doors["shard0"].address
        self._pid = os.fork()
        if self._pid == 0:
            tcp: dict[str, object] = {
                "token": self._token,
                "address": self._address,
                "addresses": {"coordinator": doors["coordinator"].address},
            }
            fds = doors["shard0"].fds if transport == "tcp" else [its_coordinator.fileno()]
            _serve(layout, folder, Connection(there, "launcher"), fds, tcp if transport == "tcp" else None)
        there.close()
        self._launcher = Connection(here, "shard0")
        self._kept = [coordinator, its_coordinator]
        if transport == "tcp":
            door = Door(doors["coordinator"], self._token, (JoinCoordinator,))
            while not (guests := door.step()):
                time.sleep(0.001)
            self._guest = guests[0].welcome()
        received = self._launcher.receive()
        assert received is not None
        assert isinstance(received[0], Ready)
        self.exchange = self._tcp() if transport == "tcp" else self._shared()
        self._requests = 0
        self._version = 0

    def step(self) -> None:
        """A push, applied, and the fetch of what came of it."""
        self._version += 1
        self._push(position=self._version, into=0)

    def push_again(self) -> None:
        """A push that the shard has had already."""
        self._push(position=1, into=None)

    def fetch(self) -> None:
        self._requests += 1
        self.exchange.send(Fetch(request=self._requests, into=0))
        wait_for_reply(self.exchange)

    def close(self) -> None:
        self._launcher.send(Finish())
        self.exchange.close()
        os.waitpid(self._pid, 0)

    def _push(self, position: int, into: int | None) -> None:
        self._requests += 1
        push = Push(
            request=self._requests,
            block=Block(stage=0, epoch=0, first=position, stop=position + 1),
            attempt=1,
            minibatches=1,
            examples=1,
            based_on=(0,),
            absent=(),
            not_finite="",
            into=into,
        )
        self.exchange.send(push)
        wait_for_reply(self.exchange)

    def _tcp(self) -> Exchange:
        caller = Caller(
            me="replica0.0", peer="shard0", address=self._address, token=self._token, patience_s=10.0
        )
        me = introduction("replica0.0", self._layout, 0, replica=0)
        return TcpExchange("shard0", caller, me, ExchangePlan(self._layout.slices_of(0), 1))

    def _shared(self) -> Exchange:
        plan = ExchangePlan(self._layout.slices_of(0), 1)
        arena = SharedArena.create(plan.num_bytes)
        near, far = Channel.pair()
        told = AttachWorker(replica=0, partition=0, incarnation=0, name="replica0.0", num_gradients=1)
        self._launcher.send(told, [far.fileno(), arena.fd])
        far.close()
        return SharedExchange(Connection(near, "shard0"), arena, plan)


def _serve(
    layout: Layout, folder: Path, launcher: Connection, fds: list[int], tcp: dict[str, object] | None
) -> None:
    torch.set_grad_enabled(False)
    (folder / "ledger").mkdir(exist_ok=True)
    states = [SliceState.create(spec, torch.zeros(spec.size), RULE) for spec in layout.slices]
    books = tuple(SliceBook.new(spec.slice, spec.partition) for spec in layout.slices)
    settings = {
        "shard": 0,
        "incarnation": 0,
        "began": time.monotonic(),
        "directory": str(folder),
        "record": False,
        "tcp": tcp,
    }
    load = {"layout": layout, "rule": RULE, "states": states, "books": books}
    ShardServer(settings, load, launcher, fds).run()
    os._exit(0)


class RawSocket:
    """A peer in a fork of this process that receives as many bytes into the same memory, and answers with one."""

    def __init__(self, numel: int) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self._pid = os.fork()
        if self._pid == 0:
            self._receive(listening, numel)
        self._socket = socket.create_connection(listening.getsockname())
        self._data = torch.ones(numel).numpy().data.cast("B")

    def send(self) -> None:
        self._socket.sendall(self._data)
        self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self._pid, 0)

    @staticmethod
    def _receive(listening: socket.socket, numel: int) -> None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        connection, _ = listening.accept()
        memory = torch.zeros(numel).numpy().data.cast("B")
        while True:
            done = 0
            while done < len(memory):
                count = connection.recv_into(memory[done:])
                if not count:
                    os._exit(0)
                done += count
            connection.sendall(b"a")


class Bare:
    """The arithmetic of a step in one process: one fused pass, the gradient copied in, the values copied out."""

    def __init__(self, numel: int) -> None:
        self._vectors = [torch.full((numel,), 0.5) for _ in range(5)]

    @torch.no_grad()
    def step(self) -> None:
        params, gradient, total, source, target = self._vectors
        gradient.copy_(source)
        RULE.update_(params, gradient, (total,), learning_rate=0.01, step=1)
        target.copy_(params)
