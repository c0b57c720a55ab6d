"""Messages between two processes of one machine, each whole or not at all, with file descriptors.

A channel is one end of a Unix socket of type SOCK_SEQPACKET. One thread uses an end at a time.
"""

import array
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from squall.errors import LocalProtocolError, RemoteProtocolError

MAX_MESSAGE_BYTES = 4 << 20
MAX_FDS = 253  # what Linux lets one message carry

_BUFFER_BYTES = 2 * MAX_MESSAGE_BYTES
_KERNEL_BYTES = 1024  # what the kernel keeps of a send buffer for its own books: 32 today
_FD_BYTES = array.array("i").itemsize
_TRUNCATED = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)  # as int: the enum's operators cost a microsecond
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_AT_ONCE = _CLOSE_ON_EXEC | int(socket.MSG_DONTWAIT)
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * _FD_BYTES)


class Channel:
    """One end of a connection between two processes.

    Attributes:
        max_message_bytes: the most that `send` takes: 4 MiB, or what the system grants (`net.core.wmem_max`).
        bytes_sent, messages_sent, bytes_received, messages_received: since the start.
        is_ended: the peer has closed its end or is dead, and everything that it sent has been received.

    >>> near, far = Channel.pair()
    >>> near.send(b"hello")
    >>> far.receive()
    (b'hello', ())
    >>> near.close()
    >>> far.receive(), far.is_ended
    (None, True)
    >>> far.close()
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)  # less where the system says so
        connection.setblocking(True)
        granted_bytes = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.max_message_bytes = min(MAX_MESSAGE_BYTES, granted_bytes - _KERNEL_BYTES)
        self._buffer = np.empty(MAX_MESSAGE_BYTES, dtype=np.uint8).data  # takes no memory until written to
        self.bytes_sent = self.messages_sent = 0
        self.bytes_received = self.messages_received = 0
        self.is_ended = False

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Two connected ends, of which one is meant for another process."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(near), cls(far)

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        """The end that `fd` is; owns `fd` from here on.

        Raises:
            RemoteProtocolError: `fd` is something else.
        """
        try:
            connection = socket.socket(fileno=fd)
        except OSError as error:
            os.close(fd)
            raise RemoteProtocolError(reason=f"expected one end of a channel, but got {error}") from error
        if (connection.family, connection.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            connection.close()
            raise RemoteProtocolError(
                reason=f"expected one end of a channel, but got a socket of {connection.type}"
            )
        return cls(connection)

    def send(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> None:
        """Send one message; waits while the peer is too slow. The descriptors are copied and stay ours, too.

        Raises:
            ConnectionError: the peer is gone.
            LocalProtocolError: nothing, too much, or too many descriptors.
        """
        num_bytes = len(data)
        if not 0 < num_bytes <= self.max_message_bytes or len(fds) > MAX_FDS:
            raise LocalProtocolError(
                reason=f"expected 1 to {self.max_message_bytes} bytes and at most {MAX_FDS} descriptors a message, "
                f"but got {num_bytes} bytes and {len(fds)} descriptors. What is larger goes into a SharedArena."
            )
        if fds:
            socket.send_fds(self._socket, [data], list(fds))
        else:
            self._socket.send(data)
        self.bytes_sent += num_bytes
        self.messages_sent += 1

    def receive(self) -> tuple[bytes, tuple[int, ...]] | None:
        """Wait for a message and return it with its descriptors, which are ours now; None at the end.

        Raises:
            RemoteProtocolError: more than a message may hold.
        """
        return self._receive(_CLOSE_ON_EXEC)

    def try_receive(self) -> tuple[bytes, tuple[int, ...]] | None:
        """Return a message that is already there; None where there is none, or at the end (`is_ended`)."""
        try:
            return self._receive(_AT_ONCE)
        except BlockingIOError:
            return None

    def _receive(self, how: int) -> tuple[bytes, tuple[int, ...]] | None:
        while not self.is_ended:
            try:
                num_bytes, ancillary, flags, _ = self._socket.recvmsg_into(
                    [self._buffer], _ANCILLARY_BYTES, how
                )
            except ConnectionResetError:
                continue  # the peer closed before it read all: said once, before what it sent us earlier
            fds = _descriptors(ancillary) if ancillary else ()
            if flags & _TRUNCATED:
                _close_all(fds)
                raise RemoteProtocolError(
                    reason=f"expected at most {MAX_MESSAGE_BYTES} bytes and {MAX_FDS} descriptors"
                )
            if num_bytes:
                self.bytes_received += num_bytes
                self.messages_received += 1
                return self._buffer[:num_bytes].tobytes(), fds
            _close_all(fds)
            self.is_ended = True
        return None

    def arrived(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """A message that is already there, as a list of one; `is_ended` at the end."""
        received = self.try_receive()
        return [] if received is None else [received]

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the peer still gets what was sent. Twice does nothing."""
        self._socket.close()
        self.is_ended = True


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return tuple(fds)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
