"""Messages over TCP, with the face of a `Channel`: each whole or not at all, and no descriptors.

A header of six bytes says how long each message is; that is checked before anything is kept::

    byte   0       1         2            6
           'S'     version   num_bytes    the message (`squall.wire.codec`)
           uint8   uint8     uint32
"""

import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence

from squall.errors import LocalProtocolError, RemoteProtocolError

VERSION = 2
MAGIC = ord("S")
HEADER = struct.Struct("<BBI")
MAX_FRAME_BYTES = 4 << 20
MAX_QUEUED_BYTES = 4 << 20

_READ_BYTES = 1 << 16


def frame(message: bytes | memoryview) -> bytes:
    """The bytes of one message with its header."""
    return HEADER.pack(MAGIC, VERSION, len(message)) + message


def size_of(header: bytes | bytearray, most_bytes: int) -> int:
    """How many bytes the message behind a header has.

    Raises:
        RemoteProtocolError: it is no header, of another version, or promises nothing or too much.
    """
    magic, version, num_bytes = HEADER.unpack_from(header)
    if (magic, version) != (MAGIC, VERSION) or not 0 < num_bytes <= most_bytes:
        raise RemoteProtocolError(
            reason=f"expected a message of at most {most_bytes} bytes in wire version {VERSION}, "
            f"but got the header {bytes(header[: HEADER.size]).hex(' ')}"
        )
    return int(num_bytes)


class StreamChannel:
    """One end of a TCP connection that has been authenticated.

    Args:
        connection: taken over.
        epoll: where a server, which must never wait, has registered this connection: what the peer does not take
            yet is kept, up to `MAX_QUEUED_BYTES`, and this epoll told to look for room; call `arrived` at every
            event. None: of a client, whose `send` waits.

    Attributes:
        bytes_sent, messages_sent, bytes_received, messages_received: since the connection began, hello included.
        is_ended: the peer has closed its end or is gone, and everything that it sent has been received.
    """

    def __init__(
        self,
        connection: socket.socket,
        epoll: select.epoll | None = None,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._socket = connection
        self._max_frame_bytes = max_frame_bytes
        connection.setblocking(False)
        self._epoll = epoll
        self._fd = connection.fileno()
        self._in = bytearray()
        self._out = bytearray()
        self._is_kept = False  # something of what was sent
        self._frames: deque[bytes] = deque()
        self.bytes_sent = self.messages_sent = 0
        self.bytes_received = self.messages_received = 0
        self.is_ended = False
        self._has_closed = False  # the peer, perhaps before we have taken all frames

    def send(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> None:
        """Send one message.

        Raises:
            ConnectionError: the peer is gone, or (of a server) takes nothing any more.
        """
        if fds:
            raise LocalProtocolError(reason="expected no descriptors over TCP")
        self._out += frame(data)
        self.messages_sent += 1
        self._flush()
        while self._out and self._epoll is None:
            self._wait(select.POLLOUT, None)
            self._flush()
        if len(self._out) > MAX_QUEUED_BYTES:
            self.shut()
            raise ConnectionError(f"the peer has left {len(self._out)} bytes untaken")

    def receive(self) -> tuple[bytes, tuple[int, ...]] | None:
        """Wait for a message; None at the end.

        Raises:
            RemoteProtocolError: what arrives is no message.
        """
        return self.receive_within(None)

    def receive_within(self, timeout_s: float | None) -> tuple[bytes, tuple[int, ...]] | None:
        """Wait so long for a message; None if none came whole (`is_ended` tells an end)."""
        while not self._frames and not self._has_closed and self._wait(select.POLLIN, timeout_s):
            self._read()
        return self._next()

    def try_receive(self) -> tuple[bytes, tuple[int, ...]] | None:
        """A message that is there whole; None where there is none, or at the end (`is_ended`)."""
        if not self._frames and not self._has_closed:
            self._read()
        return self._next()

    def arrived(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """Send on what has been kept, and take what is there whole, of one read."""
        try:
            self._flush()
        except ConnectionError:
            self._has_closed = True
        if not self._has_closed:
            self._read()
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        self.is_ended |= self._has_closed
        return frames

    def fileno(self) -> int:
        return self._fd

    def detach(self) -> socket.socket:
        """The connection itself, for whoever goes on with it; this end is over."""
        self._fd, self.is_ended = -1, True
        return self._socket

    def shut(self) -> None:
        """End the connection under whoever waits for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. Twice does nothing."""
        self._fd = -1
        self._socket.close()
        self.is_ended = True

    def _next(self) -> tuple[bytes, tuple[int, ...]] | None:
        if self._frames:
            self.messages_received += 1
            return self._frames.popleft(), ()
        self.is_ended |= self._has_closed
        return None

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # reset, timed out: however it ended
            data = b""
        if not data:
            self._has_closed = True
            return
        self.bytes_received += len(data)
        self._in += data
        self._cut()

    def _cut(self) -> None:
        while len(self._in) >= HEADER.size:
            stop = HEADER.size + size_of(self._in, self._max_frame_bytes)
            if len(self._in) < stop:
                return
            self._frames.append(bytes(self._in[HEADER.size : stop]))
            del self._in[:stop]

    def _flush(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(self._out)
            except BlockingIOError:
                break
            self.bytes_sent += sent
            del self._out[:sent]
        if self._epoll is not None and bool(self._out) != self._is_kept:
            self._is_kept = bool(self._out)
            self._epoll.modify(self._fd, select.EPOLLIN | (select.EPOLLOUT if self._is_kept else 0))

    def _wait(self, what: int, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._fd, what)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
