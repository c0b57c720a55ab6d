"""How fast memory is copied, with one thread and with two, and how fast bytes go to another process and back."""

import contextlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from squall.doctor import echo

COPY_BYTES = 64_000_000
SENT_BYTES = 32_000_000
REPEATS = 7
ROUND_TRIPS = 300
PATIENCE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Medians of a few tries.

    Attributes:
        copy_bytes_per_s, copy_by_two_bytes_per_s: a copy of 64 MB, by one thread, and half of it by each of two.
        unix_round_trip_s, tcp_round_trip_s: one byte to another process and back, over a Unix socket and over loopback.
        unix_bytes_per_s, tcp_bytes_per_s: 32 MB one way, and one byte back.
    """

    copy_bytes_per_s: float
    copy_by_two_bytes_per_s: float
    unix_round_trip_s: float
    tcp_round_trip_s: float
    unix_bytes_per_s: float
    tcp_bytes_per_s: float


def measure(*, copy_bytes: int = COPY_BYTES, sent_bytes: int = SENT_BYTES) -> Speeds:
    """Measure; takes about a second on a quiet machine.

    Raises:
        OSError: the system gives no sockets or processes.
    """
    by_one, by_two = _copies(copy_bytes)
    with _peer(*socket.socketpair(), sent_bytes) as near:
        unix_s, unix_rate = _round_trip_s(near), _rate(near, sent_bytes)
    with _peer(*_tcp_pair(), sent_bytes) as near:
        tcp_s, tcp_rate = _round_trip_s(near), _rate(near, sent_bytes)
    return Speeds(
        copy_bytes_per_s=by_one,
        copy_by_two_bytes_per_s=by_two,
        unix_round_trip_s=unix_s,
        tcp_round_trip_s=tcp_s,
        unix_bytes_per_s=unix_rate,
        tcp_bytes_per_s=tcp_rate,
    )


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The median time that something takes; it is done once before, for what only the first time costs."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _copies(num_bytes: int) -> tuple[float, float]:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    half = num_bytes // 2

    def by_two() -> None:
        # NumPy lets other threads run while it copies.
        other = threading.Thread(target=np.copyto, args=(target[:half], source[:half]))
        other.start()
        np.copyto(target[half:], source[half:])
        other.join()

    one_s = seconds(lambda: np.copyto(target, source), REPEATS)
    return num_bytes / one_s, num_bytes / seconds(by_two, REPEATS)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


@contextlib.contextmanager
def _peer(near: socket.socket, far: socket.socket, num_bytes: int) -> Iterator[socket.socket]:
    """Give the far end to a process that echoes; ends it with the block."""
    with near:
        process = subprocess.Popen(
            [sys.executable, "-I", echo.__file__, str(far.fileno()), str(num_bytes)],
            pass_fds=(far.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        far.close()
        near.settimeout(PATIENCE_S)
        try:
            yield near
        finally:
            near.close()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _round_trip_s(near: socket.socket) -> float:
    def there_and_back() -> None:
        near.sendall(b"\0")
        near.recv(1)

    return seconds(there_and_back, ROUND_TRIPS)


def _rate(near: socket.socket, num_bytes: int) -> float:
    message = b"\1" * (num_bytes + 1)

    def there() -> None:
        near.sendall(message)
        near.recv(1)

    return num_bytes / seconds(there, REPEATS)
