"""Waiting for descriptors, however many the process has open: `select.select` takes none above 1,023."""

import math
import select
from collections.abc import Iterable
from typing import Protocol, TypeVar


class HasDescriptor(Protocol):
    """A socket, a channel, or whatever else has one."""

    def fileno(self) -> int: ...


End = TypeVar("End", bound=int | HasDescriptor)


def wait(ends: Iterable[End], timeout_s: float | None) -> list[End]:
    """Wait until one of `ends` has something to read or has ended; return those, in the order given.

    Args:
        ends: a few; a server with many registers each with an epoll of its own.
        timeout_s: after which the list is empty [seconds]; 0 only looks, None waits for ever.

    >>> import socket
    >>> near, far = socket.socketpair()
    >>> wait([near, far], timeout_s=0)
    []
    >>> near.send(b"x")
    1
    >>> wait([near, far], timeout_s=0) == [far]
    True
    >>> near.close(), far.close()
    (None, None)
    """
    poll = select.poll()
    by_fd = {end if isinstance(end, int) else end.fileno(): end for end in ends}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))}
    return [end for fd, end in by_fd.items() if fd in ready]
