"""Tensors over TCP: a header, then raw little-endian bytes straight from and into the tensors' memory.

    byte   0      4          12           20
           'BULK' request    num_bytes    the slices' elements, one behind the other
           4s     uint64     uint64

`request` is that of the Push whose gradient this is, or of the Fetch or Push whose values these are. The receiver
knows how many bytes must come; another number closes the connection before anything is read.
"""

import socket
import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from squall.errors import RemoteProtocolError

HEADER = struct.Struct("<4sQQ")
MAGIC = b"BULK"

_MAX_CALL_BYTES = 64 << 20  # of one system call: how long a count of traffic may lag behind
_MAX_VIEWS = 64  # of one system call; Linux takes 1024


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor as bytes, shared with it."""
    return tensor.detach().view(torch.uint8).numpy().data


class Cursor:
    """How far one transfer has come in a list of memory ranges.

    Attributes:
        num_done, num_bytes: so far, and in all.
    """

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._at = 0  # in the first view
        self.num_done = 0
        self.num_bytes = sum(map(len, self._views))

    @property
    def is_done(self) -> bool:
        return not self._views

    def ahead(self) -> list[memoryview]:
        """What the next call works on."""
        found: list[memoryview] = []
        room = _MAX_CALL_BYTES
        for view in self._views[:_MAX_VIEWS]:
            found.append(view[self._at if not found else 0 :][:room])
            room -= len(found[-1])
            if not room:
                break
        return found

    def advance(self, count: int) -> None:
        self.num_done += count
        while count:
            step = min(count, len(self._views[0]) - self._at)
            self._at += step
            count -= step
            if self._at == len(self._views[0]):
                del self._views[0]
                self._at = 0

    def replace(self, views: Sequence[memoryview]) -> None:
        """Go on at the same place in other memory of the same sizes."""
        fresh = Cursor(views)
        fresh.advance(self.num_done)
        self._views, self._at = fresh._views, fresh._at


class Outgoing:
    """One transfer that is being sent.

    Attributes:
        num_sent: bytes so far, header included.
    """

    def __init__(self, request: int, views: Sequence[memoryview]) -> None:
        body = sum(map(len, views))
        self._header = Cursor([memoryview(HEADER.pack(MAGIC, request, body))])
        self.body = Cursor(views)
        self.num_sent = 0

    @property
    def is_done(self) -> bool:
        return self._header.is_done and self.body.is_done

    def send(self, connection: socket.socket) -> int:
        """Send what the connection takes in one call; return how many bytes.

        Raises:
            BlockingIOError: nothing now, of a connection that does not wait.
            ConnectionError: the peer is gone.
        """
        header = self._header.ahead()
        sent = connection.sendmsg([*header, *self.body.ahead()])
        part = min(sent, sum(map(len, header)))
        self._header.advance(part)
        self.body.advance(sent - part)
        self.num_sent += sent
        return sent


class Incoming:
    """One transfer that is being received.

    Attributes:
        num_received: bytes so far, header included.
    """

    def __init__(self, request: int, views: Sequence[memoryview]) -> None:
        self._request = request
        self._head = bytearray(HEADER.size)
        self._header = Cursor([memoryview(self._head)])
        self.body = Cursor(views)
        self.num_received = 0

    @property
    def is_done(self) -> bool:
        return self._header.is_done and self.body.is_done

    def receive(self, connection: socket.socket, flags: int = 0) -> int:
        """Receive what one call gives; return how many bytes, 0 at the end.

        Raises:
            BlockingIOError: nothing now, of a connection that does not wait.
            RemoteProtocolError: not the transfer that was expected. Nothing was written.
        """
        cursor = self.body if self._header.is_done else self._header
        count = connection.recv_into(cursor.ahead()[0], 0, flags)
        cursor.advance(count)
        self.num_received += count
        if cursor is self._header and cursor.is_done:
            self._check()
        return count

    def _check(self) -> None:
        magic, request, num_bytes = HEADER.unpack(self._head)
        if (magic, request, num_bytes) != (MAGIC, self._request, self.body.num_bytes):
            raise RemoteProtocolError(
                reason=f"expected {self.body.num_bytes} bytes for request {self._request}, "
                f"but got the header {bytes(self._head).hex(' ')}"
            )
