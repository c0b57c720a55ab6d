"""The process of the door: one address at which loops of users' own learn what is served, and where.

To the shards it is their coordinator, who never holds them and never refuses a block.
"""

import contextlib
import json
import select
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from squall.blocks import Block
from squall.errors import RemoteProtocolError
from squall.model.layout import Layout
from squall.wire.connection import Connection
from squall.wire.control import Finish, Ready
from squall.wire.joining import Farewell, JoinCoordinator, JoinLoop, Served, ServedSlice, ServedTensor
from squall.wire.listener import Door, Guest, Listener
from squall.wire.messages import Diverged

TICK_S = 0.5
MOST_SESSIONS = 1 << 20
"""A session is the epoch in the names of its blocks, and the ledger's numbers have so many bits for that."""


def serve(settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int]) -> None:
    """Serve until the launcher says to finish.

    Args:
        settings: "tcp": "token" and "address"; "shards": their addresses; "life".
        load: "layout" and "rule", as it describes itself.
        launcher: the connection to it.
        fds: sockets that listen.
    """
    LoopDoor(settings, load, launcher, fds).run()


def served(layout: Layout, rule: Mapping[str, Any], shards: Sequence[str], *, life: int) -> Served:
    """What every loop is told; the session is still to be said."""
    return Served(
        life=life,
        session=0,
        tensors=tuple(
            ServedTensor(name=spec.name, aliases=spec.aliases, shape=spec.shape, dtype=spec.dtype)
            for spec in layout.space.tensors
        ),
        slices=tuple(
            ServedSlice(shard=spec.shard, dtype=spec.dtype, start=spec.start, stop=spec.stop)
            for spec in layout.slices
        ),
        shards=tuple(shards),
        rule=json.dumps(rule),
    )


class LoopDoor:
    """Lets loops in, numbers them, and tells them when all is over."""

    def __init__(
        self, settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int]
    ) -> None:
        tcp = settings["tcp"]
        self._served = served(load["layout"], load["rule"], settings["shards"], life=settings["life"])
        self._door = Door(Listener.from_fds(fds, tcp["address"]), tcp["token"], (JoinCoordinator, JoinLoop))
        self._launcher = launcher
        self._num_sessions = 0
        self._over: Farewell | None = None
        self._shards: dict[int, Connection] = {}  # by descriptor
        self._loops: dict[int, Connection] = {}
        self._epoll = select.epoll()

    def run(self) -> None:
        for end in (self._launcher, self._door):
            self._epoll.register(end.fileno(), select.EPOLLIN)
        self._launcher.send(Ready())
        while True:
            for fd, _ in self._epoll.poll(TICK_S):
                if fd == self._launcher.fileno():
                    if self._is_finished():
                        self._end(Farewell(why="the servers were closed"))
                        return
                elif fd == self._door.fileno():
                    for guest in self._door.step():
                        self._let_in(guest)
                elif fd in self._shards:
                    self._read_shard(fd)
                elif fd in self._loops:
                    self._read_loop(fd)
            self._door.tick()

    def _is_finished(self) -> bool:
        received = self._launcher.receive()
        return received is None or isinstance(received[0], Finish)

    def _let_in(self, guest: Guest) -> None:
        told = guest.introduction
        if isinstance(told, JoinCoordinator):
            self._keep(self._shards, Connection(guest.stream(self._epoll), f"shard{told.number}"))
            return
        is_known = told.life == self._served.life and 0 <= told.session < self._num_sessions
        session = told.session if is_known else self._num_sessions
        if session == MOST_SESSIONS:
            guest.turn_away(f"expected at most {MOST_SESSIONS} sessions; start the servers anew")
            return
        self._num_sessions = max(self._num_sessions, session + 1)
        loop = Connection(guest.stream(self._epoll), f"replica{session}.0")
        self._keep(self._loops, loop)
        self._tell(loop, msgspec.structs.replace(self._served, session=session))
        if self._over is not None:
            self._tell(loop, self._over)

    def _keep(self, among: dict[int, Connection], connection: Connection) -> None:
        among[connection.fileno()] = connection
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _read_shard(self, fd: int) -> None:
        shard, is_over = self._shards[fd], False
        try:
            arrived = shard.arrived()
        except RemoteProtocolError as error:  # its name and the token are no proof that it is a shard
            print(f"closed the connection of {shard.name}: {error}", flush=True)
            arrived, is_over = [], True
        for message, _ in arrived:
            if isinstance(message, Diverged):
                block: Block = message.block
                self._end(
                    Farewell(
                        why="an update left a tensor that is not finite",
                        tensor=message.tensor,
                        block=f"push {block.first} of session {block.epoch}",
                    )
                )
        if shard.is_ended or is_over:
            self._part(self._shards, fd)
            self._end(Farewell(why=f"{shard.name} is gone"))

    def _read_loop(self, fd: int) -> None:
        """A loop has nothing to say: it leaves, or breaks the protocol."""
        loop = self._loops[fd]
        try:
            is_over = bool(loop.arrived()) or loop.is_ended
        except RemoteProtocolError:
            is_over = True
        if is_over:
            self._part(self._loops, fd)

    def _part(self, among: dict[int, Connection], fd: int) -> None:
        connection = among.pop(fd)
        self._epoll.unregister(fd)
        connection.close()

    def _end(self, farewell: Farewell) -> None:
        if self._over is None:
            self._over = farewell
            for loop in self._loops.values():
                self._tell(loop, farewell)

    def _tell(self, loop: Connection, message: Served | Farewell) -> None:
        with contextlib.suppress(ConnectionError):  # its end is read in its turn
            loop.send(message)
