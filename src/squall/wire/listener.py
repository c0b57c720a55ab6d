"""A door: listens, lets in who proves the cluster's token, and never waits for anyone.

A caller that has not proved itself costs a socket and `hello.GREETING_BYTES` of memory; there are at most
`MAX_STRANGERS` of them, and each has `HELLO_S` to say what is expected. What is refused is counted by kind.
"""

import contextlib
import errno
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

from squall.errors import ConfigError, RemoteProtocolError
from squall.wire.address import Address, SocketAddress
from squall.wire.connection import CODEC
from squall.wire.hello import DoorHello, RefusedError, check_token
from squall.wire.joining import Unwelcome, Welcome
from squall.wire.stream import HEADER, StreamChannel, frame, size_of
from squall.wire.tcp import tune

MAX_STRANGERS = 128
HELLO_S = 10.0
MAX_INTRODUCTION_BYTES = 4096
BACKLOG = 1024

_BIND_ATTEMPTS = 20
_MAX_ACCEPTED = 64  # at one event, so that nobody else waits


class Listener:
    """Sockets that listen on every address of one loopback host, all at one port.

    Attributes:
        address: where others reach it.
        port: that it listens at.

    >>> listener = Listener.open("localhost:0")
    >>> listener.address == f"localhost:{listener.port}", listener.port > 0
    (True, True)
    >>> listener.close()
    """

    def __init__(self, sockets: Sequence[socket.socket], address: str) -> None:
        self.sockets = list(sockets)
        self.address = address
        self.port: int = self.sockets[0].getsockname()[1]

    @classmethod
    def open(cls, bind: str, advertise: str | None = None) -> Self:
        """Listen.

        Args:
            bind: where; port 0 takes any that is free.
            advertise: what others are told, if they must go another way; port 0 stands for the one taken.

        Raises:
            ConfigError: the host is not this machine's alone, or the port is taken.
        """
        where = Address.parse(bind)
        found = where.resolve_loopback()
        sockets = _bound(found, where)
        port = sockets[0].getsockname()[1]
        told = Address.parse(advertise) if advertise else where
        return cls(sockets, str(Address(told.host, told.port or port)))

    @property
    def fds(self) -> list[int]:
        return [one.fileno() for one in self.sockets]

    @classmethod
    def from_fds(cls, fds: Sequence[int], address: str) -> Self:
        """The same in another process, which was handed the descriptors."""
        return cls([socket.socket(fileno=fd) for fd in fds], address)

    def close(self) -> None:
        for one in self.sockets:
            one.close()


def _bound(found: Sequence[SocketAddress], where: Address) -> list[socket.socket]:
    for _ in range(_BIND_ATTEMPTS):
        sockets: list[socket.socket] = []
        port = where.port
        try:
            for family, address in found:
                sockets.append(_listening(family, (address[0], port, *address[2:])))
                port = sockets[0].getsockname()[1]  # one port for all families
        except OSError as error:
            for one in sockets:
                one.close()
            if where.port or error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    subject=f"address {where}",
                    expected="an address and port to listen at",
                    got=error.strerror or str(error),
                    remedy="Take port 0 for any that is free.",
                ) from error
            continue
        return sockets
    raise ConfigError(subject=f"address {where}", expected="a port free in all families", got="none in 20")


def _listening(family: int, address: Any) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
        one.listen(BACKLOG)
    except OSError:
        one.close()
        raise
    return one


class Guest:
    """A caller that has proved the token and said who it is: `welcome` it or `turn_away`.

    Attributes:
        introduction: what it said.
        peer: its address, for logs.
        bytes_received, bytes_sent: so far.
    """

    def __init__(
        self,
        connection: socket.socket,
        introduction: Any,
        peer: str,
        counts: tuple[int, int],
        refused: Counter[str],
    ) -> None:
        self._socket = connection
        self.introduction = introduction
        self.peer = peer
        self.bytes_received, self.bytes_sent = counts
        self._refused = refused

    def welcome(self, link: int = 0, epoch: int = 0) -> socket.socket:
        """Let it in; the connection is the caller's from here on."""
        data = frame(CODEC.encode(Welcome(link=link, epoch=epoch)))
        with contextlib.suppress(OSError):  # gone already: whoever reads it will see
            self.bytes_sent += self._socket.send(data)  # first bytes after 77: they fit
        return self._socket

    def turn_away(self, reason: str) -> None:
        """Tell it why not, and close."""
        self._refused["introduction"] += 1
        print(f"turned {self.peer} away: {reason:.300}", flush=True)
        with contextlib.suppress(OSError):
            self._socket.send(frame(CODEC.encode(Unwelcome(reason=reason))))
        self._socket.close()

    def stream(self, epoll: select.epoll, link: int = 0, epoch: int = 0) -> StreamChannel:
        """Let it in, as a channel for messages."""
        channel = StreamChannel(self.welcome(link, epoch), epoll)
        channel.bytes_received, channel.bytes_sent = self.bytes_received, self.bytes_sent
        return channel


class _Stranger:
    """A caller on its way through the hello."""

    def __init__(self, connection: socket.socket, peer: str, token: bytes, until: float) -> None:
        self.connection, self.peer, self.until = connection, peer, until
        self._hello = DoorHello(token)
        self._data = bytearray()
        self._wanted = self._hello.num_wanted
        self._has_header = False
        self.received = self.sent = 0

    def read(self) -> Any | None:
        """Take what is there, and no byte more than is expected; an introduction when it is whole.

        Raises:
            RefusedError: it is not one of ours.
        """
        while True:
            try:
                data = self.connection.recv(self._wanted - len(self._data))
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            if not data:
                raise RefusedError(kind="hello", reason=f"it left after {self.received} bytes")
            self.received += len(data)
            self._data += data
            if len(self._data) == self._wanted and (introduction := self._take()) is not None:
                return introduction

    def _take(self) -> Any | None:
        if self._hello.num_wanted:
            self.sent += self.connection.send(self._hello.take(bytes(self._data)))
            self._data.clear()
            self._wanted = self._hello.num_wanted or HEADER.size
            return None
        try:
            if not self._has_header:
                self._has_header = True
                self._wanted = size_of(self._data, MAX_INTRODUCTION_BYTES)
                self._data.clear()
                return None
            return CODEC.decode(bytes(self._data))
        except RemoteProtocolError as error:
            raise RefusedError(kind="introduction", reason=error.reason) from error


class Door:
    """Accepts callers for one role.

    Args:
        listener: taken over.
        token: the cluster's.
        expects: the introductions that belong here.
        refused: counts the callers that were not let in, by kind (`RefusedError.kind`).

    Register `fileno` with an epoll of the caller's own, call `step` at its events, and `tick` now and then.
    """

    def __init__(
        self,
        listener: Listener,
        token: str,
        expects: tuple[type, ...],
        refused: Counter[str] | None = None,
    ) -> None:
        self._listener = listener
        self._token = check_token(token)
        self._expects = expects
        self.refused: Counter[str] = Counter() if refused is None else refused
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, oldest first
        self._listening = {one.fileno(): one for one in listener.sockets}
        self._epoll = select.epoll()
        for fd, one in self._listening.items():
            one.setblocking(False)
            self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def step(self) -> list[Guest]:
        """Go on with everyone who has said something; return who is through."""
        guests = []
        for fd, _ in self._epoll.poll(0):
            if fd in self._listening:
                self._accept(self._listening[fd])
            elif fd in self._strangers and (guest := self._read(fd)) is not None:
                guests.append(guest)
        self.tick()
        return guests

    def tick(self) -> None:
        """Close connections that have said too little for too long."""
        now = time.monotonic()
        for fd, stranger in list(self._strangers.items()):
            if stranger.until > now:
                break
            self._refuse(fd, RefusedError(kind="silent", reason=f"it said too little in {HELLO_S:g} s"))

    def close(self) -> None:
        for stranger in self._strangers.values():
            stranger.connection.close()
        self._strangers.clear()
        self._listener.close()
        self._epoll.close()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, peer = listening.accept()
            except OSError:  # none is left, or it has gone again, or descriptors are short
                return
            connection.setblocking(False)
            tune(connection)
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                self._refuse(oldest, RefusedError(kind="crowded", reason="too many others came after it"))
            fd = connection.fileno()
            self._strangers[fd] = _Stranger(
                connection, str(Address(*peer[:2])), self._token, time.monotonic() + HELLO_S
            )
            self._epoll.register(fd, select.EPOLLIN)

    def _read(self, fd: int) -> Guest | None:
        stranger = self._strangers[fd]
        try:
            introduction = stranger.read()
            if introduction is None:
                return None
            if not isinstance(introduction, self._expects):
                raise RefusedError(
                    kind="introduction", reason=f"a {type(introduction).__name__} does not belong here"
                )
        except RefusedError as error:
            self._refuse(fd, error)
            return None
        except OSError as error:
            self._refuse(fd, RefusedError(kind="hello", reason=str(error)))
            return None
        self._forget(fd)
        counts = (stranger.received, stranger.sent)
        return Guest(stranger.connection, introduction, stranger.peer, counts, self.refused)

    def _refuse(self, fd: int, error: RefusedError) -> None:
        stranger = self._strangers[fd]
        self.refused[error.kind] += 1
        print(f"refused a connection from {stranger.peer} ({error.kind}): {error.reason:.300}", flush=True)
        with contextlib.suppress(OSError):
            stranger.connection.send(error.answer)
        self._forget(fd)
        stranger.connection.close()

    def _forget(self, fd: int) -> None:
        del self._strangers[fd]
        self._epoll.unregister(fd)
